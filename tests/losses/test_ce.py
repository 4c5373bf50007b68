"""`ce_loss`: a weighted negative log-likelihood that reads nothing but the trainer's logprobs."""

import math

import pytest
import torch
from loss_cases import inputs, run

from prl.losses import ce_loss


def test_by_hand():
    """`nll` is unweighted, over the two members; the sampler's logprobs are not read."""
    given = inputs(
        [-1.0, -2.0, -4.0, -8.0], [math.nan] * 4, mask=[True, True, False, True], weights=[1.0, 0.1, 5.0, 0.0]
    )
    assert run(ce_loss, given) == (pytest.approx(1.2), pytest.approx([-1.0, -0.1, 0.0, 0.0]), {"nll": 1.5})


def test_absent_weights_are_one():
    assert run(ce_loss, inputs([-1.0, -2.0], [-9999.0, math.inf])) == (3.0, [-1.0, -1.0], {"nll": 1.5})


def test_bfloat16_is_summed_in_float32():
    out = ce_loss(inputs([-1.0] * 1001, [0.0] * 1001, dtype=torch.bfloat16))
    assert out.loss.dtype == torch.float32 and out.loss == 1001
