"""`entropy_coef` and `agg_mode` of the rl losses: by hand, by brute force, and mixed in one step."""

import functools
import math
import random

import pytest
import torch
from loss_cases import inputs

from prl.losses import (
    LossCounts,
    LossOutputs,
    aipo_loss,
    cispo_loss,
    compute_loss,
    count_members,
    default_loss,
    gspo_loss,
    ipo_loss,
    ppo_loss,
    reinforce_loss,
)

MODES = {"token_mean": {}, "sequence_mean": {}, "rollout_mean": {}, "constant": {"constant_length": 7}}
LOSSES = (default_loss, aipo_loss, gspo_loss, ppo_loss, cispo_loss, ipo_loss, reinforce_loss)


def batch(lengths, seed=0):
    """Streams of one row, with an off-mask token, a weight of 0 and one without a measured logprob here and there."""
    rng = random.Random(seed)
    n = sum(lengths)

    def stream(draw):
        return torch.tensor([draw() for _ in range(n)], dtype=torch.float64)

    return {
        "trainer_logprobs": stream(lambda: -rng.expovariate(1.0)),
        "inference_logprobs": stream(lambda: rng.choice([-rng.expovariate(1.0)] * 9 + [math.nan])),
        "loss_mask": stream(lambda: rng.random() < 0.7).bool(),
        "advantages": stream(lambda: rng.gauss(0, 1)),
        "rl_weights": stream(lambda: rng.choice([0.0, 1.0, 1.0, 0.5])),
        "entropy": stream(lambda: rng.random()),
        "sequence_lengths": list(lengths),
    }


def count(rows):
    """(N, S) of some rows, as the trainer counts them."""
    keys = ("inference_logprobs", "loss_mask", "rl_weights", "sequence_lengths")
    read = [{key: row[key] for key in keys} for row in rows]
    return LossCounts.from_tensor(sum(count_members(**row) for row in read))


def run(row, rl_loss, counts):
    """(loss, gradient of the logprobs, gradient of the entropy)"""
    t, h = (row[name].clone().requires_grad_() for name in ("trainer_logprobs", "entropy"))
    loss, _ = compute_loss(**row | {"trainer_logprobs": t, "entropy": h}, counts=counts, rl_loss=rl_loss)
    return loss.detach(), *torch.autograd.grad(loss, (t, h), allow_unused=True)


def members_of(row):
    i = row["inference_logprobs"]
    return row["loss_mask"] & (row["rl_weights"] != 0) & i.isfinite()


def parts(row):
    """Each sequence of a row as a row of its own."""
    cut = [{k: v.split(row["sequence_lengths"]) for k, v in row.items() if isinstance(v, torch.Tensor)}]
    for number, length in enumerate(row["sequence_lengths"]):
        yield {name: pieces[number] for name, pieces in cut[0].items()} | {"sequence_lengths": [length]}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fn", LOSSES)
def test_brute_force(fn, mode):
    """Token sums of each sequence alone, divided as the mode says, against the row at once and as micro-batches."""
    rows = [batch((5, 1, 4, 6), seed=3), batch((3, 8), seed=4)]
    counts = count(rows)
    sequences = [part for row in rows for part in parts(row) if members_of(part).any()]
    sizes = [int(members_of(part).sum()) for part in sequences]
    assert (counts.rl, counts.rl_sequences) == (sum(sizes), len(sizes)) and len(sizes) < 6
    # With N = S = 1 token_mean is the plain sum over the tokens of a sequence.
    sums = [run(part, functools.partial(fn, agg_mode="token_mean"), LossCounts())[0] for part in sequences]
    expected = {
        "token_mean": sum(sums) / sum(sizes),
        "sequence_mean": sum(total / size for total, size in zip(sums, sizes, strict=True)) / len(sizes),
        "constant": sum(sums) / (7 * len(sizes)),
    }["sequence_mean" if mode == "rollout_mean" else mode]  # without shares each rollout has one sequence
    options = {"agg_mode": mode} | MODES[mode]
    found = sum(run(row, functools.partial(fn, **options), counts)[0] for row in rows)
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)


def test_the_modes_by_hand():
    """Sequences of 1, 3 and 0 members, rho = 1, A = 1: losses -1 a token. N = 4, S = 2."""
    row = {
        "trainer_logprobs": torch.full((6,), -1.0),
        "inference_logprobs": torch.full((6,), -1.0),
        "loss_mask": torch.tensor([1, 1, 1, 1, 0, 0], dtype=torch.bool),
        "advantages": torch.ones(6),
        "rl_weights": torch.ones(6),
        "entropy": torch.zeros(6),
        "sequence_lengths": [1, 3, 2],
    }
    third, eighth = 1 / 3, 1 / 8
    for mode, expected in (
        ("token_mean", [-0.25] * 4),
        ("sequence_mean", [-0.5, -0.5 * third, -0.5 * third, -0.5 * third]),
        ("constant", [-eighth] * 4),  # constant_length 4 times two sequences
    ):
        fn = functools.partial(default_loss, agg_mode=mode, constant_length=4 if mode == "constant" else None)
        loss, gradient, _ = run(row, fn, count([row]))
        assert gradient.tolist() == pytest.approx([*expected, 0.0, 0.0])
        assert loss.item() == pytest.approx(sum(expected))


def test_two_modes_leave_each_others_gradient_alone():
    """Each sequence counts as if the whole step had its mode."""
    row = batch((5, 4, 6), seed=1)
    counts = count([row])
    mean, whole = (functools.partial(default_loss, agg_mode=mode) for mode in ("sequence_mean", "token_mean"))
    mixed = run(row, [mean, whole, mean], counts)[1].split([5, 4, 6])
    all_mean, all_whole = (run(row, fn, counts)[1].split([5, 4, 6]) for fn in (mean, whole))
    for found, expected in zip(mixed, (all_mean[0], all_whole[1], all_mean[2]), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


# --- entropy


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fn", LOSSES)
def test_entropy_term_is_mean_entropy_of_the_mode(fn, mode):
    """Its gradient at a member is -coef * weight * the share of the token; off the members nothing."""
    row = batch((5, 4, 6), seed=1)
    counts, options = count([row]), {"agg_mode": mode} | MODES[mode]
    without = run(row, functools.partial(fn, **options), counts)
    loss, gradient, entropy_gradient = run(row, functools.partial(fn, entropy_coef=0.3, **options), counts)
    members = members_of(row)
    shares = torch.cat(
        [
            torch.full_like(part["entropy"], {
                "token_mean": 1 / counts.rl,
                "sequence_mean": 1 / (counts.rl_sequences * max(1, int(members_of(part).sum()))),
                "constant": 1 / (counts.rl_sequences * 7),
            }["sequence_mean" if mode == "rollout_mean" else mode])
            for part in parts(row)
        ]
    ) * row["rl_weights"] * members  # fmt: skip
    torch.testing.assert_close(entropy_gradient, -0.3 * shares, rtol=1e-12, atol=0)
    assert (loss - without[0]).item() == pytest.approx(-0.3 * (shares * row["entropy"]).sum().item(), rel=1e-9)
    torch.testing.assert_close(gradient, without[1], rtol=0, atol=0)


def test_entropy_off_the_members_reaches_nobody():
    row = batch((5, 4), seed=2)
    row["entropy"][~members_of(row)] = math.nan
    loss, gradient, entropy_gradient = run(row, functools.partial(default_loss, entropy_coef=1.0), count([row]))
    assert loss.isfinite() and gradient.isfinite().all() and entropy_gradient.isfinite().all()


def test_a_loss_of_the_users_own_can_read_both():
    """Per sequence: an entropy bonus, and the mean over sequences by way of `mean_length`."""

    def mine(inputs, bonus):
        mask = inputs.loss_mask
        per_token = inputs.trainer_logprobs - bonus * inputs.entropy
        return LossOutputs(per_token[mask].mean() * inputs.mean_length, {})

    row = batch((5, 4, 6), seed=1)
    loss, _, entropy_gradient = run(row, functools.partial(mine, bonus=0.5), count([row]))
    means = [
        (part["trainer_logprobs"] - 0.5 * part["entropy"])[members_of(part)].mean()
        for part in parts(row)
        if members_of(part).any()
    ]
    assert loss.item() == pytest.approx(sum(means).item() / len(means), rel=1e-12)
    assert entropy_gradient.any()


def test_a_call_by_hand_is_one_sequence():
    given = inputs([-1.0, -1.0], [-1.0, -1.0], advantages=[1.0, 1.0])
    assert default_loss(given).loss.item() == -2.0
    assert default_loss(given, agg_mode="sequence_mean").loss.item() == -1.0
    assert default_loss(given, agg_mode="constant", constant_length=8).loss.item() == -0.25


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"entropy_coef": 0.1}, "no entropy"),
        ({"agg_mode": "constant"}, "constant_length=None"),
        ({"agg_mode": "mean"}, "agg_mode='mean'"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        default_loss(inputs([-1.0], [-1.0], advantages=[1.0]), **options)
