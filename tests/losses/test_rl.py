"""The rl losses against float64 loops over their formulas, by hand, and at their edges."""

import functools
import math

import pytest
import torch
from loss_cases import inputs, mean, members_of, random_streams, run

from prl.losses import LossCounts, TokenTreatment, aipo_loss, compute_loss, default_loss, gspo_loss

ln = math.log


def default_by_formula(t, i, adv, mask, weights, low=0.2, high=0.2, adv_tau=1.0, kl_tau=1e-3, delta=8.0):
    """(loss, gradient, metrics), one token at a time."""
    loss, grad, kinds = 0.0, [0.0] * len(t), []
    for n in members_of(i, mask, weights):
        rho, d = math.exp(t[n] - i[n]), math.exp(t[n]) - math.exp(i[n])
        is_high, is_low = adv[n] > 0 and d > high, adv[n] <= 0 and d < -low
        kinds.append((is_high, is_low, rho - (t[n] - i[n]) - 1, adv[n]))
        loss += weights[n] * kl_tau * (t[n] - i[n]) ** 2
        grad[n] += weights[n] * kl_tau * 2 * (t[n] - i[n])
        if not (is_high or is_low):
            clipped = delta is not None and rho > delta
            loss -= weights[n] * adv_tau * adv[n] * (delta if clipped else rho)
            grad[n] -= 0.0 if clipped else weights[n] * adv_tau * adv[n] * rho
    dropped = [k for k in kinds if k[0] or k[1]]
    metrics = {
        "masked_mismatch_kl": mean([k[2] for k in dropped]),
        "unmasked_mismatch_kl": mean([k[2] for k in kinds if not (k[0] or k[1])]),
        "is_masked": mean([k[0] or k[1] for k in kinds]),
        "is_masked_low": mean([k[1] for k in kinds]),
        "is_masked_high": mean([k[0] for k in kinds]),
        "masked_advantage_positive": mean([k[3] > 0 for k in dropped]),
        "masked_advantage_negative": mean([k[3] <= 0 for k in dropped]),
    }
    return loss, grad, metrics


def aipo_by_formula(t, i, adv, mask, weights, delta=8.0):
    loss, grad, ratios = 0.0, [0.0] * len(t), []
    for n in members_of(i, mask, weights):
        rho = math.exp(t[n] - i[n])
        ratios.append(rho)
        loss -= weights[n] * min(rho, delta) * adv[n]
        grad[n] = -weights[n] * rho * adv[n] if rho < delta else 0.0
    metrics = {
        "importance_ratio": mean(ratios),
        "clipped_importance_ratio": mean([min(r, delta) for r in ratios]),
        "is_clipped": mean([r > delta for r in ratios]),
    }
    return loss, grad, metrics


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("fn", "formula", "options"),
    [
        (default_loss, default_by_formula, {}),
        (default_loss, default_by_formula, {"dppo_mask_low": 0.05, "dppo_mask_high": 0.4}),
        (default_loss, default_by_formula, {"adv_tau": 0.0}),
        (default_loss, default_by_formula, {"adv_tau": 2.5, "kl_tau": 0.0}),
        (default_loss, default_by_formula, {"delta": 1.2}),
        (default_loss, default_by_formula, {"delta": 0.8, "kl_tau": 0.5}),
        (default_loss, default_by_formula, {"delta": None}),
        (aipo_loss, aipo_by_formula, {"delta": 0.5}),
        (aipo_loss, aipo_by_formula, {"delta": 1.0}),
        (aipo_loss, aipo_by_formula, {}),
    ],
)
def test_matches_the_formula(fn, formula, options, seed):
    t, i, advantages, mask, weights = streams = random_streams(seed)
    loss, grad, metrics = run(fn, inputs(t, i, advantages=advantages, mask=mask, weights=weights), **options)
    expected = formula(*streams, **{name.removeprefix("dppo_mask_"): value for name, value in options.items()})
    assert loss == pytest.approx(expected[0], rel=1e-12, abs=1e-12)
    assert grad == pytest.approx(expected[1], rel=1e-12, abs=1e-12)
    assert metrics == pytest.approx(expected[2], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("fn", [functools.partial(default_loss, delta=1.5), aipo_loss])
def test_gradient_by_finite_differences(fn):
    t, i, advantages, mask, weights = random_streams(0)

    def at(values):
        return run(fn, inputs(values, i, advantages=advantages, mask=mask, weights=weights))

    _, grad, _ = at(t)
    for n in range(len(t)):
        up, down = (at([*t[:n], t[n] + step, *t[n + 1 :]])[0] for step in (1e-6, -1e-6))
        assert grad[n] == pytest.approx((up - down) / 2e-6, abs=1e-7)


# --- default


def test_default_by_hand():
    """rho, d: 2, 0.1 (kept); 2, 0.4 (dropped, as A > 0); 1/2, -0.4 (dropped, as A < 0)."""
    given = inputs([ln(0.2), ln(0.8), ln(0.4)], [ln(0.1), ln(0.4), ln(0.8)], advantages=[3.0, 1.0, -1.0])
    loss, _, metrics = run(default_loss, given, kl_tau=0.1)
    assert loss == pytest.approx(-6.0 + 0.3 * ln(2) ** 2)
    assert {name: round(value, 4) for name, value in metrics.items()} == {
        "masked_mismatch_kl": 0.25,  # mean of 2 - ln 2 - 1 and 0.5 + ln 2 - 1
        "unmasked_mismatch_kl": 0.3069,
        "is_masked": 0.6667,
        "is_masked_low": 0.3333,
        "is_masked_high": 0.3333,
        "masked_advantage_positive": 0.5,
        "masked_advantage_negative": 0.5,
    }


@pytest.mark.parametrize(
    ("advantage", "options", "loss", "grad"),
    [
        # t = -0.1, i = -10: rho = exp(9.9) = 19930.37, d = 0.9048. The KL term is 1e-3 * 9.9^2 = 0.09801, its gradient
        # 2e-3 * 9.9 = 0.0198. At A > 0 the token is dropped, as d > 0.2; else rho is 8, which has no gradient.
        (1.0, {}, 0.09801, 0.0198),
        (-1.0, {}, 8.09801, 0.0198),
        (-0.5, {"delta": 3.0}, 1.59801, 0.0198),
        (-1.0, {"delta": None}, 19930.4684, 19930.3902),
        (1.0, {"dppo_mask_high": 1.0}, 0.09801 - 8.0, 0.0198),
        (0.0, {}, 0.09801, 0.0198),
    ],
)
def test_the_ratio_of_an_unlikely_token_is_clamped(advantage, options, loss, grad):
    found = run(default_loss, inputs([-0.1], [-10.0], advantages=[advantage]), **options)
    assert found[:2] == (pytest.approx(loss, rel=1e-8), [pytest.approx(grad, rel=1e-8)])


@pytest.mark.parametrize("advantage, t, i", [(1.0, 0.75, 0.5), (-1.0, 0.5, 0.75), (0.0, 0.5, 0.75)])
def test_thresholds_of_the_mask_are_strict(advantage, t, i):
    """d exactly at the threshold is kept; a threshold one ulp tighter drops it."""
    given = inputs([ln(t)], [ln(i)], advantages=[advantage])
    d = (given.trainer_logprobs.exp() - given.inference_logprobs.exp()).abs().item()
    for threshold, dropped in ((d, 0), (math.nextafter(d, 0), 1)):
        _, _, metrics = run(default_loss, given, dppo_mask_low=threshold, dppo_mask_high=threshold)
        assert metrics["is_masked"] == dropped


@pytest.mark.parametrize(
    ("fn", "advantage"), [(functools.partial(default_loss, kl_tau=0.0), -1.0), (aipo_loss, -1.0), (aipo_loss, 1.0)]
)
def test_a_ratio_of_exactly_delta_has_its_gradient(fn, advantage):
    ratio = math.exp(2.5)
    for delta, grad in ((ratio, -advantage * ratio), (math.nextafter(ratio, 0), 0.0)):
        _, found, _ = run(fn, inputs([-17.5], [-20.0], advantages=[advantage]), delta=delta)
        assert found == [pytest.approx(grad)]


def test_mismatch_kl_keeps_its_digits_near_the_policy():
    _, _, metrics = run(default_loss, inputs([-1.0], [-1.0001], advantages=[1.0], dtype=torch.float32))
    assert metrics["unmasked_mismatch_kl"] == pytest.approx(5e-9, rel=0.02)


# --- aipo


def test_aipo_by_hand():
    """rho = 2, and rho = 16 clipped to the default delta of 8; either sign of A is clipped from above only."""
    found = run(aipo_loss, inputs([ln(0.2), ln(0.8)], [ln(0.1), ln(0.05)], advantages=[3.0, -1.0]))
    metrics = {"importance_ratio": 9.0, "clipped_importance_ratio": 5.0, "is_clipped": 0.5}
    assert found == (pytest.approx(-6.0 + 8.0), pytest.approx([-6.0, 0.0]), pytest.approx(metrics))


# --- gspo


def test_gspo_by_hand():
    """Log ratios 0.4 and 0: s = exp(0.2), wide clips. The loss is -s A, half of it at each of two tokens."""
    s = math.exp(0.2)
    found = run(gspo_loss, inputs([-1.0, -2.0], [-1.4, -2.0], advantages=[2.0, 2.0]), clip_ratio_high=1.0)
    metrics = {"sequence_ratio": pytest.approx(s), "is_clipped": 0.0}
    assert found == (pytest.approx(-2 * s), pytest.approx([-s, -s]), metrics)


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
def test_gspo_clips_on_the_side_of_the_advantage(gap, advantage, value, clipped):
    given = inputs([-1.0, -1.0], [-1.0 - gap, -1.0], advantages=[advantage] * 2)
    loss, gradient, metrics = run(gspo_loss, given, clip_ratio_low=0.1, clip_ratio_high=0.1)
    assert loss == pytest.approx(-value)
    assert gradient == pytest.approx([0.0, 0.0] if clipped or not advantage else [-value / 2] * 2)
    assert metrics["is_clipped"] == clipped


@pytest.mark.parametrize("advantage", [1.3, -0.7])
@pytest.mark.parametrize("seed", range(4))
def test_gspo_with_one_advantage_is_that_of_the_paper(seed, advantage):
    """Equations 5 and 7 by autograd through the mean, on the members alone."""
    generator = torch.Generator().manual_seed(seed)
    t, i = (-torch.rand(2, 9, generator=generator, dtype=torch.float64)).tolist()
    mask = [n % 3 > 0 for n in range(9)]
    given = inputs(t, i, advantages=[advantage] * 9, mask=mask)
    loss, gradient, _ = run(gspo_loss, given, clip_ratio_low=0.05, clip_ratio_high=0.08)
    leaf = torch.tensor(t, dtype=torch.float64, requires_grad=True)
    s = (leaf - torch.tensor(i, dtype=torch.float64))[torch.tensor(mask)].mean().exp()
    plain = -torch.min(s * advantage, s.clamp(0.95, 1.08) * advantage)
    plain.backward()
    assert loss == pytest.approx(plain.item(), rel=1e-12)
    assert gradient == pytest.approx(leaf.grad.tolist(), rel=1e-12, abs=1e-15)


def test_gspo_clips_advantages_of_tokens_apart():
    """s = exp(0.2) for both tokens; only the one with A > 0 is clipped (equation 13)."""
    given = inputs([-1.0, -2.0], [-1.4, -2.0], advantages=[1.0, -1.0])
    loss, gradient, metrics = run(gspo_loss, given, clip_ratio_high=0.1)
    assert loss == pytest.approx((-1.1 + math.exp(0.2)) / 2)
    assert gradient == pytest.approx([0.0, math.exp(0.2) / 2])
    assert metrics["is_clipped"] == 0.5


def test_gspo_takes_its_ratio_from_members_alone():
    """Off the mask, of weight 0, and without a measured logprob; a weight of 2 counts double in the loss, not in s."""
    given = inputs(
        [-1.0, -1.0, -1.0, -1.0, -1.0, -1.0],
        [-1.4, -1.0, -9.0, -9.0, math.nan, -9999.0],
        advantages=[1.0] * 6,
        mask=[True, True, False, True, True, True],
        weights=[2.0, 1.0, 1.0, 0.0, 1.0, 1.0],
    )
    loss, gradient, _ = run(gspo_loss, given, clip_ratio_high=1.0)
    s = math.exp(0.2)
    assert loss == pytest.approx(-(2 * s + s) / 2)
    assert gradient == pytest.approx([-s, -s / 2, 0.0, 0.0, 0.0, 0.0])


def test_gspo_has_a_ratio_for_each_sequence():
    """Three sequences; the middle one has no member. S = 2, N = 5."""
    t = torch.tensor([-1.0, -1.0, -1.0, -2.0, -2.0, -2.0, -3.0], dtype=torch.float64, requires_grad=True)
    treatment = TokenTreatment()
    loss, metrics = compute_loss(
        trainer_logprobs=t,
        inference_logprobs=torch.tensor([-1.4, -1.0, -1.0, -2.0, -2.3, -2.0, -3.0], dtype=torch.float64),
        loss_mask=torch.tensor([1, 1, 0, 0, 1, 1, 1], dtype=torch.bool),
        sequence_lengths=[2, 2, 3],
        advantages=torch.tensor([1.0, 1.0, 0.0, 0.0, -1.0, -1.0, -1.0], dtype=torch.float64),
        counts=LossCounts(rl=5, rl_sequences=2),
        rl_loss=gspo_loss,
        treatment=treatment,
    )
    loss.backward()
    s = math.exp(0.1)
    assert loss.item() == pytest.approx((-1.0004 + s) / 2)  # the mean of two sequences
    assert t.grad.tolist() == pytest.approx([0.0, 0.0, 0.0, 0.0, s / 6, s / 6, s / 6])
    assert metrics["sequence_ratio"] == (pytest.approx(math.exp(0.2) + s), 2)
    assert metrics["is_clipped"] == (1.0, 2)
    found = {label: tokens.tolist() for label, tokens in treatment.labels.items() if tokens.any()}
    assert found == {"rl clipped": [1, 1, 0, 0, 0, 0, 0], "rl kept": [0, 0, 0, 0, 1, 1, 1]}
