"""The attention of a GPU on a CPU: the same masks, logprobs, gradients and steps as every sequence alone.

torch computes FlexAttention's gradient on a CPU without a kernel, from all pairs of tokens and the mask's function, so
that what the kernels skip is tested apart, and with the one kernel that there is for a CPU, the forward's.
"""

import functools
import random
import resource

import numpy as np
import pytest
import sharded
import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from trees import CPU, alone, as_trees, branched, feed, forked, gradient_of, plain_model, windowed

from prl.models import model_path
from prl.trainer import flex
from prl.trainer.attention import TokenTree, without
from prl.trainer.blocks import BlockTree
from prl.trainer.flex import BLOCK, FlexTree
from prl.trainer.loss import default_loss
from prl.trainer.model import check_layout, load_model
from prl.trainer.trainer import Trainer
from prl.trainer.tree import row_tree, tree_stacks
from prl.wire.messages import TrainingSample


@pytest.fixture
def graphs(monkeypatch):
    """Rows attend as on a GPU, but for the kernels. Gives what has been compiled, a graph each."""
    found = []

    def backend(graph, inputs):
        found.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    made = torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=backend)  # as `compiled` does
    monkeypatch.setattr(flex, "compiled", lambda: made)
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)  # it wants no gradients
    monkeypatch.setattr("prl.trainer.tree.row_tree", FlexTree.of_row)
    yield found
    torch._dynamo.reset()


def pairs(paths: list[list[int]], window: int | None) -> torch.Tensor:
    """bool `[tokens, tokens]`: which keys each token attends to."""
    seen = torch.zeros(len(paths), len(paths), dtype=torch.bool)
    for token, path in enumerate(paths):
        seen[token, path if window is None else path[-window:]] = True
    return seen


def listed(numbers: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """bool `[rows, columns]` of a block mask's lists."""
    found = torch.zeros(numbers.shape[-2:], dtype=torch.bool)
    for row, (columns, count) in enumerate(zip(numbers[0, 0], counts[0, 0], strict=True)):
        found[row, columns[:count].long()] = True
    return found


@pytest.mark.parametrize("tokens, longest", [(1, 2), (128, 9), (129, 300), (700, 400), (1000, 60), (1500, 3)])
@pytest.mark.parametrize("window", [None, 1, 5, 200])
def test_a_token_sees_its_path_and_the_blocks_that_hold_it(tokens, longest, window):
    depths, starts, paths = branched(random.Random(tokens + longest), tokens, longest)
    mask, expected = FlexTree.of_row(depths, starts, CPU).mask(window), pairs(paths, window)
    places = torch.arange(tokens)
    assert torch.equal(mask.mask_mod(None, None, places[:, None], places[None]), expected)
    assert mask.shape == (1, 1, tokens, tokens)
    size = -(-tokens // BLOCK) * BLOCK
    blocks = torch.nn.functional.pad(expected, (0, size - tokens, 0, size - tokens))
    blocks = blocks.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).transpose(1, 2).flatten(2)
    some, whole = blocks.any(2), blocks.all(2)
    masked, unmasked = (
        listed(mask.kv_indices, mask.kv_num_blocks),
        listed(mask.full_kv_indices, mask.full_kv_num_blocks),
    )
    assert not (masked & unmasked).any() and not (some & ~(masked | unmasked)).any()
    if window is None:  # where a window ends is known by the extremes of a block alone
        assert torch.equal(unmasked, whole) and torch.equal(masked, some & ~whole)
    assert not (unmasked & ~whole).any()
    assert torch.equal(listed(mask.q_indices, mask.q_num_blocks), masked.T)
    assert torch.equal(listed(mask.full_q_indices, mask.full_q_num_blocks), unmasked.T)


def test_a_window_skips_what_lies_far_behind():
    """Of 20 blocks of one sequence, 200 tokens are in three."""
    depths = np.arange(20 * BLOCK)
    mask = FlexTree.of_row(depths, [0], CPU).mask(200)
    assert (mask.kv_num_blocks + mask.full_kv_num_blocks).flatten().tolist() == [1, 2, *[3] * 18]
    mask = FlexTree.of_row(depths, [0], CPU).mask(None)
    assert mask.full_kv_num_blocks.flatten().tolist() == list(range(20))
    assert mask.kv_num_blocks.flatten().tolist() == [1] * 20


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation makes."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else [made]:
            if isinstance(each, torch.Tensor):
                self.size = max(self.size, each.numel())
        return made


def group(prompt: int, completion: int, count: int) -> tuple[np.ndarray, list[int]]:
    """A row of completions of one prompt: places on their paths, and starts of branches."""
    depths = np.concatenate([np.arange(prompt), *[np.arange(prompt, prompt + completion)] * count])
    return depths, [0, *range(prompt, len(depths), completion)]


@pytest.mark.parametrize("tokens", [16_384, 65_536])
def test_no_tensor_is_as_large_as_tokens_times_tokens(tokens):
    """A tree of one prompt with eight completions: as many elements as tokens, or as pairs of blocks and one more."""
    depths, starts = group(tokens // 8, tokens // 64 * 7, 8)
    assert len(depths) == tokens
    with Largest() as largest:
        mask = FlexTree.of_row(depths, starts, CPU).mask(1024)
    blocks = tokens // BLOCK
    assert largest.size == max(tokens, blocks * (blocks + 1))
    own = (
        0.5 + tokens / 64 * 7 / BLOCK / 2
    )  # blocks that a block of a completion has of it, in the mean, and the prompt
    assert mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum() < blocks * (own + tokens / 8 / BLOCK)


@pytest.mark.parametrize(
    "component, dtype, far",
    [(name, torch.float64, 1e-12) for name in ("rl", "ce", "ref_kl", "entropy")] + [("all", torch.float32, 1e-5)],
)
@pytest.mark.parametrize("share", [True, False], ids=["trees", "documents"])
def test_logprobs_and_gradients_are_those_of_each_sequence_alone(graphs, component, share, dtype, far):
    """Traces that fork on three levels; fewer key heads than query heads. Rows of a block, and of several."""
    samples = forked(random.Random(1)) + long_ones(random.Random(3))
    feed(samples, "rl" if component == "entropy" else component, random.Random(2))
    rl_loss = functools.partial(default_loss, entropy_coef=0.1 if component in ("entropy", "all") else 0.0)
    plain, model = plain_model().to(dtype), load_model(model_path("tiny"), device=CPU).to(dtype)
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    expected, found = alone(plain, samples), as_trees(model, samples, 2000, share=share)
    used = found[0] != 0
    assert used.sum() >= 400 and graphs
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype and (one - other)[used].abs().max() <= 4 * far
    gradient = gradient_of(plain, samples, *expected, rl_loss)
    for name, ours in gradient_of(model, samples, *found, rl_loss).items():
        assert (ours - gradient[name]).norm() <= max(far, 2e-6) * gradient[name].norm(), name
        assert gradient[name].norm() > 0


def long_ones(rng: random.Random) -> list[TrainingSample]:
    """Three completions of a prompt that is longer than a block."""
    prompt = [rng.randrange(48, 58) for _ in range(BLOCK + 20)]
    return [
        TrainingSample(
            token_ids=(ids := prompt + [rng.randrange(48, 58) for _ in range(size)]),
            mask=[place >= len(prompt) for place in range(len(ids))],
            logprobs=[rng.uniform(-3, -1) * (place >= len(prompt)) for place in range(len(ids))],
            temperatures=[3.0] * len(ids),
            env_name="toy",
            reward=0.0,
            advantages=[rng.uniform(-1, 1) for _ in ids],
        )
        for size in (BLOCK + 7, 200, 90)
    ]


def test_layers_with_a_window_see_so_many_tokens_of_the_path(graphs, tmp_path):
    path = windowed(tmp_path)
    samples = forked(random.Random(1))
    model, plain = load_model(path, device=CPU), AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    check_layout(model, tree_stacks)
    found, expected = as_trees(model, samples, 10_000)[0], alone(plain, samples)[0]
    assert (found - expected)[found != 0].abs().max() < 1e-5
    gradients = [
        gradient_of(each, samples, logprobs, None, default_loss)
        for each, logprobs in ((model, found), (plain, expected))
    ]
    for name, gradient in gradients[1].items():
        assert (gradients[0][name] - gradient).norm() <= 1e-5 * gradient.norm(), name


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"share_prefixes": False},
        {"gradient_checkpointing": "full"},
        {"gradient_checkpointing": "selective", "tied": True},
    ],
    ids=["trees", "documents", "full", "selective"],
)
def test_steps_are_those_of_the_cpu(graphs, knobs, monkeypatch):
    """Every loss and component, references and metrics, float64."""
    trainer = sharded.make_trainer(**knobs)
    trainer.layout = functools.partial(tree_stacks, share=trainer.config.share_prefixes)  # as on a GPU
    found = sharded.train(trainer, (1, 2))
    assert graphs
    monkeypatch.undo()
    expected = sharded.train(sharded.make_trainer(**knobs), (1, 2))
    for one, other in zip(found, expected, strict=True):
        assert set(one) == set(other)
        for name, value in other.items():
            if name != "tokens/forward":
                assert one[name] == pytest.approx(value, rel=1e-9, abs=1e-11), name


def test_rows_of_all_lengths_and_windows_share_a_kernel(graphs):
    """One for rows of a block and one for longer ones: one for each length would soon be at torch's limit."""
    run(FlexTree, 40, None)
    run(FlexTree, 300, None)
    enough = len(graphs)
    for tokens in (90, 1000, 129, 128, 700):
        for window in (None, 5, 77):
            run(FlexTree, tokens, window)
    assert len(graphs) == enough


def run(kind: type[FlexTree | BlockTree], tokens: int, window: int | None, heads: tuple[int, int] = (4, 2)):
    """What one layer's attention makes of a random row."""
    depths, starts, _ = branched(random.Random(tokens), tokens, max(2, tokens // 3))
    tree: TokenTree = kind.of_row(depths, starts, CPU)
    generator = torch.Generator().manual_seed(tokens)
    query, key, value = (torch.randn(1, n, tokens, 16, generator=generator) for n in (heads[0], heads[1], heads[1]))
    return tree.attend(query, key, value, window=window, scale=0.3)


def test_compiled_layers_leave_the_attention_its_kernel(graphs):
    """Attention is kept out of a compiled layer, and compiled all the same."""
    apart = torch.compiler.disable(run)
    layer = torch.compile(lambda scale: scale * apart(FlexTree, 300, None), backend="eager")
    torch.testing.assert_close(layer(torch.tensor(2.0)), 2 * run(BlockTree, 300, None))
    assert graphs


def test_the_kernel_skips_what_is_masked():
    """The one that a CPU has, for the forward: a row of 16,384 tokens without the 4 GiB of its scores."""
    torch._dynamo.reset()
    with torch.no_grad():
        for tokens, window in ((300, None), (900, 5)):
            torch.testing.assert_close(run(FlexTree, tokens, window), run(BlockTree, tokens, window))
        depths, starts = group(2048, 1792, 8)
        tree = FlexTree.of_row(depths, starts, CPU)
        query, key, value = (torch.randn(1, heads, len(depths), 16) for heads in (4, 2, 2))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found = tree.attend(query, key, value, window=None, scale=None)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 * 1024
        expected = BlockTree.of_row(depths, starts, CPU).attend(query, key, value, window=None, scale=None)
        torch.testing.assert_close(found, expected)
        tree.mask(None).full_kv_num_blocks.zero_()  # and it goes by the lists of blocks
        fewer = tree.attend(query, key, value, window=None, scale=None)
    assert (fewer - expected).abs().max() > 0.01
    torch._dynamo.reset()


def test_a_gpu_has_trees_alone(tiny, monkeypatch):
    """Sequences that share nothing too; a model that cannot attend over them is refused."""
    knobs = {"model": tiny, "rl_losses": {"": default_loss}, "max_steps": 1, "device": "cuda"}
    for share in (True, False):
        layout = Trainer(**knobs, share_prefixes=share).layout
        assert layout.func is tree_stacks and layout.keywords == {"share": share}
    assert isinstance(row_tree(np.arange(5), [0], torch.device("meta")), FlexTree)  # as of any device but a CPU
    assert isinstance(row_tree(np.arange(5), [0], CPU), BlockTree)
    assert without(torch.device("cuda")) == "trainer.share_prefixes=false and trainer.device=cpu"
    tiny.config._attn_implementation = "sdpa"
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM on a GPU: .* set trainer\.device=cpu"):
        Trainer(**knobs)
