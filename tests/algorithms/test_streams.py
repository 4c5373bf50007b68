"""What each algorithm ships with a sample: its streams and no others."""

import pytest

from prl.algorithms.custom import CustomAlgorithm
from prl.algorithms.echo import EchoAlgorithm
from prl.algorithms.grpo import GRPOAlgorithm
from prl.algorithms.max_rl import MaxRLAlgorithm
from prl.algorithms.opd import OPDAlgorithm
from prl.algorithms.opsd import OPSDAlgorithm
from prl.algorithms.reference import KLConfig
from prl.algorithms.reinforce_pp import ReinforcePPAlgorithm
from prl.algorithms.reward import RewardAlgorithm
from prl.algorithms.sft import SFTDistillAlgorithm
from prl.algorithms.turn import TurnAlgorithm
from prl.config.model_reference import FrozenModelConfig, SourceConfig
from prl.filters.zero_advantage import ZeroAdvantage
from prl.rollouts.components import COMPONENTS

STREAMS = ("advantages", "ref_logprobs", "rl_weights", "ce_weights", "ref_kl_weights")
TEACHER = FrozenModelConfig(name="big", base_url="http://a/v1")


def credit(group):
    return [1.0 for _ in group]


ALGORITHMS = [
    (GRPOAlgorithm, {}, {"advantages"}),
    (GRPOAlgorithm, {"length_penalty": "tokens"}, {"advantages"}),
    (MaxRLAlgorithm, {}, {"advantages"}),
    (TurnAlgorithm, {"gamma": 0.5}, {"advantages"}),
    (ReinforcePPAlgorithm, {}, {"advantages"}),
    (RewardAlgorithm, {}, {"advantages"}),
    (CustomAlgorithm, {"fn": credit}, {"advantages"}),
    (EchoAlgorithm, {}, {"advantages", "ce_weights"}),
    (SFTDistillAlgorithm, {"sampling": SourceConfig(source=TEACHER)}, {"rl_weights", "ce_weights"}),
    (OPDAlgorithm, {"teacher": TEACHER}, {"rl_weights", "ref_kl_weights", "ref_logprobs"}),
    (OPSDAlgorithm, {}, {"rl_weights", "ref_kl_weights", "ref_logprobs"}),
]


@pytest.fixture
def group(new_talk, user, tool, call):
    """Two rollouts with an observation between two turns."""

    def make(reward):
        talk = new_talk()
        talk.turn([*talk.turn([user("2+2=")], call), tool("four")], "4")
        talk.trace.info["demonstration"] = "2+2=4"
        return talk.rollout(reward)

    return [make(1.0), make(0.0)]


@pytest.fixture
def algorithm_of(attached, frozen):
    return lambda cls, options: attached(cls(**options))


@pytest.mark.parametrize(("cls", "options", "streams"), ALGORITHMS)
async def test_algorithm_ships_its_own_streams_alone(group, algorithm_of, play, cls, options, streams):
    await play(algorithm_of(cls, options), group)
    assert all((rollout.advantages is not None) == ("advantages" in streams) for rollout in group)
    for sample in (sample for rollout in group for sample in rollout.samples):
        assert {name for name in STREAMS if getattr(sample, name) is not None} == streams
        assert all(len(getattr(sample, name)) == len(sample.token_ids) for name in streams)
        actions, nothing = [float(trains) for trains in sample.mask], [0.0] * len(sample.mask)
        if "rl_weights" in streams:
            assert sample.rl_weights == nothing
            assert (sample.ce_weights or sample.ref_kl_weights) == actions
        if "ce_weights" in streams and "advantages" in streams:
            assert not any(w for w, trains in zip(sample.ce_weights, sample.mask, strict=True) if trains)


@pytest.mark.parametrize(("cls", "options", "streams"), ALGORITHMS)
async def test_zero_advantage_drops_only_what_has_no_signal(group, algorithm_of, play, cls, options, streams):
    for rollout in group:
        rollout.trace.rewards["answer"].score = 0.0
    await play(algorithm_of(cls, options), group)
    dropped = [ZeroAdvantage().matches(rollout) for rollout in group]
    assert dropped == [streams == {"advantages"} and cls is not CustomAlgorithm] * 2


@pytest.mark.parametrize("kl", [0.0, 0.5])
@pytest.mark.parametrize(("cls", "options", "streams"), ALGORITHMS)
async def test_truncated_rollout_trains_no_sampled_token(group, algorithm_of, play, cls, options, streams, kl):
    """What the env says trains as before, and the rollout counts for the others' baseline."""
    if kl and cls.action_loss_type == "rl":
        options = options | {"kl": KLConfig(coef=kl)}
    plain, masked = (algorithm_of(cls, options | {"mask_truncated": on}) for on in (False, True))
    await play(plain, group)
    plain.finalize_batch([group])
    before = [[getattr(sample, name) for name in STREAMS] for rollout in group for sample in rollout.samples]
    for rollout in group:
        rollout.advantages = None
        for sample in rollout.samples:
            for name in STREAMS:
                setattr(sample, name, None)
    group[1].trace.stop("max_output_tokens")
    await play(masked, group)
    masked.finalize_batch([group])
    after = [[getattr(sample, name) for name in STREAMS] for rollout in group for sample in rollout.samples]
    _, (cut,) = (rollout.samples for rollout in group)
    assert after[0] == before[0] and after[1][:2] == before[1][:2], "credit and reference are as they were"
    for component in COMPONENTS.values():
        assert not any(on and trains for on, trains in zip(cut.members(component), cut.mask, strict=True))
    observed = [weight for weight, trains in zip(cut.ce_weights or (), cut.mask, strict=False) if not trains]
    assert observed == [w for w, trains in zip(before[1][3] or (), cut.mask, strict=False) if not trains]
