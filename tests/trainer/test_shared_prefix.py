"""Shared prompts run once: the same logprobs, gradients and metrics as packed rows."""

import random

import pytest
import torch

from prl.models import model_path
from prl.orchestrator.packing import pack
from prl.trainer.batch import shared_stacks, stacks, tree_attention
from prl.trainer.loss import default_loss
from prl.trainer.model import can_share_prompts, check_layout, load_model
from prl.trainer.trainer import Trainer
from prl.wire.messages import StepBatch, TrainingSample

CPU = torch.device("cpu")


def sample(prompt: list[int], completion: list[int], rng: random.Random, **streams) -> TrainingSample:
    size, total = len(prompt), len(prompt) + len(completion)
    return TrainingSample(
        token_ids=prompt + completion,
        mask=[i >= size for i in range(total)],
        logprobs=[-rng.random() if i >= size else 0.0 for i in range(total)],
        temperatures=[0.7] * total,
        env_name="toy",
        reward=0.0,
        **{"advantages": [rng.uniform(-1, 1) if i >= size else 0.0 for i in range(total)], **streams},
    )


def groups(seed: int) -> list[TrainingSample]:
    """Groups of different sizes and lengths, one prompt a prefix of another, one sample alone, one ce on its prompt."""
    rng = random.Random(seed)

    def tokens(count):
        return [rng.randrange(256) for _ in range(count)]

    short = tokens(4)
    prompts = [short, short + tokens(3), tokens(9), tokens(1)]
    samples = [
        sample(prompt, tokens(rng.randrange(1, 9)), rng) for prompt, n in zip(prompts, (5, 3, 1, 4)) for _ in range(n)
    ]
    weighted = sample(short, tokens(5), rng, ce_weights=[0.0, 0.0, 0.5, 0.0] + [0.0] * 5)
    return [*samples, weighted]


def step(samples, *, share: bool, tokens: int, seq_len: int = 24):
    model = load_model(model_path("tiny"), device=CPU)
    rows, truncated = pack(samples, seq_len, 1)
    trainer = Trainer(
        model=model,
        rl_losses={"": default_loss},
        max_steps=9,
        autocast=False,
        share_prompts=share,
        tokens_per_forward=tokens,
    )
    metrics = trainer.train_step(StepBatch(1, rows[0], truncated))
    return metrics, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("tokens", [20, 60, 10_000])
def test_gradients_and_metrics_are_those_of_packed_rows(tokens):
    samples = groups(seed=tokens)
    packed, packed_gradients = step(samples, share=False, tokens=tokens)
    shared, shared_gradients = step(samples, share=True, tokens=tokens)
    assert set(packed) == set(shared)
    for name in set(packed) - {"tokens/forward"}:
        assert shared[name] == pytest.approx(packed[name], rel=1e-4, abs=1e-6), name
    for name, expected in packed_gradients.items():
        scale = expected.abs().max().item()
        assert scale > 0
        assert torch.allclose(shared_gradients[name], expected, rtol=0, atol=2e-5 * scale), name


def test_a_shared_prompt_stands_once_in_a_row():
    rng = random.Random(0)
    samples = [sample([1, 2, 3], [10 + i, 20 + i], rng) for i in range(3)]
    (stack,) = shared_stacks(pack(samples, 8, 1)[0][0], 100, CPU)
    (row,) = stack.input_ids.tolist()
    assert row[:3] == [1, 2, 3] and sorted(row[3:]) == [10, 11, 12, 20, 21, 22]
    assert stack.position_ids.tolist() == [[0, 1, 2, 3, 4, 3, 4, 3, 4]]
    assert stack.previous.tolist() == [[-1, 0, 1, 2, 3, 2, 5, 2, 7]]
    assert stack.sequence_lengths == [5, 5, 5]
    assert stack.flat.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 0, 1, 2, 7, 8]
    ids = stack.input_ids.flatten()[stack.flat].tolist()
    assert sorted(map(tuple, (ids[i : i + 5] for i in (0, 5, 10)))) == sorted(tuple(s.token_ids) for s in samples)


def test_trees_keep_to_the_budget_and_lose_nothing():
    samples = groups(seed=3)
    for budget in (12, 25, 1000):
        found = list(shared_stacks(pack(samples, 24, 1)[0][0], budget, CPU))
        sequences = sorted(
            tuple(stack.input_ids.flatten()[stack.flat].tolist()[start : start + n])
            for stack in found
            for start, n in zip(_starts(stack.sequence_lengths), stack.sequence_lengths)
        )
        assert sequences == sorted(tuple(s.token_ids) for s in samples)
        for stack in found:
            assert stack.input_ids.numel() <= max(budget, stack.input_ids.shape[1])
            assert stack.input_ids.shape[1] <= max(budget, 17)  # the longest single sequence


def _starts(lengths):
    return [sum(lengths[:i]) for i in range(len(lengths))]


def test_sequences_keep_their_losses_and_origins():
    """Prompts 1 and 2 in turn: the trees put the sequences into another order."""
    rng = random.Random(0)
    samples = [sample([1 + i % 2], [10 + i], rng, loss=f"loss{i}") for i in range(4)]
    rows = pack(samples, 4, 1)[0][0]
    (stack,) = shared_stacks(rows, 100, CPU)
    ids = stack.input_ids.flatten()[stack.flat].tolist()
    for place, (row, at) in enumerate(stack.origins):
        number = ids[2 * place + 1] - 10
        assert stack.losses[place] == f"loss{number}" == rows[row].losses[at]
    assert len(stack.origins) == 4 and stack.sequence_lengths == [2] * 4


def test_who_sees_whom():
    mask = tree_attention(torch.tensor([[0, 0, 1, 1, 2, -1]]))[0, 0].tolist()
    assert mask == [
        [True, False, False, False, False, False],
        [True, True, False, False, False, False],
        [True, True, True, False, False, False],
        [True, True, True, True, False, False],
        [True, True, False, False, True, False],
        [True, True, False, False, False, True],
    ]


def test_a_batch_with_nothing_to_train_still_has_a_stack():
    rows, _ = pack([], 8, 1)
    (stack,) = shared_stacks(rows[0], 100, CPU)
    assert stack.sequence_lengths == [] and stack.input_ids.numel() == 1
    (expected,) = stacks(rows[0], 100, CPU)
    assert torch.equal(stack.input_ids, expected.input_ids)


def test_the_start_up_check_notices_a_model_that_ignores_the_mask():
    model = load_model(model_path("tiny"), device=CPU)
    check_layout(model, shared_stacks)
    forward = model.base_model.forward
    model.base_model.forward = lambda *args, attention_mask=None, **kwargs: forward(*args, **kwargs)
    with pytest.raises(ValueError, match="trainer.share_prompts=false"):
        check_layout(model, shared_stacks)


def test_models_with_windows_are_left_to_packed_rows():
    model = load_model(model_path("tiny"), device=CPU)
    assert can_share_prompts(model)
    model.config.layer_types = ["full_attention", "sliding_attention"]
    assert not can_share_prompts(model)
    trainer = Trainer(model=model, rl_losses={"": default_loss}, max_steps=1, autocast=False)
    assert trainer.layout is stacks
