"""Numbers of a step's tokens by env, by hand."""

import math

import pytest
import torch

from prl.losses import TokenTreatment
from prl.rollouts.messages import MicroBatch
from prl.trainer.batch import stacks
from prl.trainer.metrics import SAMPLED_PER_RANK, EnvTokens

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


def test_means_and_quantiles_by_hand(stack):
    """The last token has no measured logprob: it is in no component that reads the sampler."""
    tokens, treatment = EnvTokens(), TokenTreatment()
    treatment.sampled = torch.tensor([False, True, True, False, True, False])
    treatment.mark("rl kept", torch.tensor([False, True, True, False, False, False]))
    treatment.mark("ref_kl dropped", torch.tensor([False, False, False, False, True, False]))
    treatment.mark("invalid logprob", torch.tensor([False, False, False, False, False, True]))
    logprobs = torch.tensor([0.0, -0.5, -3.0, 0.0, -2.5, -9.0])
    entropy = torch.tensor([9.0, 1.0, 2.0, 9.0, 0.5, 0.25])
    found = {
        name: (float(total), int(count))
        for name, (total, count) in tokens.add(stack, logprobs, entropy, treatment).items()
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
    assert tokens.quantiles(CPU) == {
        "log_ratio/a/min": -1.0,
        "log_ratio/a/p10": pytest.approx(-0.85),
        "log_ratio/a/p50": pytest.approx(-0.25),
        "log_ratio/a/p90": pytest.approx(0.35),
        "log_ratio/a/max": 0.5,
        **{f"log_ratio/b/{name}": 0.5 for name in ("min", "p10", "p50", "p90", "max")},
    }


def test_quantiles_of_many_tokens(stack):
    tokens = EnvTokens()
    assert tokens.quantiles(CPU) == {}
    values = torch.randn(10 * SAMPLED_PER_RANK, generator=torch.Generator().manual_seed(0))
    tokens.log_ratios["a"] = [values[:7], values[7:]]
    line = tokens.quantiles(CPU)
    assert (line["log_ratio/a/min"], line["log_ratio/a/max"]) == (float(values.min()), float(values.max()))
    for name, share in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9)):
        assert line[f"log_ratio/a/{name}"] == pytest.approx(float(values.quantile(share)), abs=2e-3)
