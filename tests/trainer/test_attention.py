"""Attention over rows of several blocks, and its gradients, against attention over all pairs of tokens."""

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from prl.trainer.tree.attention import Scores, tree_attention
from prl.trainer.tree.blocks import BlockTree
from prl.trainer.tree.flex import FlexTree

CPU = torch.device("cpu")
FORKED = ((0, 150), (135, 106), (5, 64))
"""The place on its path where each branch starts, and its tokens. Some blocks of 128 see all of another, some none."""
NAMES = ("results", "of queries", "of keys", "of values", "of sinks")


def row(branches):
    """Depths `[tokens]`, where branches start, and which tokens are on the path to each, bool `[tokens, tokens]`."""
    depths = np.concatenate([np.arange(place, place + tokens) for place, tokens in branches])
    on_path = torch.zeros(len(depths), len(depths), dtype=torch.bool)
    starts, path, start = [], [], 0
    for place, tokens in branches:
        own = list(range(start, start + tokens))
        for number, token in enumerate(own):
            on_path[token, path[:place] + own[: number + 1]] = True
        starts.append(start)
        path = path[:place] + own
        start += tokens
    return depths, starts, on_path


def of_all_pairs(query, key, value, *, visible, sinks):
    """Attention from the scores of all pairs; `visible` is bool `[..., queries, keys]`."""
    sharing = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(sharing, 1) for each in (key, value))
    scores = (query @ key.mT * query.shape[3] ** -0.5).masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), 3)
    return (scores.softmax(3)[..., : key.shape[2]] @ value).transpose(1, 2)


def with_gradients(attend, inputs, weight):
    leaves = [each.detach().requires_grad_() for each in inputs]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, weight)]


def check(make, branches, heads, window, has_sinks, dtype=torch.float32):
    """Compare a kind of tree with all pairs, on random numbers."""
    depths, starts, on_path = row(branches)
    tree = make(depths, starts, CPU)
    distance = torch.from_numpy(depths[:, None] - depths)
    visible = on_path & (distance < (window or len(depths)))
    draw = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, count, len(depths), 16, generator=draw).to(dtype) for count in (heads, 2, 2)]
    weight = torch.randn(1, len(depths), heads, 16, generator=draw).to(dtype)
    if has_sinks:
        inputs.append(torch.linspace(-0.5, 0.7, heads).to(dtype))

    def ours(query, key, value, sinks=None):
        return tree.attend(query, key, value, Scores(window, sinks=sinks))

    def exact(query, key, value, sinks=None):
        return of_all_pairs(query, key, value, visible=visible, sinks=sinks)

    results = with_gradients(ours, inputs, weight)
    expected = with_gradients(exact, [each.float() for each in inputs], weight.float())
    tolerance = 1e-4 if dtype == torch.float32 else 0.03
    for name, one, other in zip(NAMES, results, expected, strict=False):
        gap = (one.float() - other).norm(dim=-1) / (other.norm(dim=-1) + other.norm(dim=-1).mean())
        assert gap.max() < tolerance, name


@pytest.mark.parametrize(("window", "has_sinks"), product((None, 60, 128, 200, 241), (False, True)))
@pytest.mark.parametrize(("heads", "dtype"), [(2, torch.float32), (6, torch.float32), (6, torch.bfloat16)])
def test_blocks_attend_as_all_pairs_do(window, has_sinks, heads, dtype):
    check(BlockTree.of_row, FORKED, heads, window, has_sinks, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("window", "has_sinks"), [(None, True), (60, False)])
def test_a_gpus_row_attends_as_all_pairs_do(graphs, window, has_sinks):
    """But for the kernels."""
    check(FlexTree.of_row, FORKED, 6, window, has_sinks)
    assert graphs


@pytest.mark.parametrize("window", [512, 700])
def test_the_edge_of_a_window_longer_than_blocks(window):
    check(BlockTree.of_row, ((0, window + 64), (window, 64)), 2, window, has_sinks=False)


@pytest.mark.parametrize("heads", [(6, 2), (4, 1)])
@pytest.mark.parametrize("window", [None, 5])
def test_sinks_in_packed_rows(window, heads):
    """Two rows, of sequences of other lengths, with the masks that transformers makes; and one sequence without."""
    module = SimpleNamespace(num_key_value_groups=heads[0] // heads[1], is_causal=True, config=SimpleNamespace())
    visible = torch.stack([torch.block_diag(*map(torch.ones, [(5, 5), (9, 9)])), torch.ones(14, 14)]).tril()
    visible = (visible if window is None else visible.triu(1 - window)).bool()[:, None]
    draw = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(2, count, 14, 16, generator=draw, dtype=torch.float64) for count in (heads[0], heads[1], heads[1])
    ]
    inputs.append(torch.linspace(-4, 4, heads[0], dtype=torch.float64))
    weight = torch.randn(2, 14, heads[0], 16, generator=draw, dtype=torch.float64)
    for mask, seen in ((visible, visible), (None, torch.ones(14, 14).tril().bool())):

        def ours(query, key, value, sinks, mask=mask):
            return tree_attention(module, query, key, value, mask, s_aux=sinks, sliding_window=window)[0]

        def exact(query, key, value, sinks, seen=seen):
            return of_all_pairs(query, key, value, visible=seen, sinks=sinks)

        for one, other in zip(with_gradients(ours, inputs, weight), with_gradients(exact, inputs, weight), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
