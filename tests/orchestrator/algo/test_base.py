"""The drivers: who is scored and when, what is stamped, and what a class of the user's own may do."""

import asyncio

import pytest

from prl.config.model_reference import FrozenModelConfig
from prl.errors import DeadlinePassed, EngineError
from prl.orchestrator.algo.base import Algorithm


class Silent(Algorithm):
    """Assigns no advantage."""


class Ce(Algorithm):
    action_loss_type = "ce"


class RefKl(Algorithm):
    action_loss_type = "ref_kl"


class Recording(Algorithm):
    """Notes which rollouts its hooks saw."""

    def __init__(self):
        super().__init__(None, policy_pool=None)
        self.scored, self.groups = [], []

    async def score_rollout(self, rollout):
        self.scored.append(rollout)

    async def score_group(self, group):
        await asyncio.sleep(0)
        self.groups.append(list(group))
        for rollout in group:
            rollout.assign_advantages(2.0)


class Failing(Algorithm):
    """Raises what its config is, after a while."""

    async def score_rollout(self, rollout):
        await asyncio.sleep(0.02)
        raise self.config


async def test_errored_rollouts_skip_every_hook(make_rollout):
    algorithm, fine, bad = Recording(), make_rollout(), make_rollout(error="ValueError: no")
    for rollout in (fine, bad):
        await algorithm.finalize_rollout(rollout)
    await algorithm.finalize_group([bad, fine])
    assert algorithm.scored == [fine] and algorithm.groups == [[fine]]


async def test_a_group_without_survivors_is_not_scored(make_rollout):
    algorithm = Recording()
    await algorithm.finalize_group([make_rollout(error="x")])
    assert algorithm.groups == []


async def test_an_async_score_group_is_awaited_before_stamping(make_rollout):
    rollout = make_rollout(lengths=(3, 2))
    await Recording().finalize_group([rollout])
    assert [sample.advantages for sample in rollout.samples] == [[0.0, 2.0, 2.0], [0.0, 2.0]]


async def test_each_sample_gets_its_own_part_of_the_credit(make_rollout):
    rollout = make_rollout(lengths=(3, 2, 3), advantages=[float(i) for i in range(8)])
    await Silent(None, policy_pool=None).finalize_group([rollout])
    assert [sample.advantages for sample in rollout.samples] == [[0.0, 1.0, 2.0], [0.0, 4.0], [0.0, 6.0, 7.0]]


async def test_rl_without_advantages_stamps_nothing(make_rollout):
    rollout = make_rollout()
    await Silent(None, policy_pool=None).finalize_group([rollout])
    assert rollout.samples[0].advantages is None and rollout.samples[0].rl_weights is None


@pytest.mark.parametrize(
    ("cls", "stream", "other"), [(Ce, "ce_weights", "ref_kl_weights"), (RefKl, "ref_kl_weights", "ce_weights")]
)
async def test_actions_of_another_component_weigh_one_there_and_nothing_on_rl(make_rollout, cls, stream, other):
    rollout = make_rollout(lengths=(3, 2))
    await cls(None, policy_pool=None).finalize_group([rollout])
    assert [getattr(sample, stream) for sample in rollout.samples] == [[0.0, 1.0, 1.0], [0.0, 1.0]]
    assert [sample.rl_weights for sample in rollout.samples] == [[0.0] * 3, [0.0] * 2]
    assert all(getattr(sample, other) is None and sample.advantages is None for sample in rollout.samples)


async def test_a_rollout_that_failed_is_not_stamped(make_rollout):
    rollout = make_rollout(advantages=1.0, error="ValueError: no")
    await Ce(None, policy_pool=None).finalize_group([rollout, make_rollout()])
    (sample,) = rollout.samples
    assert sample.advantages is sample.ce_weights is sample.rl_weights is None


async def test_a_model_that_fails_makes_an_errored_rollout_which_took_its_time(make_rollout):
    rollout, other = make_rollout(), make_rollout()
    algorithm = Failing(EngineError("gone", 503), policy_pool=None)
    await algorithm.finalize_rollout(rollout)
    assert rollout.error == "EngineError: gone" and rollout.trace.errors[0].message == "gone"
    assert 0.02 <= rollout.scoring_s < 5
    await algorithm.finalize_group([rollout, other])
    assert rollout.samples[0].advantages is None and other.error is None


async def test_the_time_of_scoring_is_measured(make_rollout, monkeypatch):
    async def slow(self, rollout):
        await asyncio.sleep(0.02)

    monkeypatch.setattr(Silent, "score_rollout", slow)
    rollout = make_rollout()
    await Silent(None, policy_pool=None).finalize_rollout(rollout)
    assert 0.02 <= rollout.scoring_s < 5 and rollout.error is None


@pytest.mark.parametrize("error", [ValueError("a bug"), DeadlinePassed("teacher is down"), TimeoutError("t")])
async def test_any_other_error_ends_the_run(make_rollout, error):
    rollout = make_rollout()
    with pytest.raises(type(error), match=str(error)):
        await Failing(error, policy_pool=None).finalize_rollout(rollout)
    assert rollout.error is None


async def test_what_is_connected_is_waited_for_and_closed(frozen):
    algorithm = Silent(None, policy_pool=None)
    pool = await algorithm.connect(FrozenModelConfig(name="big", base_url="http://a/v1", timeout_s=7.0))
    assert algorithm.pools == frozen == [pool] and pool.config.name == "big"
    assert pool.waited == [7.0] and not pool.closed
    await algorithm.close()
    assert pool.closed


class Imitation(Algorithm):
    """A user's own: cross-entropy on the first action alone, at two, and on the prompt's first token."""

    action_loss_type = "ce"

    async def score_rollout(self, rollout):
        for sample in rollout.samples:
            sample.ce_weights = [0.0] * len(sample.token_ids)
            sample.ce_weights[0] = 0.25
            sample.ce_weights[sample.mask.index(True)] = 2.0


async def test_a_stream_that_a_hook_has_written_stays_as_it_is(make_rollout, play):
    (rollout,) = await play(Imitation(None, policy_pool=None), [make_rollout(lengths=(5, 3))])
    assert [s.ce_weights for s in rollout.samples] == [[0.25, 2.0, 0.0, 0.0, 0.0], [0.25, 2.0, 0.0]]
    assert [s.rl_weights for s in rollout.samples] == [[0.0] * 5, [0.0] * 3]
    assert all(s.ref_kl_weights is s.advantages is None for s in rollout.samples)


class Mixed(Algorithm):
    """A user's own: policy gradient on the actions, at a weight of its own, and cross-entropy on the prompt."""

    async def score_rollout(self, rollout):
        for sample in rollout.samples:
            sample.rl_weights = [0.5 * trains for trains in sample.mask]
            sample.ce_weights = [0.1 * (not trains) for trains in sample.mask]
        rollout.assign_advantages(3)


async def test_an_rl_class_keeps_every_stream_of_its_own(make_rollout, play):
    (rollout,) = await play(Mixed(None, policy_pool=None), [make_rollout(lengths=(3,))])
    (sample,) = rollout.samples
    assert (sample.rl_weights, sample.ce_weights) == ([0.0, 0.5, 0.5], [0.1, 0.0, 0.0])
    assert sample.advantages == [0.0, 3.0, 3.0]


async def test_what_sampled_nothing_is_no_baseline_for_what_did(make_rollout):
    from prl.orchestrator.algo.grpo import GRPOAlgorithm, GRPOConfig

    group = [make_rollout(reward=1.0), make_rollout(reward=0.0), make_rollout(reward=1.0)]
    group[2].left_out = "nothing was sampled"
    await GRPOAlgorithm(GRPOConfig(), policy_pool=None).finalize_group(group)
    credits = [{a for a in rollout.advantages if a} for rollout in group[:2]]
    assert credits == [{0.5}, {-0.5}] and group[2].advantages is None


@pytest.mark.parametrize("hook", ["score_rollout", "score_group"])
@pytest.mark.parametrize(
    "meddle",
    [
        lambda rollout: rollout.samples[0].token_ids.__setitem__(-1, 99),
        lambda rollout: rollout.samples[0].mask.__setitem__(0, True),
        lambda rollout: rollout.samples.pop(),
    ],
)
async def test_no_algorithm_changes_what_was_sampled(make_rollout, hook, meddle):
    """The exactness of tokens does not end where somebody's own code begins."""

    class Meddler(Recording):
        async def score_rollout(self, rollout):
            if hook == "score_rollout":
                meddle(rollout)

        def score_group(self, group):
            for rollout in group if hook == "score_group" else ():
                meddle(rollout)

    algorithm, rollout = Meddler(), make_rollout(lengths=(4, 5))
    await algorithm.finalize_rollout(rollout)
    with pytest.raises(ValueError, match="an algorithm may write its streams only"):
        await algorithm.finalize_group([rollout])


@pytest.mark.parametrize(
    "streams", [{}, {"rl_weights": [0.0, 1.0]}, {"rl_weights": [0.0] * 2, "ref_kl_weights": [0.0, 1.0]}]
)
async def test_a_frozen_models_rollout_feeds_ce_alone(make_rollout, streams):
    class Imitates(Algorithm):
        action_loss_type = "ce"

        def score_group(self, group):
            for rollout in group:
                for name, values in streams.items():
                    setattr(rollout.samples[0], name, values)

    frozen, live = (make_rollout(lengths=(2,), version=version, advantages=1.0) for version in (None, 0))
    await Imitates(None, policy_pool=None).finalize_group([live])
    if not streams:  # the driver gives it weights of ce alone
        await Imitates(None, policy_pool=None).finalize_group([frozen])
        assert frozen.samples[0].rl_weights == [0.0, 0.0] and frozen.samples[0].ce_weights == [0.0, 1.0]
        return
    with pytest.raises(ValueError, match="a frozen model's rollout feeds the rl or ref_kl loss"):
        await Imitates(None, policy_pool=None).finalize_group([frozen])
