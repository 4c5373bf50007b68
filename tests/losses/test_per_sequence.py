"""Several rl losses in one packed row: each on its own sequences, under one normaliser."""

import functools
import math

import pytest
import torch

from prl.losses import LossCounts, LossOutputs, aipo_loss, compute_loss, default_loss

# Two sequences of two tokens. Probabilities of the policy and of the sampler: rho = 2, 1 and 3, 1.
POLICY, SAMPLER, ADVANTAGES = [0.5, 0.5, 0.6, 0.4], [0.25, 0.5, 0.2, 0.4], [1.0, 1.0, 2.0, -1.0]
WIDE = functools.partial(default_loss, dppo_mask_low=1.0, dppo_mask_high=1.0, kl_tau=0.0)  # -A rho, nothing dropped
TIGHT = functools.partial(default_loss, dppo_mask_low=0.1, dppo_mask_high=0.1, kl_tau=0.0)
CLIPPED = functools.partial(aipo_loss, delta=1.5)


def run(rl_loss, mask=(True,) * 4, counts=None, **keywords):
    """(loss, gradient, metrics as floats)"""
    t = torch.tensor([math.log(p) for p in POLICY], dtype=torch.float64, requires_grad=True)
    loss, metrics = compute_loss(
        trainer_logprobs=t,
        inference_logprobs=torch.tensor([math.log(p) for p in SAMPLER], dtype=torch.float64),
        loss_mask=torch.tensor(mask),
        advantages=torch.tensor(ADVANTAGES, dtype=torch.float64),
        sequence_lengths=[2, 2],
        counts=counts or LossCounts(rl=4),
        rl_loss=rl_loss,
        **keywords,
    )
    loss.backward()
    return loss.item(), t.grad.tolist(), {name: (float(a), int(b)) for name, (a, b) in metrics.items()}


def squared(inputs):
    """A custom loss, called once per sequence."""
    return LossOutputs((inputs.trainer_logprobs[inputs.loss_mask] ** 2).sum(), {"mine": inputs.loss_mask.sum()})


def test_two_losses_by_hand():
    """The first sequence: -(1 * 2 + 1 * 1) = -3. The second: -(2 * 1.5 - 1 * 1) = -2, its first token clipped."""
    loss, gradient, metrics = run([WIDE, CLIPPED])
    assert loss == pytest.approx(-5 / 4)
    assert gradient == pytest.approx([-2 / 4, -1 / 4, 0.0, 1 / 4])
    assert metrics["loss/rl"] == (pytest.approx(-5.0), 4)
    assert metrics["is_masked"] == (0.0, 1) and metrics["is_clipped"] == (0.5, 1)
    assert metrics["importance_ratio"] == (pytest.approx(2.0), 1)


@pytest.mark.parametrize("losses", [[WIDE, CLIPPED], [CLIPPED, TIGHT], [squared, CLIPPED], [TIGHT, squared]])
def test_together_is_the_sum_of_each_alone(losses):
    together = run(losses)
    alone = [run(losses[0], (True, True, False, False)), run(losses[1], (False, False, True, True))]
    assert together[0] == pytest.approx(alone[0][0] + alone[1][0], rel=1e-14)
    assert together[1] == pytest.approx([a + b for a, b in zip(alone[0][1], alone[1][1], strict=True)], rel=1e-14)
    for name, pair in together[2].items():
        parts = [part[2].get(name, (0.0, 0)) for part in alone]
        assert pair == (pytest.approx(sum(a for a, _ in parts)), sum(b for _, b in parts)), name
