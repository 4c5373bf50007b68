"""Shared tokens run once: the same logprobs, gradients and metrics as every sequence alone."""

import functools
import random

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3PreTrainedModel
from trees import CPU, alone, as_trees, branched, check_windowed, feed, forked, gradient_of, plain_model, windowed

from prl.losses import default_loss
from prl.models import model_path
from prl.rollouts.messages import StepBatch, TrainingSample, sequence_slices
from prl.rollouts.packing import pack, pack_row
from prl.trainer.batch import stacks
from prl.trainer.model import check_layout, load_model, stack_logprobs
from prl.trainer.trainer import Trainer
from prl.trainer.tree.attention import NAME, can_attend_over_trees, tree_attention, use_tree_attention
from prl.trainer.tree.blocks import BLOCK, GATHER, MOST, BlockTree, block_ranges
from prl.trainer.tree.tree import count_shared, cut, tree_stacks


@pytest.mark.parametrize(
    ("component", "budget", "dtype", "far"),
    [
        ("rl", 10_000, torch.float64, 1e-12),
        ("ref_kl", 20, torch.float64, 1e-12),
        ("all", 10_000, torch.float64, 1e-12),
        ("all", 20, torch.float32, 1e-5),
    ],
)
def test_logprobs_and_gradients_are_those_of_each_sequence_alone(component, budget, dtype, far):
    """In float64 too the norms of transformers are float32, as their gradients."""
    samples = forked(random.Random(1))
    feed(samples, component, random.Random(2))
    rl_loss = functools.partial(default_loss, entropy_coef=0.1 if component == "all" else 0.0)
    plain, model = plain_model().to(dtype), load_model(model_path("tiny"), device=CPU).to(dtype)
    expected, found = alone(plain, samples), as_trees(model, samples, budget)
    used = found[0] != 0
    assert used.sum() >= 40
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype and (one - other)[used].abs().max() <= far
    gradient = gradient_of(plain, samples, *expected, rl_loss)
    for name, ours in gradient_of(model, samples, *found, rl_loss).items():
        assert (ours - gradient[name]).norm() <= max(far, 1e-6) * gradient[name].norm(), name
        assert gradient[name].norm() > 0


def test_a_row_by_hand():
    """What goes through the model of 1 2 4 5, of 1 2 3 6, of 1 2 and of 7 8 9 is 1 2 4, 1 2 3, 1 and 7."""
    samples = [sample([1, 2], [4, 5]), sample([1, 2], [3, 6]), sample([1], [2]), sample([7], [8, 9])]
    samples[3].mask[2] = False
    (stack,) = tree_stacks([pack_row(samples, 16)], 1000, CPU)
    assert stack.input_ids.tolist() == [[1, 2, 3, 4, 7]]
    assert stack.position_ids.tolist() == [[0, 1, 2, 2, 0]]
    assert stack.origins == [(0, 2), (0, 1), (0, 0), (0, 3)]
    assert stack.token_ids.tolist() == [1, 2, 1, 2, 3, 6, 1, 2, 4, 5, 7, 8, 9]
    assert stack.before.tolist() == [-1, 0, -1, 0, 1, 2, -1, 0, 1, 3, -1, 4, -1]
    assert seen(stack.tree, 5) == [[0], [0, 1], [0, 1, 2], [0, 1, 3], [4]]


def seen(tree: BlockTree, size: int, window: int | None = None) -> list[list[int]]:
    """By token of a row of `size`, the places that it attends to, by the masks; each query has those of its place."""
    found: list[list[int]] = []
    for part in tree.blocks:
        hidden = part.mask(window, torch.float32)[:, 0]
        assert set(hidden.unique().tolist()) <= {0.0, -torch.inf}
        for keys, rows in zip(part.keys, hidden, strict=True):
            found += [keys[row == 0].tolist() for row in rows]
    return [found[place] for place in tree.order.tolist()]


@pytest.mark.parametrize("tokens, longest", [(1, 2), (40, 4), (300, 6), (300, 120), (900, 500), (900, 3)])
@pytest.mark.parametrize("window", [None, 5])
def test_a_token_attends_to_its_path_and_nothing_else(tokens, longest, window):
    depths, starts, paths = branched(random.Random(tokens + longest), tokens, longest)
    expected = [path if window is None else path[-window:] for path in paths]
    assert seen(BlockTree.of_row(depths, starts, CPU), tokens, window) == expected


def sample(prompt: list[int], completion: list[int], **streams) -> TrainingSample:
    size, total = len(prompt), len(prompt) + len(completion)
    fields = {
        "temperatures": [0.7] * total,
        "logprobs": [-0.5 * (i >= size) for i in range(total)],
        "advantages": [0.3 * (i >= size) for i in range(total)],
    }
    return TrainingSample(
        token_ids=prompt + completion,
        mask=[i >= size for i in range(total)],
        env_name="toy",
        reward=0.0,
        **(fields | streams),
    )


def step(samples, *, share: bool, tokens: int, seq_len: int = 24):
    model = load_model(model_path("tiny"), device=CPU)
    rows, truncated = pack(samples, seq_len, 1)
    trainer = Trainer(
        model=model, rl_losses={"": default_loss}, max_steps=9, share_prefixes=share, tokens_per_forward=tokens
    )
    metrics = trainer.train_step(StepBatch(1, rows[0], truncated))
    return metrics, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("tokens", [20, 10_000])
def test_a_step_over_trees_equals_packed_rows(tokens):
    samples = forked(random.Random(tokens))
    feed(samples, "all", random.Random(tokens))
    packed, packed_gradients = step(samples, share=False, tokens=tokens)
    shared, shared_gradients = step(samples, share=True, tokens=tokens)
    assert set(packed) == set(shared)
    for name in set(packed) - {"tokens/forward"}:
        assert shared[name] == pytest.approx(packed[name], rel=1e-4, abs=1e-6), name
    assert shared["tokens/forward"] < packed["tokens/forward"] == sum(len(each.token_ids) for each in samples)
    for name, expected in packed_gradients.items():
        scale = expected.abs().max().item()
        assert scale > 0
        assert torch.allclose(shared_gradients[name], expected, rtol=0, atol=2e-5 * scale), name


@pytest.mark.parametrize("budget", [12, 25, 1000])
def test_trees_keep_to_the_budget_and_lose_nothing(budget):
    samples = forked(random.Random(3))
    found = list(tree_stacks(pack(samples, 24, 1)[0][0], budget, CPU))
    sequences = [
        tuple(stack.token_ids[part].tolist()) for stack in found for part in sequence_slices(stack.sequence_lengths)
    ]
    assert sorted(sequences) == sorted(tuple(s.token_ids) for n, s in enumerate(samples) if n not in (9, 11))
    for stack in found:
        assert stack.input_ids.numel() <= max(budget, *stack.sequence_lengths)


def test_trees_are_cut_where_little_is_shared():
    """Four groups of four sequences of 20 tokens with a prompt of 10, and one token that all begin with."""
    shared = [0, 10, 10, 10, *[1, 10, 10, 10] * 3]
    assert cut([20] * 16, shared, 1000) == [range(16)]
    assert cut([20] * 16, shared, 120) == [range(8), range(8, 16)]  # 50 + 49 tokens each
    assert cut([20] * 16, shared, 20) == [range(n, n + 1) for n in range(16)]
    assert cut([], [], 20) == []
    assert count_shared([1, 2, 3], [1, 2, 4, 5]) == 2 and count_shared([1], [1, 2]) == 1 and count_shared([], [1]) == 0


@pytest.mark.parametrize("prompt, completion, count", [(12, 4, 100), (500, 30, 8), (500, 300, 4), (0, 400, 6)])
def test_the_cost_of_attention_follows_the_paths(prompt, completion, count):
    """Pairs of query and key above those of paths alone: half a block's for each, and the price of one more block."""
    depths = np.array([*range(prompt), *list(range(prompt, prompt + completion)) * count])
    starts = [0, *range(prompt, len(depths), completion)][prompt == 0 :]
    blocks = block_ranges(depths, starts)
    assert [start for start, _ in blocks] == [0, *(stop for _, stop in blocks[:-1])] and blocks[-1][1] == len(depths)
    assert max(stop - start for start, stop in blocks) <= MOST
    keys = [int(depths[start]) + stop - start for start, stop in blocks]
    pairs = sum((stop - start) * own for (start, stop), own in zip(blocks, keys, strict=True))
    price = BLOCK + GATHER * (prompt + completion)
    halves = sum((stop - start) ** 2 / 2 for start, stop in blocks)
    assert pairs <= (depths + 1).sum() + halves + price * len(blocks)
    assert len(blocks) <= -(-prompt // MOST) + count * -(-completion // MOST)


def test_a_long_branch_has_the_logprobs_of_its_sequence():
    rng = random.Random(0)
    prompt = [rng.randrange(48, 58) for _ in range(MOST + 20)]
    samples = [sample(prompt, [rng.randrange(48, 58) for _ in range(size)]) for size in (2 * MOST, 30, 1)]
    exact = load_model(model_path("tiny"), device=CPU).double()  # in float32 the kernels' own rounding is up to 2e-5
    with torch.no_grad():
        (found, _), (expected, _) = as_trees(exact, samples, 10_000), alone(plain_model().double(), samples)
    assert (found - expected)[found != 0].abs().max() < 1e-9


@pytest.mark.parametrize("samples", [[], [[1] * 30]], ids=["no sample", "a long one"])
def test_batch_with_nothing_to_train_has_a_stack(tiny, samples):
    """Of one token, however long the samples are of which none trains."""
    rows, _ = pack([sample(ids, []) for ids in samples], 32, 1)
    (stack,) = tree_stacks(rows[0], 100, CPU)
    assert stack.sequence_lengths == [] and stack.input_ids.numel() == 1 and stack.forward_tokens == 0
    stack_logprobs(tiny, stack, head_chunk=8)[0].sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in tiny.parameters())


def test_equal_tokens_go_through_the_head_once(tiny, monkeypatch):
    samples = [sample([1, 2], [3, 4]) for _ in range(5)] + [sample([1, 2], [3, 4], temperatures=[0.5] * 4)]
    seen = []
    head = functools.partial(stack_logprobs, head_chunk=8)
    monkeypatch.setattr("prl.trainer.model.chunked_logprobs", lambda hidden, *a, **k: seen.append(len(hidden)) or 1 / 0)
    (stack,) = tree_stacks([pack_row(samples, 64)], 64, CPU)
    with pytest.raises(ZeroDivisionError):
        head(tiny, stack)
    assert seen == [4]  # two tokens at two temperatures


def test_check_layout_notices_a_model_that_ignores_the_tree():
    model = load_model(model_path("tiny"), device=CPU)
    check_layout(model, tree_stacks)
    forward = model.base_model.forward
    model.base_model.forward = lambda *args, tree=None, **kwargs: forward(*args, **kwargs)
    with pytest.raises(ValueError, match=r"trainer\.share_prefixes=false"):
        check_layout(model, tree_stacks)


def test_layers_with_a_window_see_the_end_of_paths(tmp_path):
    path = windowed(tmp_path)
    samples, expected = check_windowed(path)
    unbounded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, sliding_window=1000)
    assert (alone(unbounded, samples)[0] - expected).abs().max() > 1e-2  # the window matters


def test_models_with_other_attention_are_left_to_packed_rows(monkeypatch):
    monkeypatch.setattr(Qwen3PreTrainedModel, "_supports_attention_backend", False)
    model = load_model(model_path("tiny"), device=CPU)
    assert not can_attend_over_trees(model)
    trainer = Trainer(model=model, rl_losses={"": default_loss}, max_steps=1)
    assert trainer.layout is stacks
    monkeypatch.undo()
    model.config.layer_types = ["full_attention", "chunked_attention"]
    use_tree_attention(model)
    assert not can_attend_over_trees(model)
    model.config.layer_types = ["full_attention", "sliding_attention"]
    use_tree_attention(model)
    assert can_attend_over_trees(model)


def test_layer_that_hides_its_window_is_refused(tmp_path, monkeypatch):
    model = load_model(windowed(tmp_path), device=CPU)
    real = tree_attention
    monkeypatch.setitem(
        AttentionInterface._global_mapping, NAME, lambda *args, sliding_window=None, **others: real(*args, **others)
    )
    with pytest.raises(
        ValueError, match="Qwen3Attention keeps its sliding window to itself; set trainer.share_prefixes"
    ):
        check_layout(model, tree_stacks)
