"""Attention with sinks against a softmax over one more score, in float64: values and the gradients of all that goes in.

On a CPU and, but for the kernels, as on a GPU (`test_flex.py`).
"""

import random
from types import SimpleNamespace

import pytest
import rounding
import torch
from architectures import write_model
from transformers import AutoModelForCausalLM
from trees import CPU, alone, as_trees, branched, forked, gradient_of, pairs

from prl.trainer.attention import tree_attention
from prl.trainer.blocks import BlockTree
from prl.trainer.flex import FlexTree
from prl.trainer.loss import default_loss
from prl.trainer.model import load_model

WINDOWS = [None, 1, 5]
HEADS = [(6, 2), (4, 4), (4, 1)]
"""Query heads and key heads."""
FAR = {torch.float64: 1e-12, torch.float32: 2e-5}


def drawn(rows: int, tokens: int, heads: tuple[int, int], dtype: torch.dtype) -> list[torch.Tensor]:
    """Query, key and value, laid out as those of a model, and sinks: some nearly unseen, some nearly all that is."""
    generator = torch.Generator().manual_seed(tokens)
    sizes = [(rows, tokens, count, 16) for count in (heads[0], heads[1], heads[1])]
    found = [torch.randn(size, generator=generator, dtype=dtype).transpose(1, 2) for size in sizes]
    return [each.requires_grad_() for each in (*found, torch.linspace(-4, 4, heads[0], dtype=dtype))]


def by_hand(query, key, value, sinks, seen, scale):
    """The same in float64, of `seen`, bool `[rows, tokens, tokens]`."""
    query, key, value, sinks = (each.double() for each in (query, key, value, sinks))
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    powers = torch.exp(scale * query @ key.mT) * seen[:, None]
    shares = powers / (powers.sum(-1) + sinks.exp()[:, None])[..., None]
    return (shares @ value).transpose(1, 2)


def check(inputs, found, seen, scale):
    """Assert that values and gradients are those by hand, and that sinks matter."""
    far = FAR[found.dtype]
    expected = by_hand(*inputs, seen, scale)
    without = by_hand(*inputs[:3], inputs[3] - torch.inf, seen, scale)
    assert (found - expected).abs().max() < far and (without - expected).abs().max() > 0.1
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(0), dtype=found.dtype)
    ours, theirs = (torch.autograd.grad((each * weights).sum(), inputs) for each in (found, expected))
    for one, other in zip(ours, theirs, strict=True):
        assert other.norm() > 0.1 and (one - other).norm() < far * other.norm()


@pytest.mark.parametrize("dtype", FAR)
@pytest.mark.parametrize("heads", HEADS[:2])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("tokens, longest", [(1, 2), (300, 200)])
@pytest.mark.parametrize("kind", [BlockTree, FlexTree])
def test_over_a_tree(graphs, kind, tokens, longest, window, heads, dtype):
    depths, starts, paths = branched(random.Random(tokens), tokens, longest)
    inputs = drawn(1, tokens, heads, dtype)
    tree = kind.of_row(depths, starts, CPU)
    found = tree.attend(*inputs[:3], window=window, scale=0.3, sinks=inputs[3])
    check(inputs, found, pairs(paths, window)[None], 0.3)
    assert bool(graphs) == (kind is FlexTree)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("window", WINDOWS)
def test_over_packed_rows(window, heads):
    """Two rows, of sequences of other lengths, with the masks that transformers makes; and one sequence without."""
    module = SimpleNamespace(num_key_value_groups=heads[0] // heads[1], is_causal=True, config=SimpleNamespace())
    seen = torch.stack([torch.block_diag(*map(torch.ones, [(5, 5), (9, 9)])), torch.ones(14, 14)]).tril()
    seen = (seen if window is None else seen.triu(1 - window)).bool()
    inputs = drawn(2, 14, heads, torch.float64)
    out, _ = tree_attention(module, *inputs[:3], seen[:, None], scaling=0.3, s_aux=inputs[3], sliding_window=window)
    check(inputs, out, seen, 0.3)
    out, _ = tree_attention(module, *inputs[:3], None, s_aux=inputs[3])
    check(inputs, out, torch.ones(2, 14, 14).tril().bool(), 0.25)


def test_gpt_oss_as_on_a_gpu_has_the_logprobs_and_gradients_of_sequences_alone(graphs, monkeypatch, tmp_path):
    """Those of transformers' own attention and its loop over experts; windows are shorter than the sequences."""
    monkeypatch.setattr("prl.trainer.tree.row_tree", FlexTree.of_row)
    path, samples = str(write_model(tmp_path, "gpt-oss", tied=False)), forked(random.Random(1))
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **eager)
    model = load_model(path, device=CPU)
    found, expected = as_trees(model, samples, 10_000)[0], alone(plain, samples)[0]
    assert graphs and (found - expected)[found != 0].abs().max() < rounding.of_model(plain, expected)
    gradients = [
        gradient_of(each, samples, logprobs, None, default_loss)
        for each, logprobs in ((model, found), (plain, expected))
    ]
    for name, gradient in gradients[1].items():
        assert 0 <= (gradients[0][name] - gradient).norm() <= 1e-5 * gradient.norm(), name
    assert sum(gradient.norm() > 0 for name, gradient in gradients[1].items() if name.endswith(".sinks")) == 2
