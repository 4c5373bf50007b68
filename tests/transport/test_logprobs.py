"""Measured logprobs, as floats and as tensors."""

import math

import pytest
import torch

from prl.losses.interface import are_measured
from prl.rollouts.logprobs import SENTINEL_CEILING, is_measured

SENTINEL = -9999.0


@pytest.mark.parametrize(
    ("value", "measured"),
    [
        (0.0, True),
        (-1e-7, True),
        (-8999.0, True),
        (SENTINEL_CEILING, False),
        (SENTINEL, False),
        (-9984.0, False),  # the sentinel as bfloat16
        (-1e30, False),
        (math.nan, False),
        (math.inf, False),
        (-math.inf, False),
    ],
)
def test_both_forms_agree(value, measured):
    assert is_measured(value) is measured
    assert are_measured(torch.tensor([value, -1.0])).tolist() == [measured, True]


def test_the_sentinel_is_one_in_every_number_format():
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        assert not are_measured(torch.tensor([SENTINEL], dtype=dtype)).any()
