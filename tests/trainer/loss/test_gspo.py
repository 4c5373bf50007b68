"""`gspo_loss` by hand, against plain GSPO by autograd, and at its edges."""

import math

import pytest
import torch

from prl.trainer.loss import LossCounts, LossInputs, TokenFates, compute_loss, gspo_loss


def inputs(t, i, advantages, mask=None, **more):
    """Float64 inputs of one sequence; the policy's logprobs are a leaf."""
    t = torch.tensor(t, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(len(t), dtype=torch.bool) if mask is None else torch.tensor(mask)
    others = {"inference_logprobs": i, "advantages": advantages} | more
    return LossInputs(
        t, loss_mask=mask, **{name: torch.tensor(value, dtype=torch.float64) for name, value in others.items()}
    )


def run(given, **knobs):
    """(loss, gradient, metrics)"""
    out = gspo_loss(given, **knobs)
    (gradient,) = torch.autograd.grad(out.loss, given.trainer_logprobs)
    return out.loss.item(), gradient.tolist(), {name: value.item() for name, value in out.metrics.items()}


def test_by_hand():
    """Log ratios 0.4 and 0: s = exp(0.2), wide clips. The loss is -s A, half of it at each of two tokens."""
    loss, gradient, metrics = run(inputs([-1.0, -2.0], [-1.4, -2.0], [2.0, 2.0]), clip_ratio_high=1.0)
    s = math.exp(0.2)
    assert loss == pytest.approx(-2 * s)
    assert gradient == pytest.approx([-s, -s])
    assert metrics == {"sequence_ratio": pytest.approx(s), "is_clipped": 0.0}


@pytest.mark.parametrize(
    ("gap", "advantage", "value", "clipped"),
    [
        (0.4, 1.0, 1.1, True),  # s = 1.22 above 1.1: worth 1.1, no gradient
        (0.4, -1.0, -math.exp(0.2), False),
        (-0.4, 1.0, math.exp(-0.2), False),
        (-0.4, -1.0, -0.9, True),  # s = 0.82 below 0.9
        (0.1, 1.0, math.exp(0.05), False),
        (0.4, 0.0, 0.0, False),
    ],
)
def test_the_clip_is_one_sided_by_the_sign_of_the_advantage(gap, advantage, value, clipped):
    given = inputs([-1.0, -1.0], [-1.0 - gap, -1.0], [advantage] * 2)
    loss, gradient, metrics = run(given, clip_ratio_low=0.1, clip_ratio_high=0.1)
    assert loss == pytest.approx(-value)
    assert gradient == pytest.approx([0.0, 0.0] if clipped or not advantage else [-value / 2] * 2)
    assert metrics["is_clipped"] == clipped


@pytest.mark.parametrize("advantage", [1.3, -0.7])
@pytest.mark.parametrize("seed", range(4))
def test_with_one_advantage_it_is_plain_gspo(seed, advantage):
    """Equations 5 and 7 by autograd through the mean, on the members alone."""
    generator = torch.Generator().manual_seed(seed)
    t, i = (-torch.rand(2, 9, generator=generator, dtype=torch.float64)).tolist()
    mask = [n % 3 > 0 for n in range(9)]
    given = inputs(t, i, [advantage] * 9, mask)
    loss, gradient, _ = run(given, clip_ratio_low=0.05, clip_ratio_high=0.08)
    members = torch.tensor(mask)
    leaf = torch.tensor(t, dtype=torch.float64, requires_grad=True)
    s = (leaf - torch.tensor(i, dtype=torch.float64))[members].mean().exp()
    plain = -torch.min(s * advantage, s.clamp(0.95, 1.08) * advantage)
    plain.backward()
    assert loss == pytest.approx(plain.item(), rel=1e-12)
    assert gradient == pytest.approx(leaf.grad.tolist(), rel=1e-12, abs=1e-15)


def test_advantages_of_tokens_share_the_ratio_and_clip_apart():
    """s = exp(0.2) for both tokens; only the one with A > 0 is clipped (equation 13)."""
    loss, gradient, metrics = run(inputs([-1.0, -2.0], [-1.4, -2.0], [1.0, -1.0]), clip_ratio_high=0.1)
    assert loss == pytest.approx((-1.1 + math.exp(0.2)) / 2)
    assert gradient == pytest.approx([0.0, math.exp(0.2) / 2])
    assert metrics["is_clipped"] == 0.5


def test_what_is_no_member_has_no_part_in_the_ratio():
    """Off the mask, of weight 0, and without a measured logprob; a weight of 2 counts double in the loss, not in s."""
    given = inputs(
        [-1.0, -1.0, -1.0, -1.0, -1.0, -1.0],
        [-1.4, -1.0, -9.0, -9.0, math.nan, -9999.0],
        [1.0] * 6,
        [True, True, False, True, True, True],
        loss_weights=[2.0, 1.0, 1.0, 0.0, 1.0, 1.0],
    )
    loss, gradient, _ = run(given, clip_ratio_high=1.0)
    s = math.exp(0.2)
    assert loss == pytest.approx(-(2 * s + s) / 2)
    assert gradient == pytest.approx([-s, -s / 2, 0.0, 0.0, 0.0, 0.0])


@pytest.mark.parametrize("mask", [[False, False], [True, False]])
def test_no_member_and_one(mask):
    loss, gradient, metrics = run(inputs([-1.0, -1.0], [-1.2, -1.0], [1.0, 1.0], mask), clip_ratio_high=1.0)
    s = math.exp(0.2) if mask[0] else 0.0
    assert loss == pytest.approx(-s) and gradient == pytest.approx([-s, 0.0])
    assert metrics["sequence_ratio"] == pytest.approx(s)


def test_a_ratio_without_bound_is_clipped_before_it_reaches_the_gradient():
    loss, gradient, _ = run(inputs([-0.1], [-800.0], [1.0]))
    assert loss == pytest.approx(-1.0004) and gradient == [0.0]


def test_in_a_packed_row_each_sequence_has_its_own_ratio():
    """Three sequences; the middle one has no member. S = 2, N = 5."""
    t = torch.tensor([-1.0, -1.0, -1.0, -2.0, -2.0, -2.0, -3.0], dtype=torch.float64, requires_grad=True)
    i = torch.tensor([-1.4, -1.0, -1.0, -2.0, -2.3, -2.0, -3.0], dtype=torch.float64)
    mask = torch.tensor([1, 1, 0, 0, 1, 1, 1], dtype=torch.bool)
    fates = TokenFates()
    loss, metrics = compute_loss(
        trainer_logprobs=t,
        inference_logprobs=i,
        loss_mask=mask,
        sequence_lengths=[2, 2, 3],
        advantages=torch.tensor([1.0, 1.0, 0.0, 0.0, -1.0, -1.0, -1.0], dtype=torch.float64),
        counts=LossCounts(rl=5, rl_sequences=2),
        rl_loss=gspo_loss,
        fates=fates,
    )
    loss.backward()
    s = math.exp(0.1)
    assert loss.item() == pytest.approx((-1.0004 + s) / 2)  # the mean of two sequences
    assert t.grad.tolist() == pytest.approx([0.0, 0.0, 0.0, 0.0, s / 6, s / 6, s / 6])
    assert metrics["sequence_ratio"] == (pytest.approx(math.exp(0.2) + s), 2)
    assert metrics["is_clipped"] == (1.0, 2)
    found = {label: tokens.tolist() for label, tokens in fates.labels.items() if tokens.any()}
    assert found == {"rl clipped": [1, 1, 0, 0, 0, 0, 0], "rl kept": [0, 0, 0, 0, 1, 1, 1]}


def test_it_needs_advantages():
    with pytest.raises(ValueError, match="needs advantages"):
        gspo_loss(LossInputs(torch.zeros(1), torch.zeros(1), loss_mask=torch.ones(1, dtype=torch.bool)))
