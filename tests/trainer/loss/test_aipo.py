"""`aipo_loss` against a float64 loop over the formula, and by hand."""

import math
import random

import pytest
import torch

from prl.trainer.loss import LossInputs, aipo_loss


def inputs(t, i, adv, mask=None, weights=None, dtype=torch.float64):
    return LossInputs(
        torch.tensor(t, dtype=dtype, requires_grad=True),
        torch.tensor(i, dtype=dtype),
        None,
        torch.tensor(adv, dtype=dtype),
        torch.tensor([True] * len(t) if mask is None else mask),
        None if weights is None else torch.tensor(weights, dtype=dtype),
    )


@pytest.mark.parametrize("delta", [0.5, 1.0, 8.0])
@pytest.mark.parametrize("seed", range(5))
def test_matches_the_formula(seed, delta):
    rng = random.Random(seed)
    n = 30
    i = [-rng.expovariate(0.5) for _ in range(n)]
    t = [x + rng.gauss(0, 1.5) for x in i]
    adv = [rng.gauss(0, 1) for _ in range(n)]
    mask = [rng.random() < 0.8 for _ in range(n)]
    weights = [rng.choice([0.0, 1.0, rng.random()]) for _ in range(n)]
    i[0], i[1], i[2] = -9999.0, math.nan, -math.inf

    x = inputs(t, i, adv, mask, weights)
    out = aipo_loss(x, delta=delta)
    out.loss.backward()

    loss, grad, ratios = 0.0, [0.0] * n, []
    for k in range(3, n):
        if mask[k] and weights[k]:
            rho = math.exp(t[k] - i[k])
            ratios.append(rho)
            loss -= weights[k] * min(rho, delta) * adv[k]
            grad[k] = -weights[k] * rho * adv[k] if rho < delta else 0.0
    assert out.loss.item() == pytest.approx(loss, rel=1e-12)
    assert x.trainer_logprobs.grad.tolist() == pytest.approx(grad, rel=1e-12)
    assert {k: v.item() for k, v in out.metrics.items()} == pytest.approx(
        {
            "importance_ratio": sum(ratios) / len(ratios),
            "clipped_importance_ratio": sum(min(r, delta) for r in ratios) / len(ratios),
            "is_clipped": sum(r > delta for r in ratios) / len(ratios),
        }
    )


def test_by_hand():
    """rho = 2, and rho = 16 clipped to the default delta of 8; either sign of A is clipped from above only."""
    x = inputs([math.log(0.2), math.log(0.8)], [math.log(0.1), math.log(0.05)], [3.0, -1.0])
    out = aipo_loss(x)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(-6.0 + 8.0)
    assert x.trainer_logprobs.grad.tolist() == pytest.approx([-6.0, 0.0])
    assert {k: v.item() for k, v in out.metrics.items()} == pytest.approx(
        {"importance_ratio": 9.0, "clipped_importance_ratio": 5.0, "is_clipped": 0.5}
    )


def test_a_ratio_at_delta_is_not_clipped():
    x = inputs([-1.0], [-1.0], [1.0])
    assert aipo_loss(x, delta=1.0).metrics["is_clipped"] == 0
    assert aipo_loss(x, delta=math.nextafter(1.0, 0)).metrics["is_clipped"] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_an_overflowing_ratio_is_clipped_without_nan(dtype):
    x = inputs([-0.5, -0.5], [-1000.0, -0.5], [1.0, 1.0], dtype=dtype)
    out = aipo_loss(x)
    out.loss.backward()
    assert out.loss == -9 and x.trainer_logprobs.grad.tolist() == [0.0, -1.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -9999.0])
def test_non_members_do_not_matter(bad):
    x = inputs([bad, -1.0, -1.0], [-1.0, bad, -1.0], [bad, bad, 2.0], [False, True, True], [bad, 1.0, 1.0])
    out = aipo_loss(x)
    out.loss.backward()
    assert out.loss == -2 and x.trainer_logprobs.grad.tolist() == [0.0, 0.0, -2.0]


def test_no_members():
    x = inputs([-1.0], [math.nan], [1.0])
    out = aipo_loss(x)
    out.loss.backward()
    assert out.loss == 0 and x.trainer_logprobs.grad.tolist() == [0.0] and not any(out.metrics.values())


def test_missing_advantages():
    with pytest.raises(ValueError, match="advantages"):
        aipo_loss(LossInputs(torch.zeros(1), torch.zeros(1), loss_mask=torch.ones(1, dtype=torch.bool)))
