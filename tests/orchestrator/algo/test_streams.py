"""What each algorithm ships with a sample: its streams and no others."""

import pytest

from prl.config.model_reference import FrozenModelConfig
from prl.inference.sampling import SamplingConfig
from prl.orchestrator.algo.custom import CustomAlgorithm, CustomConfig
from prl.orchestrator.algo.echo import EchoAlgorithm, EchoConfig
from prl.orchestrator.algo.grpo import GRPOAlgorithm, GRPOConfig
from prl.orchestrator.algo.max_rl import MaxRLAlgorithm, MaxRLConfig
from prl.orchestrator.algo.opd import OPDAlgorithm, OPDConfig
from prl.orchestrator.algo.opsd import OPSDAlgorithm, OPSDConfig
from prl.orchestrator.algo.reward import RewardAlgorithm, RewardConfig
from prl.orchestrator.algo.sft import SFTDistillAlgorithm, SFTDistillConfig
from prl.orchestrator.filters.zero_advantage import ZeroAdvantage, ZeroAdvantageConfig

STREAMS = ("advantages", "ref_logprobs", "rl_weights", "ce_weights", "ref_kl_weights")
TEACHER = FrozenModelConfig(name="big", base_url="http://a/v1")


def credit(group):
    return [1.0 for _ in group]


ALGORITHMS = [
    (GRPOAlgorithm, GRPOConfig(), {"advantages"}),
    (GRPOAlgorithm, GRPOConfig(length_penalty="tokens"), {"advantages"}),
    (MaxRLAlgorithm, MaxRLConfig(), {"advantages"}),
    (RewardAlgorithm, RewardConfig(), {"advantages"}),
    (CustomAlgorithm, CustomConfig(), {"advantages"}),
    (EchoAlgorithm, EchoConfig(), {"advantages", "ce_weights"}),
    (SFTDistillAlgorithm, SFTDistillConfig(sampling=SamplingConfig(source=TEACHER)), {"rl_weights", "ce_weights"}),
    (OPDAlgorithm, OPDConfig(teacher=TEACHER), {"rl_weights", "ref_kl_weights", "ref_logprobs"}),
    (OPSDAlgorithm, OPSDConfig(), {"rl_weights", "ref_kl_weights", "ref_logprobs"}),
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
def algorithm_of(user_package, reference, renderer, frozen):
    def make(cls, config):
        if cls is CustomAlgorithm:
            config.fn._target_ = user_package(credit)
        return cls(config, policy_pool=reference, renderer=renderer)

    return make


@pytest.mark.parametrize(("cls", "config", "streams"), ALGORITHMS)
async def test_an_algorithm_ships_its_own_streams_and_no_others(group, algorithm_of, play, cls, config, streams):
    await play(algorithm_of(cls, config), group)
    for sample in (sample for rollout in group for sample in rollout.samples):
        assert {name for name in STREAMS if getattr(sample, name) is not None} == streams
        assert all(len(getattr(sample, name)) == len(sample.token_ids) for name in streams)
        actions, nothing = [float(trains) for trains in sample.mask], [0.0] * len(sample.mask)
        if "rl_weights" in streams:
            assert sample.rl_weights == nothing
            assert (sample.ce_weights or sample.ref_kl_weights) == actions
        if "ce_weights" in streams and "advantages" in streams:
            assert not any(w for w, trains in zip(sample.ce_weights, sample.mask, strict=True) if trains)


@pytest.mark.parametrize(("cls", "config", "streams"), ALGORITHMS)
async def test_only_an_algorithm_with_credit_of_its_own_assigns_advantages(
    group, algorithm_of, play, cls, config, streams
):
    await play(algorithm_of(cls, config), group)
    assert all((rollout.advantages is not None) == ("advantages" in streams) for rollout in group)


@pytest.mark.parametrize(("cls", "config", "streams"), ALGORITHMS)
async def test_the_zero_advantage_filter_drops_only_what_has_no_signal(group, algorithm_of, play, cls, config, streams):
    for rollout in group:
        rollout.trace.rewards["answer"].score = 0.0
    await play(algorithm_of(cls, config), group)
    dropped = [ZeroAdvantage(ZeroAdvantageConfig(), vocab_size=64).matches(rollout) for rollout in group]
    assert dropped == [streams == {"advantages"} and cls is not CustomAlgorithm] * 2


async def test_rollouts_of_several_samples_are_stamped_one_after_the_other(make_rollout, play):
    (rollout,) = await play(
        SFTDistillAlgorithm(SFTDistillConfig(), policy_pool=None), [make_rollout(lengths=(3, 2, 4))]
    )
    assert [sample.ce_weights for sample in rollout.samples] == [[0.0, 1.0, 1.0], [0.0, 1.0], [0.0, 1.0, 1.0, 1.0]]
