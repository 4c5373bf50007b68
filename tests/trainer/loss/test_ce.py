"""`ce_loss`: a weighted negative log-likelihood that reads nothing but the trainer's logprobs."""

import math

import pytest
import torch

from prl.trainer.loss import LossInputs, ce_loss


def inputs(t, mask, weights=None, i=None, dtype=torch.float64):
    return LossInputs(
        trainer_logprobs=torch.tensor(t, dtype=dtype, requires_grad=True),
        inference_logprobs=torch.tensor([math.nan] * len(t) if i is None else i, dtype=dtype),
        loss_mask=torch.tensor(mask),
        loss_weights=None if weights is None else torch.tensor(weights, dtype=dtype),
    )


def test_by_hand():
    x = inputs([-1.0, -2.0, -4.0, -8.0], [True, True, False, True], [1.0, 0.1, 5.0, 0.0])
    out = ce_loss(x)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(1.2)
    assert x.trainer_logprobs.grad.tolist() == pytest.approx([-1.0, -0.1, 0.0, 0.0])
    assert set(out.metrics) == {"nll"} and out.metrics["nll"] == 1.5  # unweighted, over the two members


def test_absent_weights_are_one():
    x = inputs([-1.0, -2.0], [True, True])
    assert ce_loss(x).loss == 3 and ce_loss(x).metrics["nll"] == 1.5


@pytest.mark.parametrize("i", [math.nan, math.inf, -math.inf, -9999.0, 0.0, -3.0])
def test_sampler_logprobs_are_not_read(i):
    x = inputs([-1.0], [True], i=[i])
    out = ce_loss(x)
    out.loss.backward()
    assert out.loss == 1 and x.trainer_logprobs.grad.tolist() == [-1.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mask, weight", [(False, 1.0), (True, 0.0), (False, math.nan)])
def test_non_members_do_not_matter(bad, mask, weight):
    x = inputs([-1.0, bad], [True, mask], [2.0, weight])
    out = ce_loss(x)
    out.loss.backward()
    assert out.loss == 2 and x.trainer_logprobs.grad.tolist() == [-2.0, 0.0] and out.metrics["nll"] == 1


def test_bf16_is_summed_in_float32():
    out = ce_loss(inputs([-1.0] * 1001, [True] * 1001, dtype=torch.bfloat16))
    assert out.loss.dtype == torch.float32 and out.loss == 1001


@pytest.mark.parametrize("n", [0, 3])
def test_no_members(n):
    x = inputs([-1.0] * n, [False] * n)
    out = ce_loss(x)
    out.loss.backward()
    assert out.loss == 0 and out.metrics["nll"] == 0 and not x.trainer_logprobs.grad.any()
