"""`default_loss` against a float64 loop over the formula, and by hand."""

import functools
import math
import random

import pytest
import torch

from prl.trainer.loss import LossInputs, default_loss

NAN, INF = math.nan, math.inf
METRICS = {
    "masked_mismatch_kl",
    "unmasked_mismatch_kl",
    "is_masked",
    "is_masked_low",
    "is_masked_high",
    "masked_advantage_positive",
    "masked_advantage_negative",
}


def inputs(t, i, adv, mask=None, weights=None, dtype=torch.float64):
    tensor = functools.partial(torch.tensor, dtype=dtype)
    return LossInputs(
        trainer_logprobs=tensor(t).requires_grad_(),
        inference_logprobs=tensor(i),
        advantages=tensor(adv),
        loss_mask=torch.tensor([True] * len(t) if mask is None else mask),
        loss_weights=None if weights is None else tensor(weights),
    )


def loop(t, i, adv, mask, weights, low=0.2, high=0.2, adv_tau=1.0, kl_tau=1e-3, delta=8.0):
    """(loss, gradient, metrics) by the formula, one token at a time."""
    loss, grad, kinds = 0.0, [0.0] * len(t), []
    for n in range(len(t)):
        if not mask[n] or weights[n] == 0 or not math.isfinite(i[n]) or i[n] == -9999:
            continue
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
    kept = [k for k in kinds if not (k[0] or k[1])]

    def mean(values):
        return sum(values) / len(values) if values else 0.0

    metrics = {
        "masked_mismatch_kl": mean([k[2] for k in dropped]),
        "unmasked_mismatch_kl": mean([k[2] for k in kept]),
        "is_masked": mean([k[0] or k[1] for k in kinds]),
        "is_masked_low": mean([k[1] for k in kinds]),
        "is_masked_high": mean([k[0] for k in kinds]),
        "masked_advantage_positive": mean([k[3] > 0 for k in dropped]),
        "masked_advantage_negative": mean([k[3] <= 0 for k in dropped]),
    }
    return loss, grad, metrics


def random_streams(seed, n=40):
    rng = random.Random(seed)
    i = [-rng.expovariate(1.0) for _ in range(n)]
    t = [min(-1e-4, x + rng.gauss(0, 0.7)) for x in i]
    adv = [rng.choice([0.0, rng.gauss(0, 1)]) for _ in range(n)]
    mask = [rng.random() < 0.8 for _ in range(n)]
    weights = [rng.choice([0.0, 1.0, rng.random() * 2]) for _ in range(n)]
    for n_bad, bad in enumerate((-9999.0, -INF, NAN, INF)):
        i[n_bad * 3] = bad
    return t, i, adv, mask, weights


KNOBS = [
    {},
    {"dppo_mask_low": 0.05, "dppo_mask_high": 0.4},
    {"adv_tau": 0.0},
    {"adv_tau": 2.5, "kl_tau": 0.0},
    {"delta": 1.2},
    {"delta": 0.8, "kl_tau": 0.5},
    {"delta": None},
]


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_matches_the_formula(seed, knobs):
    streams = random_streams(seed)
    x = inputs(*streams)
    out = default_loss(x, **knobs)
    out.loss.backward()
    loss, grad, metrics = loop(*streams, **{k.removeprefix("dppo_mask_"): v for k, v in knobs.items()})
    assert out.loss.dim() == 0
    assert out.loss.item() == pytest.approx(loss, rel=1e-12, abs=1e-12)
    assert x.trainer_logprobs.grad.tolist() == pytest.approx(grad, rel=1e-12, abs=1e-12)
    assert {k: v.item() for k, v in out.metrics.items()} == pytest.approx(metrics, rel=1e-9, abs=1e-12)
    assert all(m.dim() == 0 and not m.requires_grad for m in out.metrics.values())


@pytest.mark.parametrize("seed", range(3))
def test_gradient_by_finite_differences(seed):
    t, i, adv, mask, weights = random_streams(seed)
    x = inputs(t, i, adv, mask, weights)
    default_loss(x, delta=1.5).loss.backward()
    for n in range(len(t)):
        up, down = ([*t[:n], t[n] + e, *t[n + 1 :]] for e in (1e-6, -1e-6))
        numeric = (
            default_loss(inputs(up, i, adv, mask, weights), delta=1.5).loss
            - default_loss(inputs(down, i, adv, mask, weights), delta=1.5).loss
        ) / 2e-6
        assert x.trainer_logprobs.grad[n].item() == pytest.approx(numeric.item(), abs=1e-7)


def test_by_hand():
    """rho, d: 2, 0.1 (kept); 2, 0.4 (dropped, as A > 0); 1/2, -0.4 (dropped, as A < 0)."""
    ln = math.log
    x = inputs([ln(0.2), ln(0.8), ln(0.4)], [ln(0.1), ln(0.4), ln(0.8)], [3.0, 1.0, -1.0])
    out = default_loss(x, kl_tau=0.1)
    assert out.loss.item() == pytest.approx(-6.0 + 0.3 * ln(2) ** 2)
    assert {k: round(v.item(), 4) for k, v in out.metrics.items()} == {
        "masked_mismatch_kl": 0.25,  # mean of 2 - ln 2 - 1 and 0.5 + ln 2 - 1
        "unmasked_mismatch_kl": 0.3069,
        "is_masked": 0.6667,
        "is_masked_low": 0.3333,
        "is_masked_high": 0.3333,
        "masked_advantage_positive": 0.5,
        "masked_advantage_negative": 0.5,
    }


@pytest.mark.parametrize(
    ("adv", "knobs", "loss", "grad"),
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
def test_the_ratio_of_a_token_that_the_sampler_found_unlikely_is_clamped_by_hand(adv, knobs, loss, grad):
    x = inputs([-0.1], [-10.0], [adv])
    out = default_loss(x, **knobs)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(loss, rel=1e-8)
    assert x.trainer_logprobs.grad.tolist() == pytest.approx([grad], rel=1e-8)


def test_the_clamp_begins_above_delta():
    """A ratio of exactly delta has its gradient; one above it has none."""
    for delta, grad in ((math.exp(2.5), math.exp(2.5)), (math.nextafter(math.exp(2.5), 0), 0.0)):
        x = inputs([-17.5], [-20.0], [-1.0])
        default_loss(x, delta=delta, kl_tau=0.0).loss.backward()
        assert x.trainer_logprobs.grad.tolist() == pytest.approx([grad])


@pytest.mark.parametrize("adv, t, i", [(1.0, 0.75, 0.5), (-1.0, 0.5, 0.75), (0.0, 0.5, 0.75)])
def test_thresholds_are_strict(adv, t, i):
    """d exactly at the threshold is kept; a threshold one ulp tighter drops it."""
    x = inputs([math.log(t)], [math.log(i)], [adv])
    d = (x.trainer_logprobs.exp() - x.inference_logprobs.exp()).abs().item()
    at = default_loss(x, dppo_mask_low=d, dppo_mask_high=d)
    below = default_loss(x, dppo_mask_low=math.nextafter(d, 0), dppo_mask_high=math.nextafter(d, 0))
    assert at.metrics["is_masked"] == 0 and below.metrics["is_masked"] == 1


@pytest.mark.parametrize("adv, t, i", [(1.0, 0.1, 0.9), (-1.0, 0.9, 0.1), (0.0, 0.9, 0.1)])
def test_moving_against_the_advantage_is_never_dropped(adv, t, i):
    assert default_loss(inputs([math.log(t)], [math.log(i)], [adv])).metrics["is_masked"] == 0


def test_zero_advantage_leaves_only_the_kl_term():
    x = inputs([-1.0, -2.0], [-1.5, -1.0], [0.0, 0.0])
    default_loss(x, kl_tau=0.25).loss.backward()
    assert x.trainer_logprobs.grad.tolist() == pytest.approx([0.25, -0.5])


def test_weights_scale_linearly():
    t, i, adv, mask, _ = random_streams(7)
    one, three = (inputs(t, i, adv, mask, [w] * len(t)) for w in (1.0, 3.0))
    default_loss(one).loss.backward()
    default_loss(three).loss.backward()
    torch.testing.assert_close(three.trainer_logprobs.grad, 3 * one.trainer_logprobs.grad)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [NAN, INF, -INF, -9999.0, 1e30], ids=str)
@pytest.mark.parametrize("where", ["trainer_logprobs", "inference_logprobs", "advantages", "loss_weights"])
def test_what_stands_on_a_non_member_does_not_matter(where, bad, dtype):
    def run(value):
        x = inputs([-1.0, -1.0, -2.0], [-1.1, -1.2, -1.9], [1.0, 1.0, -1.0], [1, 0, 1], [1.0, 1.0, 0.5], dtype)
        getattr(x, where).data[1] = value
        out = default_loss(x, delta=5.0)
        out.loss.backward()
        return out, x.trainer_logprobs.grad

    (out, grad), (clean, clean_grad) = run(bad), run(-0.5)
    assert out.loss == clean.loss and torch.equal(grad, clean_grad) and grad[1] == 0
    assert out.metrics == clean.metrics and out.loss.dtype == (dtype if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("bad", [NAN, INF, -INF, -9999.0], ids=str)
def test_a_member_without_a_sampler_logprob_is_no_member(bad):
    x = inputs([-1.0, -1.0], [-1.1, bad], [1.0, 1.0])
    out = default_loss(x)
    out.loss.backward()
    alone = default_loss(inputs([-1.0], [-1.1], [1.0]))
    assert out.loss == alone.loss and out.metrics == alone.metrics and x.trainer_logprobs.grad[1] == 0


def test_dropped_and_clipped_tokens_with_an_infinite_ratio_stay_finite():
    """exp(1000) is inf; dropped (A > 0), of no consequence (A = 0) or clipped (delta), it must not turn into NaN."""
    for adv, knobs in ((1.0, {"kl_tau": 0.0}), (0.0, {}), (-1.0, {"delta": 8.0})):
        x = inputs([-0.1], [-1000.0], [adv])
        out = default_loss(x, **knobs)
        out.loss.backward()
        assert out.loss.isfinite() and x.trainer_logprobs.grad.isfinite().all()


@pytest.mark.parametrize("mask", [[False, False], []])
def test_no_members(mask):
    x = inputs([-1.0] * len(mask), [NAN] * len(mask), [1.0] * len(mask), mask)
    out = default_loss(x)
    out.loss.backward()
    assert out.loss == 0 and not x.trainer_logprobs.grad.any()
    assert set(out.metrics) == METRICS and all(m == 0 for m in out.metrics.values())


def test_mismatch_kl_keeps_its_digits_near_the_policy():
    out = default_loss(inputs([-1.0], [-1.0001], [1.0], dtype=torch.float32))
    assert out.metrics["unmasked_mismatch_kl"].item() == pytest.approx(5e-9, rel=0.02)


def test_missing_advantages():
    x = LossInputs(torch.zeros(2), torch.zeros(2), loss_mask=torch.ones(2, dtype=torch.bool))
    with pytest.raises(ValueError, match="advantages"):
        default_loss(x)


def test_inputs_are_checked():
    with pytest.raises(TypeError, match="loss_mask"):
        LossInputs(torch.zeros(2), torch.zeros(2), None, torch.zeros(2))
    with pytest.raises(ValueError, match=r"advantages has shape \[3\]"):
        LossInputs(torch.zeros(2), torch.zeros(2), None, torch.zeros(3), torch.ones(2))
    with pytest.raises(ValueError, match="1-D"):
        LossInputs(torch.zeros(2, 1), torch.zeros(2, 1), loss_mask=torch.ones(2, 1))
