"""The attention of a GPU on a CPU: the same masks, logprobs, gradients and steps as every sequence alone.

torch computes FlexAttention's gradient on a CPU without a kernel, from all pairs of tokens and the mask's function, so
that what the kernels skip is tested apart, and with the one kernel that there is for a CPU, the forward's.
"""

import functools
import random
import resource

import numpy as np
import pytest
import rounding
import torch
from architectures import write_model
from largest_tensor import LargestTensor
from torch.nn.attention.flex_attention import flex_attention
from transformers import AutoModelForCausalLM
from trees import CPU, alone, as_trees, branched, feed, forked, gradient_of, pairs, plain_model

from prl.config.trainer import BFLOAT16
from prl.losses import default_loss
from prl.models import model_path
from prl.rollouts.messages import StepBatch, TrainingSample
from prl.rollouts.packing import pack
from prl.trainer.model import load_model
from prl.trainer.trainer import Trainer
from prl.trainer.tree import flex
from prl.trainer.tree.attention import Scores, TokenTree, without
from prl.trainer.tree.blocks import BlockTree
from prl.trainer.tree.flex import BLOCK, LEAST, FlexTree, LongSequences, row_on_gpu
from prl.trainer.tree.tree import row_tree, tree_stacks


def listed(numbers: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """bool `[rows, columns]` of a block mask's lists."""
    found = torch.zeros(numbers.shape[-2:], dtype=torch.bool)
    for row, (columns, count) in enumerate(zip(numbers[0, 0], counts[0, 0], strict=True)):
        found[row, columns[:count].long()] = True
    return found


@pytest.mark.parametrize("tokens, longest", [(1, 2), (128, 9), (129, 300), (700, 400), (900, 3)])
@pytest.mark.parametrize("window", [None, 1, 200])
def test_a_token_sees_its_path_alone(tokens, longest, window):
    depths, starts, paths = branched(random.Random(tokens + longest), tokens, longest)
    mask, expected = FlexTree.of_row(depths, starts, CPU).mask(window), pairs(paths, window)
    filled = max(tokens, LEAST)
    expected = torch.block_diag(expected, torch.eye(filled - tokens)).bool()  # a short row's filling sees itself
    places = torch.arange(filled)
    assert torch.equal(mask.mask_mod(None, None, places[:, None], places[None]), expected)
    assert mask.shape == (1, 1, filled, filled)
    size = -(-filled // BLOCK) * BLOCK
    blocks = torch.nn.functional.pad(expected, (0, size - filled, 0, size - filled))
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
    mask = FlexTree.of_row(np.arange(20 * BLOCK), [0], CPU).mask(200)
    assert (mask.kv_num_blocks + mask.full_kv_num_blocks).flatten().tolist() == [1, 2, *[3] * 18]


def group(prompt: int, completion: int, count: int) -> tuple[np.ndarray, list[int]]:
    """A row of completions of one prompt: places on their paths, and starts of branches."""
    depths = np.concatenate([np.arange(prompt), *[np.arange(prompt, prompt + completion)] * count])
    return depths, [0, *range(prompt, len(depths), completion)]


def test_no_tensor_is_as_large_as_tokens_times_tokens():
    """A tree of one prompt with eight completions: as many elements as tokens, or as pairs of blocks and one more."""
    tokens = 16_384
    depths, starts = group(tokens // 8, tokens // 64 * 7, 8)
    assert len(depths) == tokens
    with LargestTensor() as largest:
        mask = FlexTree.of_row(depths, starts, CPU).mask(1024)
    blocks = tokens // BLOCK
    assert largest.elements == max(tokens, blocks * (blocks + 1))
    own = (
        0.5 + tokens / 64 * 7 / BLOCK / 2
    )  # blocks that a block of a completion has of it, in the mean, and the prompt
    assert mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum() < blocks * (own + tokens / 8 / BLOCK)


@pytest.mark.slow
def test_logprobs_and_gradients_are_those_of_each_sequence_alone(graphs):
    """Traces that fork on three levels; fewer key heads than query heads. Rows of a block, and of several."""
    samples = forked(random.Random(1)) + long_ones(random.Random(3))
    feed(samples, "all", random.Random(2))
    rl_loss = functools.partial(default_loss, entropy_coef=0.1)
    plain, model = plain_model().double(), load_model(model_path("tiny"), device=CPU).double()
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    expected, found = alone(plain, samples), as_trees(model, samples, 2000)
    used = found[0] != 0
    assert used.sum() >= 200 and graphs
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float64 and (one - other)[used].abs().max() <= 4e-12
    gradient = gradient_of(plain, samples, *expected, rl_loss)
    for name, ours in gradient_of(model, samples, *found, rl_loss).items():
        assert (ours - gradient[name]).norm() <= 2e-6 * gradient[name].norm(), name
        assert gradient[name].norm() > 0


def long_ones(rng: random.Random) -> list[TrainingSample]:
    """Two completions of a prompt that is longer than a block."""
    prompt = [rng.randrange(48, 58) for _ in range(BLOCK + 20)]
    return [long_one(rng, prompt, size) for size in (BLOCK + 7, 40)]


def long_one(rng: random.Random, prompt: list[int], size: int) -> TrainingSample:
    """A completion of so many tokens."""
    ids = prompt + [rng.randrange(48, 58) for _ in range(size)]
    mask = [place >= len(prompt) for place in range(len(ids))]
    return TrainingSample(
        token_ids=ids,
        mask=mask,
        logprobs=[rng.uniform(-3, -1) * on for on in mask],
        temperatures=[3.0] * len(ids),
        env_name="toy",
        reward=0.0,
        advantages=[rng.uniform(-1, 1) for _ in ids],
    )


@pytest.mark.slow
def test_gpt_oss_has_the_logprobs_of_sequences_alone(graphs, monkeypatch, tmp_path):
    """Those of transformers' own attention and its loop over experts; windows are shorter than the sequences."""
    monkeypatch.setattr("prl.trainer.tree.tree.row_tree", FlexTree.of_row)
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


@pytest.mark.slow
@torch.no_grad()
def test_bfloat16_is_as_near_as_on_a_cpu(graphs, a_rank, tiny, monkeypatch):
    """To logprobs in float32, of every sequence alone; over float32 weights, as on a GPU."""
    samples = forked(random.Random(1)) + long_ones(random.Random(3))
    expected, _ = alone(plain_model(), samples)
    model = Trainer(model=tiny, rl_losses={"": default_loss}, max_steps=1, precision=BFLOAT16).model
    gaps = []
    for tree in (FlexTree, BlockTree):
        monkeypatch.setattr("prl.trainer.tree.tree.row_tree", tree.of_row)
        found, _ = as_trees(model, samples, 2000)
        gaps.append((found - expected).abs()[found != 0])
    assert graphs and len(gaps[0]) == len(gaps[1]) > 200
    assert 1e-3 < gaps[0].mean() < 1.1 * gaps[1].mean() < 0.1
    assert gaps[0].max() < 1.5 * gaps[1].max()


@pytest.mark.slow
def test_rows_of_all_lengths_and_windows_share_a_kernel(graphs):
    """One with gradients and one without: one for each length would soon be at torch's limit of eight."""
    torch._dynamo.reset()
    for number, grad in enumerate((True, False), 1):
        with torch.set_grad_enabled(grad):
            for tokens in (1, 2, 128, 129, 300):
                for window in (None, 5):
                    run(FlexTree, tokens, window, grad=grad)
        assert len(torch._dynamo.eval_frame._debug_get_cache_entry_list(flex_attention.__code__)) == number


def run(
    kind: type[FlexTree | BlockTree], tokens: int, window: int | None, *, grad: bool = False, scale: float | None = 0.3
):
    """What one layer's attention makes of a random row; eight query heads have four key heads."""
    depths, starts, _ = branched(random.Random(tokens), tokens, max(2, tokens // 3))
    tree: TokenTree = kind.of_row(depths, starts, CPU)
    generator = torch.Generator().manual_seed(tokens)
    inputs = [torch.randn(1, tokens, heads, 16, generator=generator, requires_grad=grad) for heads in (8, 4, 4)]
    query, key, value = (each.transpose(1, 2) for each in inputs)  # as a model has them
    return tree.attend(query, key, value, Scores(window, scale))


@pytest.mark.slow
def test_compiled_layers_leave_the_attention_its_kernel(graphs):
    """Attention is kept out of a compiled layer, and compiled all the same."""
    apart = torch.compiler.disable(run)
    layer = torch.compile(lambda scale: scale * apart(FlexTree, 300, None), backend="eager")
    torch.testing.assert_close(layer(torch.tensor(2.0)), 2 * run(BlockTree, 300, None))
    assert graphs
    torch.testing.assert_close(run(FlexTree, 300, None, scale=None), run(BlockTree, 300, None, scale=None))


@pytest.mark.slow
def test_long_sequences_that_share_nothing_attend_alone(graphs, monkeypatch):
    """With the same gradients; a window goes over the blocks, and so do a tree and shorter sequences."""
    monkeypatch.setattr(flex, "LONG", 20)
    monkeypatch.setattr(flex, "ROUND", 16)
    lengths = [20, 7, 48]
    depths, starts = np.concatenate([np.arange(length) for length in lengths]), [0, 20, 27]
    row, expected = row_on_gpu(depths, starts, CPU), BlockTree.of_row(depths, starts, CPU)
    assert isinstance(row, LongSequences)
    torch.manual_seed(0)
    inputs = [torch.randn(1, heads, 75, 16, requires_grad=True) for heads in (8, 4, 4)]
    for window in (None, 5):
        outs = [tree.attend(*inputs, Scores(window, 0.3)) for tree in (row, expected)]
        torch.testing.assert_close(*outs)
        weights = torch.randn_like(outs[0])
        gradients = [torch.autograd.grad((out * weights).sum(), inputs) for out in outs]
        torch.testing.assert_close(*gradients)
    assert isinstance(row_on_gpu(depths[:27], starts[:2], CPU), FlexTree)  # 13.5 in the mean
    branch = np.concatenate((np.arange(40), np.arange(20, 60)))
    assert isinstance(row_on_gpu(branch, [0, 40], CPU), FlexTree)


@pytest.mark.slow
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
        scores = Scores(scale=0.3)  # as above: another scale is another kernel to compile
        found = tree.attend(query, key, value, scores)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 * 1024
        expected = BlockTree.of_row(depths, starts, CPU).attend(query, key, value, scores)
        torch.testing.assert_close(found, expected)
        tree.mask(None).full_kv_num_blocks.zero_()  # and it goes by the lists of blocks
        fewer = tree.attend(query, key, value, scores)
    assert (fewer - expected).abs().max() > 0.01
    torch._dynamo.reset()


def test_a_gpu_has_trees_alone(tiny, monkeypatch):
    """Sequences that share nothing too; a model that cannot attend over them is refused."""
    options = {"model": tiny, "rl_losses": {"": default_loss}, "max_steps": 1, "device": "cuda"}
    for share in (True, False):
        layout = Trainer(**options, share_prefixes=share).layout
        assert layout.func is tree_stacks and layout.keywords == {"share": share}
    assert isinstance(row_tree(np.arange(5), [0], torch.device("meta")), FlexTree)  # as of any device but a CPU
    assert isinstance(row_tree(np.arange(5), [0], CPU), BlockTree)
    assert without(torch.device("cuda")) == "trainer.share_prefixes=false and trainer.device=cpu"
    tiny.config._attn_implementation = "sdpa"
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM on a GPU: .* set trainer\.device=cpu"):
        Trainer(**options)


def test_step_has_no_tensor_of_tokens_squared(tiny, monkeypatch):
    """All but the kernel, in whose place is something of its size: no mask of transformers' either."""
    monkeypatch.setattr("prl.trainer.tree.tree.row_tree", FlexTree.of_row)
    monkeypatch.setattr(flex, "compiled", lambda: lambda query, key, value, **_: query + key.mean() + value.mean())
    rng, tokens = random.Random(0), 4096
    samples = [long_one(rng, [], size) for size in (tokens // 2, tokens // 4, tokens // 4 + 3)]
    trainer = Trainer(model=tiny, rl_losses={"": default_loss}, max_steps=1, head_chunk=512)
    trainer.layout = functools.partial(tree_stacks, share=False)  # as on a GPU
    with LargestTensor() as largest:
        trainer.train_step(StepBatch(1, pack(samples, tokens, 1)[0][0], 0))
    assert tokens < largest.elements == tokens * tiny.config.intermediate_size < tokens**2 / 10
