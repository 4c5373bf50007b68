"""The dispatcher: whole groups, shares by weight, and nothing that ends unnoticed."""

import asyncio

import pytest
import verifiers.v1 as vf

from prl.config.errors import PrlError
from prl.orchestrator.algo.base import Algorithm
from prl.orchestrator.dispatcher import Dispatcher


class Buggy(Algorithm):
    def score_group(self, group):
        raise ZeroDivisionError("a bug of the algorithm")


class BadGrader(vf.Task):
    """Cannot grade a reply of more than one character."""

    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        if len(trace.last_reply) > 1:
            raise RuntimeError("too long for me")
        return float(trace.last_reply)


async def finish(dispatcher):
    while dispatcher.in_flight:
        await asyncio.sleep(0)


async def test_a_group_arrives_credited_and_leaves_the_books(make_env):
    ended = []
    dispatcher = Dispatcher([make_env(group_size=8)], ended.append)
    dispatcher.start_group()
    assert dispatcher.rollouts_in_flight == 8
    await finish(dispatcher)
    (group,) = ended
    assert group.env_name == "toy" and len(group.rollouts) == len(group.survivors) == 8
    assert dispatcher.rollouts_in_flight == 0 and dispatcher.failure is None
    credits = [max(rollout.advantages, key=abs) for rollout in group.rollouts]
    assert sum(credits) == pytest.approx(0, abs=1e-9) and any(credits)


async def test_a_group_is_one_request(make_env, pool):
    dispatcher = Dispatcher([make_env(group_size=8)], lambda group: None)
    dispatcher.start_group()
    await finish(dispatcher)
    assert pool.requests == 1


async def test_envs_share_rollouts_not_groups_by_their_weights(make_env):
    ended = []
    envs = [make_env("heavy", weight=3.0, group_size=2), make_env("light", weight=1.0, group_size=4)]
    dispatcher = Dispatcher(envs, ended.append)
    for _ in range(70):
        dispatcher.start_group()
    await finish(dispatcher)
    rollouts = {name: sum(len(g.rollouts) for g in ended if g.env_name == name) for name in ("heavy", "light")}
    assert rollouts == {"heavy": 120, "light": 40}


async def test_stale_groups_are_cancelled_counted_in_rollouts_and_reported_as_ended(make_env, pool):
    ended = []
    pool.delay = 0.2
    dispatcher = Dispatcher([make_env(group_size=4)], ended.append)
    dispatcher.start_group()
    await asyncio.sleep(0)
    pool.version = 2
    dispatcher.start_group()
    assert dispatcher.drop_stale(2, 2) == 0
    assert dispatcher.drop_stale(2, 1) == 4
    await finish(dispatcher)
    assert ended[0] is None, "whoever waits for a group has to hear that it will not come"
    assert [group.start_version for group in ended[1:]] == [2]


async def test_an_algorithms_exception_is_kept_and_reported_as_an_end(make_env, pool):
    ended = []
    dispatcher = Dispatcher([make_env(algorithm=Buggy(None, policy_pool=pool))], ended.append)
    dispatcher.start_group()
    await finish(dispatcher)
    assert isinstance(dispatcher.failure, PrlError) and ended == [None]
    assert "env 'toy', Buggy: ZeroDivisionError" in str(dispatcher.failure)


async def test_a_failing_grader_leaves_a_partial_group(make_env):
    ended = []
    dispatcher = Dispatcher([make_env(group_size=16, task=BadGrader)], ended.append)
    dispatcher.start_group()
    await finish(dispatcher)
    (group,) = ended
    assert 0 < len(group.survivors) < 16
    assert all("too long for me" in r.error for r in group.rollouts if r not in group.survivors)
    baseline = sum(r.reward for r in group.survivors) / len(group.survivors)
    assert all(r.advantages[-1] == pytest.approx(r.reward - baseline) for r in group.survivors)


async def test_close_cancels_what_is_in_flight(make_env, pool):
    pool.delay = 60.0
    dispatcher = Dispatcher([make_env()], lambda group: None)
    dispatcher.start_group()
    await asyncio.sleep(0)
    await dispatcher.close()
    assert not dispatcher.in_flight


async def test_a_group_that_takes_too_long_fails_with_the_key_to_turn(make_env, pool):
    ended = []
    pool.delay = 60.0
    dispatcher = Dispatcher([make_env("slow", timeout_s=0.02)], ended.append)
    dispatcher.start_group()
    await asyncio.wait_for(finish(dispatcher), 5)
    (group,) = ended
    assert not group.survivors
    assert all("0.02 s (envs.slow.timeout_s)" in rollout.error for rollout in group.rollouts)


class HangsOnTheLongest(vf.Task):
    """Grades in half a second, all but the longest replies, which it never grades."""

    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        await asyncio.sleep(60.0 if len(trace.last_reply) == 3 else 0.5)
        return 1.0


async def test_a_hanging_grader_costs_its_own_rollout_and_graders_run_side_by_side(make_env):
    ended = []
    dispatcher = Dispatcher([make_env("slow", task=HangsOnTheLongest, group_size=16, timeout_s=2.0)], ended.append)
    dispatcher.start_group()
    await asyncio.wait_for(finish(dispatcher), 5)  # one after the other would take the deadline alone
    (group,) = ended
    late = [rollout for rollout in group.rollouts if rollout.error]
    assert 0 < len(late) < 16 and all("2 s (envs.slow.timeout_s)" in rollout.error for rollout in late)
    assert all(rollout.reward == 1.0 and rollout.samples for rollout in group.survivors)
