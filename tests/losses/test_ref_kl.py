"""`ref_kl_loss` against a float64 loop, and its expected gradient against that of the exact reverse KL."""

import math
import random

import pytest
import torch
from loss_cases import inputs, mean, run

from prl.losses import LossInputs, ref_kl_loss


@pytest.mark.parametrize("mask_low, kl_tau", [(0.2, 1e-3), (0.02, 0.0), (0.5, 0.3)])
@pytest.mark.parametrize("seed", range(4))
def test_matches_the_formula(seed, mask_low, kl_tau):
    rng = random.Random(seed)
    n = 40
    i = [-rng.expovariate(1.0) for _ in range(n)]
    t = [min(-1e-4, x + rng.gauss(0, 0.8)) for x in i]
    ref = [-rng.expovariate(0.7) for _ in range(n)]
    mask = [rng.random() < 0.8 for _ in range(n)]
    weights = [rng.choice([0.0, 1.0, rng.random() * 2]) for _ in range(n)]
    i[0], i[1], i[2] = -9999.0, math.nan, -math.inf

    loss, grad, seen = 0.0, [0.0] * n, []
    for m in range(3, n):
        if not mask[m] or weights[m] == 0:
            continue
        k, rho = ref[m] - t[m], math.exp(t[m] - i[m])
        dropped = math.exp(t[m]) - math.exp(i[m]) < -mask_low
        seen.append((k, dropped, rho - (t[m] - i[m]) - 1))
        loss += weights[m] * ((0 if dropped else -k * rho) + kl_tau * (t[m] - i[m]) ** 2)
        grad[m] = weights[m] * ((0 if dropped else -k * rho) + 2 * kl_tau * (t[m] - i[m]))  # k is held constant
    metrics = {
        "ref_kl": mean([s[0] for s in seen]),
        "ref_kl/is_masked": mean([s[1] for s in seen]),
        "ref_kl/masked_mismatch_kl": mean([s[2] for s in seen if s[1]]),
        "ref_kl/unmasked_mismatch_kl": mean([s[2] for s in seen if not s[1]]),
    }
    given = inputs(t, i, ref=ref, mask=mask, weights=weights)
    found = run(ref_kl_loss, given, mask_low=mask_low, kl_tau=kl_tau)
    assert found[0] == pytest.approx(loss, rel=1e-12)
    assert found[1] == pytest.approx(grad, rel=1e-12, abs=1e-14)
    assert found[2] == pytest.approx(metrics, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_expected_gradient_is_that_of_reverse_kl(seed):
    """On-policy, summing the loss over the whole vocabulary weighted by pi is the expectation over samples, exactly."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(7, generator=generator, dtype=torch.float64).requires_grad_()
    ref = torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(0)
    t = logits.log_softmax(0)
    given = LossInputs(
        t, t.detach(), ref_logprobs=ref, loss_mask=torch.ones(7, dtype=torch.bool), loss_weights=t.detach().exp()
    )
    ours = torch.autograd.grad(ref_kl_loss(given, kl_tau=0.0).loss, logits)[0]
    policy = logits.log_softmax(0)
    exact = torch.autograd.grad((policy.exp() * (policy - ref)).sum(), logits)[0]
    torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-14)


def test_by_hand():
    """rho = 2, d = 0.2, k = ln 2; and a token that fell from 0.8 to 0.4, whose gradient is dropped but not its KL."""
    ln = math.log
    given = inputs([ln(0.4), ln(0.4)], [ln(0.2), ln(0.8)], ref=[ln(0.8), ln(0.8)])
    loss, _, metrics = run(ref_kl_loss, given, kl_tau=0.1)
    assert loss == pytest.approx(-2 * ln(2) + 0.2 * ln(2) ** 2)
    assert (metrics["ref_kl"], metrics["ref_kl/is_masked"]) == (pytest.approx(ln(2)), 0.5)


def test_the_trust_region_is_one_sided_and_strict():
    def masked(t, i, low):
        return run(ref_kl_loss, inputs([math.log(t)], [math.log(i)], ref=[-1.0]), mask_low=low)[2]["ref_kl/is_masked"]

    d = abs(math.exp(math.log(0.5)) - math.exp(math.log(0.75)))
    assert masked(0.5, 0.75, d) == 0 and masked(0.5, 0.75, math.nextafter(d, 0)) == 1
    assert masked(0.99, 0.01, 0.2) == 0


def test_advantages_are_not_read():
    given = inputs([-1.0, -2.0], [-1.0, -2.0], ref=[-0.5, -2.5], advantages=[math.nan, 5.0])
    assert run(ref_kl_loss, given)[1] == [-0.5, 0.5]


def test_an_agreeing_reference_gives_no_gradient_at_infinite_ratios():
    assert run(ref_kl_loss, inputs([-0.5], [-1000.0], ref=[-0.5]), kl_tau=0.0)[1] == [0.0]
