"""The drivers: who is scored and when, what is stamped, and what a class of the user's own may do."""

import asyncio
import copy

import pytest

from prl.algorithms.base import Algorithm
from prl.algorithms.grpo import GRPOAlgorithm
from prl.algorithms.reference import KLConfig
from prl.base.errors import ConfigError, EngineError
from prl.config.model_reference import FrozenModelConfig
from prl.engines.frozen import clients_of
from prl.rollouts.rollout import Stage


class Silent(Algorithm):
    """Assigns no advantage."""


class Ce(Algorithm):
    action_loss_type = "ce"


async def test_each_sample_gets_its_own_part_of_the_credit(make_rollout):
    rollout = make_rollout(lengths=(3, 2, 3), advantages=[float(i) for i in range(8)])
    await Silent().finalize_group([rollout])
    assert [sample.advantages for sample in rollout.samples] == [[0.0, 1.0, 2.0], [0.0, 4.0], [0.0, 6.0, 7.0]]


async def test_what_is_connected_is_waited_for_and_closed(frozen, attached):
    algorithm = attached(Silent())
    pool = await algorithm.connect(FrozenModelConfig(name="big", base_url="http://a/v1", timeout_s=7.0))
    assert algorithm.pools == frozen == [pool] and pool.config.name == "big"
    assert pool.waited == [7.0] and not pool.closed
    await algorithm.close()
    assert pool.closed


async def test_hosted_model_is_connected_by_its_name(frozen, reference, attached):
    hosted = {"teacher": lambda asked: reference if asked.timeout_s == 7.0 else None}
    algorithm = attached(Silent(), clients=clients_of(hosted))
    assert await algorithm.connect(FrozenModelConfig(name="teacher", timeout_s=7.0)) is reference
    assert reference.waited == [7.0] and algorithm.pools == [reference] and frozen == []
    elsewhere = await algorithm.connect(FrozenModelConfig(name="teacher", base_url="http://h/v1"))
    assert elsewhere.config.urls == ["http://h/v1"], "a URL of its own comes first"
    with pytest.raises(ConfigError, match="the model to connect is a frozen model without base_url"):
        await algorithm.connect(FrozenModelConfig(name="other"))
    with pytest.raises(ConfigError, match="the model to connect='teacher' is not a model reference"):
        await algorithm.connect("teacher")


async def test_rollout_that_a_hook_gives_up_costs_no_other(make_rollout):
    class GivesUp(Ce):
        async def score_rollout(self, rollout):
            if rollout.reward < 0:
                rollout.fail(ValueError("unusable"), "env")

        def score_group(self, group):
            group[-1].fail(ValueError("no use either"), "env")

    rollouts = [make_rollout(reward) for reward in (-1.0, 0.0, 1.0)]
    algorithm = GivesUp()
    for rollout in rollouts:
        await algorithm.finalize_rollout(rollout)
    await algorithm.finalize_group(rollouts)
    assert [r.error for r in rollouts] == ["ValueError: unusable", None, "ValueError: no use either"]
    assert [r.samples[0].ce_weights for r in rollouts] == [None, [0.0, 1.0, 1.0, 1.0], None]


@pytest.mark.parametrize("component", ["ce", "ref_kl"])
@pytest.mark.parametrize(
    ("written", "stamped"),
    [
        # two tokens of a prompt, one sampled, one of the env, one sampled
        ([0.0, 0.5, 0.0, 0.25, 0.0], [0.0, 0.5, 1.0, 0.25, 1.0]),  # observations alone: added to the default
        ([0.0, 0.5, 0.0, 0.25, 2.0], [0.0, 0.5, 0.0, 0.25, 2.0]),  # a sampled token as well: complete
        ([0.0, 0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0, 1.0]),
        ([0.0, 0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0]),  # nothing at all: left out altogether
        ([0.0, 0.0, 0.0, -0.5, 0.0], [0.0, 0.0, 1.0, -0.5, 1.0]),
        (None, [0.0, 0.0, 1.0, 0.0, 1.0]),
    ],
)
async def test_weights_on_observations_are_added_to_the_default(
    make_rollout, make_sample, play, component, written, stamped
):
    class Adds(Algorithm):
        action_loss_type = component

        async def score_rollout(self, rollout):
            for sample in rollout.samples:
                setattr(sample, f"{component}_weights", written)

    rollout = make_rollout()
    rollout.samples = [make_sample(5)]
    rollout.samples[0].mask = [False, False, True, False, True]
    await play(Adds(), [rollout])
    (sample,) = rollout.samples
    assert getattr(sample, f"{component}_weights") == stamped
    assert sample.rl_weights == [0.0] * 5 and sample.mask == [False, False, True, False, True]


class BatchNormalised(GRPOAlgorithm):
    """Divides credit by the standard deviation over the batch."""

    def score_batch(self, groups):
        rewards = [rollout.reward for group in groups for rollout in group]
        mean = sum(rewards) / len(rewards)
        std = (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5
        for rollout in [rollout for group in groups for rollout in group]:
            credit = next(advantage for advantage in rollout.advantages if advantage)
            rollout.assign_advantages(credit / std)


async def test_score_batch_replaces_the_credit_of_groups(make_rollout, play, credit):
    """Rewards 1, 0, 0, 4: their mean is 1.25 and their standard deviation (10.75 / 4) ** .5."""
    algorithm = BatchNormalised(kl=KLConfig(coef=0.25))
    groups = [
        await play(algorithm, [make_rollout(reward=reward) for reward in rewards]) for rewards in ((1, 0), (0, 4))
    ]
    before = [copy.deepcopy(rollout.samples) for group in groups for rollout in group]
    algorithm.finalize_batch(groups)
    std = 2.6875**0.5
    found = [credit(rollout) for group in groups for rollout in group]
    assert found == pytest.approx([0.5 / std, -0.5 / std, -2 / std, 2 / std], rel=1e-12)
    after = [rollout.samples for group in groups for rollout in group]
    for old, new in zip(before, after, strict=True):
        for was, sample in zip(old, new, strict=True):
            assert sample.ref_kl_weights == was.ref_kl_weights == [0.25 * float(trains) for trains in sample.mask]
            assert (sample.rl_weights, sample.ce_weights) == (was.rl_weights, was.ce_weights)


@pytest.mark.parametrize("hook", ["score_rollout", "score_group"])
@pytest.mark.parametrize(
    "meddle", [lambda sample: sample.token_ids.__setitem__(-1, 99), lambda sample: sample.mask.__setitem__(0, True)]
)
async def test_algorithm_that_changes_tokens_is_refused(make_rollout, play, hook, meddle):
    class Meddler(Silent):
        async def score_rollout(self, rollout):
            if hook == "score_rollout":
                meddle(rollout.samples[0])

        def score_group(self, group):
            if hook == "score_group":
                meddle(group[0].samples[0])

    with pytest.raises(ValueError, match="an algorithm may write its streams only"):
        await play(Meddler(), [make_rollout(lengths=(4, 5))])


@pytest.mark.parametrize("stream", ["rl_weights", "ref_kl_weights"])
async def test_frozen_models_rollout_feeds_ce_alone(make_rollout, stream):
    class Feeds(Ce):
        def score_group(self, group):
            setattr(group[0].samples[0], stream, [0.0, 1.0])

    frozen, live = (make_rollout(lengths=(2,), version=version, advantages=1.0) for version in (None, 0))
    await Feeds().finalize_group([live])
    with pytest.raises(ValueError, match="a frozen model's rollout feeds the (rl|ref_kl) loss"):
        await Feeds().finalize_group([frozen])
    await Ce().finalize_group([fine := make_rollout(lengths=(2,), version=None)])
    assert (fine.samples[0].rl_weights, fine.samples[0].ce_weights) == ([0.0, 0.0], [0.0, 1.0])


@pytest.mark.parametrize("hook", ["score_group", "score_batch"])
async def test_stream_that_is_not_finite_is_refused(make_rollout, play, hook, monkeypatch):
    def score(_, groups):
        rollout = groups[0] if hook == "score_group" else groups[0][0]
        rollout.samples[0].rl_weights = [float("nan")] * 4

    monkeypatch.setattr(Silent, hook, score, raising=False)
    with pytest.raises(ValueError, match="rl_weights of a sample holds a number that is not finite"):
        group = await play(Silent(), [make_rollout(1.0, advantages=1.0)])
        Silent().finalize_batch([group])


async def test_hooks_see_active_rollouts_and_are_awaited(make_rollout, play):
    class Mixed(Algorithm):
        """Policy gradient on the actions, at a weight of its own, and cross-entropy on the prompt."""

        async def score_rollout(self, rollout):
            if rollout.reward < 0:
                raise EngineError("gone", 503)
            for sample in rollout.samples:
                sample.rl_weights = [0.5 * trains for trains in sample.mask]
                sample.ce_weights = [0.1 * (not trains) for trains in sample.mask]

        async def score_group(self, group):
            await asyncio.sleep(0.02)
            for rollout in group:
                rollout.assign_advantages(float(len(group)))

    empty, failed = make_rollout(), make_rollout(error="ValueError: no")
    empty.leave(Stage.EMPTY, "nothing was sampled")
    group = await play(Mixed(), [make_rollout(lengths=(3, 2)), make_rollout(-1.0), empty, failed])
    assert [rollout.error for rollout in group] == [None, "EngineError: gone", None, "ValueError: no"]
    one, two = group[0].samples
    assert (one.advantages, two.advantages) == ([0.0, 1.0, 1.0], [0.0, 1.0])
    assert (one.rl_weights, one.ce_weights, one.ref_kl_weights) == ([0.0, 0.5, 0.5], [0.1, 0.0, 0.0], None)
    assert all(rollout.advantages is rollout.samples[0].advantages is None for rollout in group[1:])
