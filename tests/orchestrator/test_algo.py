"""Algorithms: grpo's credit by hand, the drivers, and what they stamp."""

import asyncio

import pytest

from prl.orchestrator.algo.base import Algorithm
from prl.orchestrator.algo.grpo import GRPOAlgorithm, GRPOConfig


@pytest.fixture
def grpo():
    return GRPOAlgorithm(GRPOConfig(), policy_pool=None)


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


def credits(rollout):
    return {a for s in rollout.samples for a, trains in zip(s.advantages, s.mask, strict=True) if trains}


async def test_grpo_credits_the_reward_minus_the_mean_of_the_group(grpo, make_rollout):
    group = [make_rollout(reward) for reward in (1.0, 0.0, 0.0, 1.0, 0.5)]
    await grpo.finalize_group(group)
    assert [credits(rollout) for rollout in group] == [{0.5}, {-0.5}, {-0.5}, {0.5}, {0.0}]
    assert all(r.samples[0].advantages[0] == 0.0 for r in group), "the prompt gets no credit"


async def test_grpo_ships_no_weight_streams(grpo, make_rollout):
    rollout = make_rollout(1.0)
    await grpo.finalize_group([rollout, make_rollout(0.0)])
    (sample,) = rollout.samples
    assert sample.rl_weights is sample.ce_weights is sample.ref_kl_weights is sample.ref_logprobs is None


@pytest.mark.parametrize("rewards", [(0.7,), (0.7,) * 3, (0.1,) * 8])
async def test_grpo_gives_a_group_of_one_and_a_group_of_equals_nothing(grpo, make_rollout, rewards):
    group = [make_rollout(reward) for reward in rewards]
    await grpo.finalize_group(group)
    assert all(credits(rollout) == {0.0} and rollout.advantages is not None for rollout in group)


async def test_grpo_measures_survivors_against_survivors(grpo, make_rollout):
    group = [make_rollout(1.0), make_rollout(0.0), make_rollout(9.0, error="ValueError: no")]
    await grpo.finalize_group(group)
    assert [credits(rollout) for rollout in group[:2]] == [{0.5}, {-0.5}]
    assert group[2].advantages is None and group[2].samples[0].advantages is None


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


async def test_rl_without_advantages_stamps_nothing(make_rollout):
    rollout = make_rollout()
    await Silent(None, policy_pool=None).finalize_group([rollout])
    assert rollout.samples[0].advantages is None and rollout.samples[0].rl_weights is None


@pytest.mark.parametrize(("cls", "stream", "other"), [(Ce, "ce_weights", "ref_kl_weights"), (RefKl, "ref_kl_weights", "ce_weights")])  # fmt: skip
async def test_actions_of_another_component_weigh_one_there_and_nothing_on_rl(make_rollout, cls, stream, other):
    rollout = make_rollout(lengths=(3, 2))
    await cls(None, policy_pool=None).finalize_group([rollout])
    assert [getattr(sample, stream) for sample in rollout.samples] == [[0.0, 1.0, 1.0], [0.0, 1.0]]
    assert [sample.rl_weights for sample in rollout.samples] == [[0.0] * 3, [0.0] * 2]
    assert all(getattr(sample, other) is None and sample.advantages is None for sample in rollout.samples)
