"""`ref_kl_loss` against a float64 loop, and its expected gradient against that of the exact reverse KL."""

import math
import random

import pytest
import torch

from prl.trainer.loss import LossInputs, ref_kl_loss


def inputs(t, i, ref, mask=None, weights=None, adv=None, dtype=torch.float64):
    return LossInputs(
        torch.tensor(t, dtype=dtype, requires_grad=True),
        torch.tensor(i, dtype=dtype),
        None if ref is None else torch.tensor(ref, dtype=dtype),
        None if adv is None else torch.tensor(adv, dtype=dtype),
        torch.tensor([True] * len(t) if mask is None else mask),
        None if weights is None else torch.tensor(weights, dtype=dtype),
    )


@pytest.mark.parametrize("mask_low, kl_tau", [(0.2, 1e-3), (0.02, 0.0), (0.5, 0.3)])
@pytest.mark.parametrize("seed", range(5))
def test_matches_the_formula(seed, mask_low, kl_tau):
    rng = random.Random(seed)
    n = 40
    i = [-rng.expovariate(1.0) for _ in range(n)]
    t = [min(-1e-4, x + rng.gauss(0, 0.8)) for x in i]
    ref = [-rng.expovariate(0.7) for _ in range(n)]
    mask = [rng.random() < 0.8 for _ in range(n)]
    weights = [rng.choice([0.0, 1.0, rng.random() * 2]) for _ in range(n)]
    i[0], i[1], i[2] = -9999.0, math.nan, -math.inf

    x = inputs(t, i, ref, mask, weights)
    out = ref_kl_loss(x, mask_low=mask_low, kl_tau=kl_tau)
    out.loss.backward()

    loss, grad, seen = 0.0, [0.0] * n, []
    for m in range(3, n):
        if not mask[m] or weights[m] == 0:
            continue
        k, rho = ref[m] - t[m], math.exp(t[m] - i[m])
        dropped = math.exp(t[m]) - math.exp(i[m]) < -mask_low
        seen.append((k, dropped, rho - (t[m] - i[m]) - 1))
        loss += weights[m] * ((0 if dropped else -k * rho) + kl_tau * (t[m] - i[m]) ** 2)
        grad[m] = weights[m] * ((0 if dropped else -k * rho) + 2 * kl_tau * (t[m] - i[m]))  # k is held constant

    def mean(values):
        return sum(values) / len(values) if values else 0.0

    assert out.loss.item() == pytest.approx(loss, rel=1e-12)
    assert x.trainer_logprobs.grad.tolist() == pytest.approx(grad, rel=1e-12, abs=1e-14)
    assert {key: v.item() for key, v in out.metrics.items()} == pytest.approx(
        {
            "ref_kl": mean([s[0] for s in seen]),
            "ref_kl/is_masked": mean([s[1] for s in seen]),
            "ref_kl/masked_mismatch_kl": mean([s[2] for s in seen if s[1]]),
            "ref_kl/unmasked_mismatch_kl": mean([s[2] for s in seen if not s[1]]),
        },
        rel=1e-9,
        abs=1e-12,
    )


@pytest.mark.parametrize("seed", range(5))
def test_expected_gradient_is_that_of_reverse_kl(seed):
    """On-policy, summing the loss over the whole vocabulary weighted by pi is the expectation over samples, exactly."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(7, generator=generator, dtype=torch.float64).requires_grad_()
    ref = torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(0)

    t = logits.log_softmax(0)
    x = LossInputs(t, t.detach(), ref, None, torch.ones(7, dtype=torch.bool), loss_weights=t.detach().exp())
    ours = torch.autograd.grad(ref_kl_loss(x, kl_tau=0.0).loss, logits)[0]

    policy = logits.log_softmax(0)
    exact = torch.autograd.grad((policy.exp() * (policy - ref)).sum(), logits)[0]
    torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-14)


def test_by_hand():
    """rho = 2, d = 0.2, k = ln 2; and a token that fell from 0.8 to 0.4, whose gradient is dropped but not its KL."""
    ln = math.log
    x = inputs([ln(0.4), ln(0.4)], [ln(0.2), ln(0.8)], [ln(0.8), ln(0.8)])
    out = ref_kl_loss(x, kl_tau=0.1)
    assert out.loss.item() == pytest.approx(-2 * ln(2) + 0.2 * ln(2) ** 2)
    assert out.metrics["ref_kl"].item() == pytest.approx(ln(2))
    assert out.metrics["ref_kl/is_masked"] == 0.5


def test_the_trust_region_is_one_sided_and_strict():
    def masked(t, i, low):
        out = ref_kl_loss(inputs([math.log(t)], [math.log(i)], [-1.0]), mask_low=low)
        return out.metrics["ref_kl/is_masked"].item()

    d = abs(math.exp(math.log(0.5)) - math.exp(math.log(0.75)))
    assert masked(0.5, 0.75, d) == 0 and masked(0.5, 0.75, math.nextafter(d, 0)) == 1
    assert masked(0.99, 0.01, 0.2) == 0


@pytest.mark.parametrize("adv", [None, [math.nan, math.nan], [5.0, -5.0]])
def test_advantages_are_not_read(adv):
    x = inputs([-1.0, -2.0], [-1.0, -2.0], [-0.5, -2.5], adv=adv)
    ref_kl_loss(x).loss.backward()
    assert x.trainer_logprobs.grad.tolist() == [-0.5, 0.5]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -9999.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_non_members_do_not_matter(bad, dtype):
    x = inputs([bad, -1.0, -1.0], [-1.0, bad, -1.0], [bad, bad, 1.0], [False, True, True], [bad, 1.0, 1.0], dtype=dtype)
    out = ref_kl_loss(x)
    out.loss.backward()
    assert out.loss == -2 and x.trainer_logprobs.grad.tolist() == [0.0, 0.0, -2.0] and out.metrics["ref_kl"] == 2


def test_a_reference_that_agrees_gives_no_gradient_even_at_an_infinite_ratio():
    x = inputs([-0.5], [-1000.0], [-0.5])
    ref_kl_loss(x, kl_tau=0.0).loss.backward()
    assert x.trainer_logprobs.grad.tolist() == [0.0]


def test_no_members():
    x = inputs([-1.0], [-1.0], [-1.0], [False])
    out = ref_kl_loss(x)
    out.loss.backward()
    assert out.loss == 0 and not x.trainer_logprobs.grad.any() and not any(out.metrics.values())


def test_missing_ref_logprobs():
    with pytest.raises(ValueError, match=r"ref_logprobs.*opd.*opsd"):
        ref_kl_loss(inputs([-1.0], [-1.0], None))
