"""Numbers of a step's tokens by env, by hand."""

import math

import pytest
import torch

from prl.losses import TokenTreatment
from prl.rollouts.messages import MicroBatch
from prl.trainer.batch import stacks
from prl.trainer.metrics import metrics_of_envs

CPU = torch.device("cpu")


@pytest.fixture
def stack():
    """Two envs in a row of two tokens of padding: a prompt token and two sampled ones each; b feeds ref_kl."""
    row = MicroBatch(
        input_ids=list(range(8)),
        mask=[False, True, True, False, True, True, False, False],
        logprobs=[0.0, -1.0, -2.0, 0.0, -3.0, float("nan"), 0.0, 0.0],
        temperatures=[1.0] * 8,
        position_ids=[0, 1, 2, 0, 1, 2, 0, 0],
        sequence_lengths=[3, 3],
        env_names=["a", "b"],
        losses=["", ""],
        advantages=[1.0] * 8,
        rl_weights=[1.0] * 3 + [0.0] * 5,
        ref_kl_weights=[0.0] * 4 + [1.0] * 2 + [0.0] * 2,
        ref_logprobs=[0.0] * 3 + [0.0, -0.5, -0.5, 0.0, 0.0],
    )
    (found,) = stacks([row], 64, CPU)
    return found


def test_means_by_hand(stack):
    """The last token has no measured logprob: it is in no component that reads the sampler."""
    treatment = TokenTreatment()
    treatment.sampled = torch.tensor([False, True, True, False, True, False])
    treatment.mark("rl kept", torch.tensor([False, True, True, False, False, False]))
    treatment.mark("ref_kl dropped", torch.tensor([False, False, False, False, True, False]))
    treatment.mark("invalid logprob", torch.tensor([False, False, False, False, False, True]))
    logprobs = torch.tensor([0.0, -0.5, -3.0, 0.0, -2.5, -9.0])
    entropy = torch.tensor([9.0, 1.0, 2.0, 9.0, 0.5, 0.25])
    found = {
        name: (float(total), int(count))
        for name, (total, count) in metrics_of_envs(stack, logprobs, entropy, treatment).items()
    }
    k3 = {x: math.exp(x) - x - 1 for x in (0.5, -1.0)}
    assert found == {
        "entropy/a/mean": (3.0, 2),
        "entropy/b/mean": (pytest.approx(0.75), 2),
        "mismatch_kl/a/mean": (pytest.approx(k3[0.5] + k3[-1.0]), 2),
        "mismatch_kl/b/mean": (pytest.approx(k3[0.5]), 1),
        "ref_kl/a/mean": (0.0, 0),
        "ref_kl/b/mean": (pytest.approx(-0.5 + 2.5), 1),
    }
