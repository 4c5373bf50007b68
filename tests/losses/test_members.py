"""What all losses share: only members count, and nothing else can spoil them."""

import functools
import math

import pytest
import torch
from loss_cases import inputs, run

from prl.losses import LossInputs, aipo_loss, ce_loss, default_loss, gspo_loss, ref_kl_loss

RL = (default_loss, aipo_loss, gspo_loss)
SAMPLED = (*RL, ref_kl_loss)
LOSSES = (*SAMPLED, ce_loss)
BAD = (math.nan, math.inf, -math.inf, -9999.0, 1e30)
OPTIONAL = {"advantages": [1.0, 1.0, -1.0], "ref": [-0.5, -0.7, -2.5]}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fn", LOSSES)
def test_what_stands_on_a_non_member_does_not_matter(fn, dtype):
    def result(where, value, **members):
        given = inputs([-1.0, -1.0, -2.0], [-1.1, -1.2, -1.9], dtype=dtype, **OPTIONAL, **members)
        getattr(given, where).data[1] = value
        return run(fn, given)

    streams = ("trainer_logprobs", "inference_logprobs", "advantages", "ref_logprobs")
    off_the_mask = {"mask": [True, False, True], "weights": [1.0, 1.0, 0.5]}
    weight_of_zero = {"weights": [1.0, 0.0, 0.5]}
    for members, places in ((off_the_mask, (*streams, "loss_weights")), (weight_of_zero, streams)):
        for where in places:
            clean = result(where, -0.5, **members)
            assert clean[0] and clean[1][1] == 0.0
            assert all(result(where, bad, **members) == clean for bad in BAD)


@pytest.mark.parametrize("bad", BAD[:4])
@pytest.mark.parametrize("fn", SAMPLED)
def test_a_token_without_a_sampler_logprob_is_no_member(fn, bad):
    alone = run(fn, inputs([-1.0], [-1.1], advantages=[1.0], ref=[-0.5]))
    loss, gradient, metrics = run(fn, inputs([-1.0, -1.0], [-1.1, bad], advantages=[1.0, 1.0], ref=[-0.5, -0.5]))
    assert (loss, gradient, metrics) == (alone[0], [*alone[1], 0.0], alone[2])


@pytest.mark.parametrize("tokens", [0, 2])
@pytest.mark.parametrize("fn", LOSSES)
def test_no_members(fn, tokens):
    """Every metric is there and 0."""
    given = inputs([-1.0] * tokens, [math.nan] * tokens, advantages=[1.0] * tokens, ref=[1.0] * tokens)
    given.loss_mask[:] = False
    loss, gradient, metrics = run(fn, given)
    assert loss == 0.0 and gradient == [0.0] * tokens
    assert metrics.keys() == run(fn, inputs([-1.0], [-1.0], advantages=[1.0], ref=[1.0]))[2].keys()
    assert not any(metrics.values())


@pytest.mark.parametrize(
    ("fn", "advantage", "loss", "gradient"),
    [
        (functools.partial(default_loss, kl_tau=0.0), 1.0, 0.0, 0.0),  # dropped
        (functools.partial(default_loss, kl_tau=0.0), 0.0, 0.0, 0.0),
        (functools.partial(default_loss, kl_tau=0.0), -1.0, 8.0, 0.0),  # clipped
        (aipo_loss, 1.0, -8.0, 0.0),
        (gspo_loss, 1.0, -1.0004, 0.0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_an_infinite_ratio_makes_no_nan(fn, advantage, loss, gradient, dtype):
    """exp(1000) is inf."""
    found = run(fn, inputs([-0.1], [-1000.0], advantages=[advantage], dtype=dtype))
    assert found[:2] == (pytest.approx(loss), [gradient])


@pytest.mark.parametrize(("fn", "missing"), [*((fn, "advantages") for fn in RL), (ref_kl_loss, "ref_logprobs")])
def test_a_stream_that_a_loss_lacks_is_named(fn, missing):
    with pytest.raises(ValueError, match=missing):
        fn(inputs([-1.0], [-1.0]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"advantages": torch.zeros(3)}, r"advantages has shape \[3\]"), ({"trainer_logprobs": torch.zeros(2, 1)}, "1-D")],
)
def test_shapes_of_inputs_are_checked(changes, message):
    plain = {"trainer_logprobs": torch.zeros(2), "inference_logprobs": torch.zeros(2), "loss_mask": torch.ones(2) > 0}
    with pytest.raises(ValueError, match=message):
        LossInputs(**plain | changes)
