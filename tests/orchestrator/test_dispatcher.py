"""The dispatcher: whole groups, shares by weight, and nothing that ends unnoticed."""

import asyncio
import contextlib
import functools
import math
from collections import Counter

import pytest
import verifiers.v1 as vf
from patience import patient

from prl.algorithms.base import Algorithm
from prl.algorithms.grpo import GRPOAlgorithm
from prl.algorithms.reward import RewardAlgorithm
from prl.algorithms.sft import SFTDistillAlgorithm
from prl.base.errors import DeadlinePassed, EngineError, PrlError
from prl.config.schema import EnvConfig
from prl.curriculum.base import Context
from prl.curriculum.pools import TaskCurriculum
from prl.envs.environment import Environment
from prl.orchestrator.dispatcher import Dispatcher
from prl.orchestrator.state import DispatcherState, SavedTask
from prl.orchestrator.types import TrainEnv, by_seat


def emitted(dispatcher):
    """The events so far."""
    return [dispatcher.events.get_nowait() for _ in range(dispatcher.events.qsize())]


async def finish(dispatcher):
    """Wait until no group is in flight; the groups that finished, in their order."""
    while dispatcher.in_flight:
        await asyncio.sleep(0)
    return emitted(dispatcher)


def dispatching(*envs):
    """A dispatcher, while the block lasts."""
    return Dispatcher(list(envs), asyncio.Queue()).running()


async def play(*envs, groups=1):
    """Start groups and play them to their end; the groups."""
    async with dispatching(*envs) as dispatcher:
        for _ in range(groups):
            assert dispatcher.start_group()
        return await finish(dispatcher)


async def play_one(env, limit_s=5):
    """One group of the env, played to its end."""
    (group,) = await asyncio.wait_for(play(env), patient(limit_s))
    return group


async def test_a_group_arrives_credited_and_leaves_the_books(make_env):
    async with dispatching(make_env(group_size=8)) as dispatcher:
        dispatcher.start_group()
        assert dispatcher.rollouts_in_flight == 8
        (group,) = await finish(dispatcher)
    assert group.env.name == "toy" and len(group.rollouts) == len(group.survivors) == 8
    assert dispatcher.rollouts_in_flight == 0
    credits = [max(rollout.advantages, key=abs) for rollout in group.rollouts]
    assert sum(credits) == pytest.approx(0, abs=1e-9) and any(credits)


async def test_envs_share_rollouts_not_groups_by_their_weights(make_env):
    envs = [make_env("heavy", weight=3.0, group_size=2), make_env("light", weight=1.0, group_size=4)]
    ended = await play(*envs, groups=70)
    rollouts = {name: sum(len(g.rollouts) for g in ended if g.env.name == name) for name in ("heavy", "light")}
    assert rollouts == {"heavy": 120, "light": 40}


def mixing(make_env, weights, *, light=1.0):
    """Two envs of four rollouts a group; the first one's weight is as `weights` says of the step."""
    envs = [make_env("mixed"), make_env("other", weight=light)]
    envs[0].curriculum.weight = lambda context: weights[context.step]
    return envs


async def envs_of(dispatcher, step, groups):
    """The envs of the groups that are started one after the other at a step."""
    for _ in range(groups):
        dispatcher.start_group(Context(step))
    return [group.env.name for group in list(dispatcher.in_flight)[-groups:]]


async def test_curriculum_changes_the_mix_from_then_on(make_env):
    async with dispatching(*mixing(make_env, {1: 1.0, 2: 3.0, 3: 0.001, 4: 1.0})) as dispatcher:
        assert Counter(await envs_of(dispatcher, 1, 40)) == {"mixed": 20, "other": 20}
        assert Counter(await envs_of(dispatcher, 2, 8)) == {"mixed": 6, "other": 2}, "what it had before is not made up"
        assert Counter(await envs_of(dispatcher, 3, 40))["mixed"] <= 1
        assert abs(Counter(await envs_of(dispatcher, 4, 20))["mixed"] - 10) <= 1, "nor what it has missed"


async def test_mix_goes_on_from_a_checkpoint(make_env):
    weights = {1: 1.0, 2: 2.5}
    async with dispatching(*mixing(make_env, weights, light=0.7)) as dispatcher:
        await envs_of(dispatcher, 1, 7)
        await envs_of(dispatcher, 2, 6)
        state = dispatcher.state_dict()
        expected = await envs_of(dispatcher, 2, 15)
    state.in_flight.clear()
    async with dispatching(*mixing(make_env, weights, light=0.7)) as again:
        again.load_state_dict(state)
        assert await envs_of(again, 2, 15) == expected


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf])
async def test_weight_that_is_none_is_refused(make_env, weight):
    async with dispatching(*mixing(make_env, {1: weight})) as dispatcher:
        with pytest.raises(PrlError, match="env 'mixed': a curriculum's weight must be a number above 0"):
            dispatcher.start_group()


async def test_stale_groups_are_cancelled_and_counted(make_env, pool):
    pool.delay = 0.2
    async with dispatching(make_env(group_size=4)) as dispatcher:
        dispatcher.start_group()
        await asyncio.sleep(0)
        pool.version = 2
        dispatcher.start_group()
        assert dispatcher.drop(-1) == 0
        assert dispatcher.drop(0) == 4
        assert dispatcher.rollouts_in_flight == 4
        assert [group.start_version for group in await finish(dispatcher)] == [2]
        dispatcher.start_group()
        assert dispatcher.drop(math.inf) == 4 and not dispatcher.in_flight


async def test_tasks_of_an_earlier_part_start_first(make_env):
    state = DispatcherState(5, {"toy": 20.0}, [SavedTask(3, "toy", 7), SavedTask(4, "toy", 2)], {"toy": 1.0})
    async with dispatching(make_env(curriculum={"shuffle": False})) as dispatcher:
        dispatcher.load_state_dict(state)
        assert dispatcher.state_dict() == state, "before any of them has started"
        for _ in range(3):
            dispatcher.start_group()
        started = [(group.id, group.task.data.idx) for group in dispatcher.in_flight]
        assert started == [(3, 7), (4, 2), (5, 0)] and dispatcher.state_dict().started == {"toy": 24.0}


# --- credit on arrival ------------------------------------------------------------------------------------------------


class NoAnswer(Algorithm):
    """Its reference has no answer for the longest replies."""

    async def score_rollout(self, rollout):
        if len(rollout.trace.last_reply) == 3:
            raise EngineError("http://teacher answered HTTP 400: no", 400)

    def score_group(self, group):
        for rollout in group:
            rollout.assign_advantages(float(len(group)))


async def test_a_reference_without_an_answer_costs_that_rollout_alone(make_env, pool):
    group = await play_one(make_env(group_size=16, algorithm=NoAnswer))
    lost = [rollout for rollout in group.rollouts if rollout.error]
    assert 0 < len(lost) < 16
    assert {len(rollout.trace.last_reply) for rollout in lost} == {3}
    assert {len(rollout.trace.last_reply) for rollout in group.survivors} == {1, 2}
    assert {rollout.error for rollout in lost} == {"EngineError: http://teacher answered HTTP 400: no"}
    assert {max(rollout.advantages) for rollout in group.survivors} == {float(16 - len(lost))}


async def test_rollout_is_scored_on_arrival(make_env):
    scored, seen = asyncio.Event(), []

    class GradedLast(vf.Task):
        """Grades the longest replies once another rollout has been scored."""

        @vf.reward
        async def answer(self, trace: vf.Trace) -> float:
            if len(trace.last_reply) == 3:
                await scored.wait()
            return 1.0

    class Scores(Algorithm):
        waits_for_group = True

        async def score_rollout(self, rollout):
            seen.append(rollout)
            scored.set()

    group = await play_one(make_env(group_size=16, task=GradedLast, algorithm=Scores, timeout_s=2.0))
    assert len(group.survivors) == 16, "the scores came in time for the graders"
    assert len(seen) == 16 and set(map(id, seen)) == set(map(id, group.rollouts)), "each one once"
    waited = [len(rollout.trace.last_reply) == 3 for rollout in seen]
    assert not waited[0] and any(waited)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("advantages must align"), "env 'mine', Breaks: advantages must align"),
        (TimeoutError("my judge"), "env 'mine', Breaks: TimeoutError: my judge ("),
        (PrlError("a message of its own"), "a message of its own"),
        (asyncio.CancelledError(), "env 'mine': the work on a group was cancelled from within"),
    ],
)
async def test_algorithm_error_ends_the_run_by_name(make_env, error, message):
    def fails(*_):
        raise error.with_traceback(None)

    env = make_env("mine", algorithm=type("Breaks", (Algorithm,), {"score_group": fails}))
    env.environment.config.group_timeout_s = 30.0
    with pytest.raises(PrlError) as raised:
        async with dispatching(env, make_env("other")) as dispatcher:
            dispatcher.start_group()
            dispatcher.start_group()
            await asyncio.sleep(60)
    where = f"{__file__}, line {fails.__code__.co_firstlineno + 1})" * message.endswith("(")
    assert type(raised.value) is PrlError and str(raised.value) == message + where and not dispatcher.in_flight


# --- a deadline of the whole group ------------------------------------------------------------------------------------


async def fails(task, n, sampler, *, group_id, arrived):
    try:
        await asyncio.sleep(60)
    finally:
        raise RuntimeError("a bug of the env's clean-up")


async def ends(task, n, sampler, *, group_id, arrived):
    with contextlib.suppress(asyncio.CancelledError):  # as a library may
        await asyncio.sleep(60)
    return []


@pytest.mark.parametrize("play", [fails, ends])
async def test_dropped_group_neither_arrives_nor_fails(make_env, monkeypatch, play):
    env = make_env()
    monkeypatch.setattr(env.environment, "play", play)
    async with dispatching(env) as dispatcher:
        dispatcher.start_group()
        await asyncio.sleep(0.01)
        assert dispatcher.drop(0) == 4 and dispatcher.drop(0) == 0
        await asyncio.sleep(0.01)
    assert not dispatcher.in_flight and not emitted(dispatcher)


class ScoresSlowly(Algorithm):
    """Takes for ever over the longest replies; what it has begun it must not go on with."""

    going_on = 0

    async def score_rollout(self, rollout):
        if len(rollout.trace.last_reply) == 3:
            self.going_on += 1
            try:
                await asyncio.sleep(60.0)
            finally:
                self.going_on -= 1

    def score_group(self, group):
        for rollout in group:
            rollout.assign_advantages(float(len(group)))


async def test_group_deadline_cuts_slow_scoring(make_env, pool):
    env = make_env("slow", group_size=16, algorithm=ScoresSlowly)
    env.environment.config.group_timeout_s = 0.3
    group = await play_one(env)
    late = [rollout for rollout in group.rollouts if rollout.error]
    assert env.algorithm.going_on == 0 and 0 < len(late) < 16
    assert {len(rollout.trace.last_reply) for rollout in late} == {3}
    message = "TimeoutError: not scored when its group had taken 0.3 s (envs.slow.group_timeout_s)"
    assert {(rollout.error, rollout.error_kind) for rollout in late} == {(message, "timeout")}
    assert {max(rollout.advantages) for rollout in group.survivors} == {float(16 - len(late))}


async def test_group_deadline_cuts_slow_credit(make_env, pool):
    class CreditsSlowly(Algorithm):
        async def score_group(self, group):
            await asyncio.sleep(60.0)

    env = make_env("slow", group_size=4, algorithm=CreditsSlowly)
    env.environment.config.group_timeout_s = 0.5
    group = await play_one(env)
    message = "TimeoutError: not scored when its group had taken 0.5 s (envs.slow.group_timeout_s)"
    assert [(rollout.error, rollout.error_kind) for rollout in group.rollouts] == [(message, "timeout")] * 4


# --- envs that converse -----------------------------------------------------------------------------------------------


def credit(rollout):
    return max(rollout.advantages, key=abs)


def kuhn(conversation, turn):
    """The player bets; the opponent calls in the episodes 1 and 2, else it folds."""
    *_, episode, side, _ = conversation.split("/")
    return "bet" if side == "player" else "call" if episode in "12" else "fold"


async def test_sides_of_a_game_have_baselines_of_their_own(scripted):
    environment = Environment(
        "kuhn_poker", EnvConfig(taskset="prl.envs.tasksets.kuhn_poker", args={"num_tasks": 12}), eval_tasks=0
    )
    task = next(task for task in environment.tasks if task.data.cards == "KJ" and task.data.seat == 0)
    algorithm, sampler, curriculum = GRPOAlgorithm(), scripted(kuhn), TaskCurriculum()
    algorithm.attach(policy_pool=None, renderer=None)
    curriculum.load([task], seed=0, env_name="kuhn_poker")
    parts = {"environment": environment, "curriculum": curriculum, "algorithm": algorithm, "group_size": 4}
    env = TrainEnv(sampler=sampler, eval_sampler=sampler, **parts)
    async with environment.serving(), dispatching(env) as dispatcher:
        assert dispatcher.start_group() == dispatcher.rollouts_in_flight == 8, "shares count both sides"
        (group,) = await finish(dispatcher)
    mine, theirs = by_seat(group.rollouts)
    assert [rollout.reward for rollout in mine] == [0.75, 1.0, 1.0, 0.75]
    assert [rollout.reward for rollout in theirs] == [0.25, 0.0, 0.0, 0.25]
    assert [credit(rollout) for rollout in mine] == [-0.125, 0.125, 0.125, -0.125]
    assert [credit(rollout) for rollout in theirs] == [0.125, -0.125, -0.125, 0.125]


# --- frozen models ----------------------------------------------------------------------------------------------------


def started(dispatcher, groups):
    """The envs of the next `groups` groups, in their order."""
    names = []
    for _ in range(groups):
        assert dispatcher.start_group()
        names.append(list(dispatcher.in_flight)[-1].env.name)
    return names


async def test_env_is_passed_over_while_a_model_is_away(make_env, make_imitating, frozen, renderer):
    other = type(frozen)(renderer._tokenizer)
    async with dispatching(make_env("live"), make_imitating(frozen, references=[other])) as dispatcher:
        for model in (frozen, other):
            assert set(started(dispatcher, 4)) == {"live", "imitating"}
            model.go_away()
            assert set(started(dispatcher, 10)) == {"live"}
            model.come_back()


async def test_returning_env_has_its_share_without_a_burst(make_env, make_imitating, frozen):
    async with dispatching(make_env("live"), make_env("other"), make_imitating(frozen, weight=3.0)) as dispatcher:
        for _ in range(3):
            frozen.go_away()
            names = started(dispatcher, 30)
            assert (names.count("live"), names.count("other")) == (15, 15)
            frozen.come_back()
            names = started(dispatcher, 30)
            assert abs(names.count("imitating") - 18) <= 1 and abs(names.count("live") - names.count("other")) <= 1
            assert names[:10].count("imitating") <= 7, "no burst, not even a short one"


async def test_when_all_envs_wait_nothing_starts_and_nothing_counts(make_imitating, make_distilling, frozen):
    async with dispatching(make_imitating(frozen, weight=3.0), make_distilling(frozen)) as dispatcher:
        frozen.go_away()
        assert not any(dispatcher.start_group() for _ in range(50)) and not dispatcher.in_flight
        frozen.come_back()
        names = started(dispatcher, 40)
        assert (names.count("imitating"), names.count("distilling")) == (30, 10)


async def test_group_failed_while_model_away_is_excused(make_imitating, make_distilling, frozen):
    for make in (make_imitating, make_distilling):
        async with dispatching(make(frozen)) as dispatcher:
            dispatcher.start_group()
            frozen.go_away()
            groups = await finish(dispatcher)
            assert all(group.excused and not group.survivors for group in groups)
            errors = [rollout.error for group in groups for rollout in group.rollouts]
            assert errors == ["EngineError: http://teacher is gone"] * 4
            frozen.come_back()
            dispatcher.start_group()
            groups = await finish(dispatcher)
            assert not any(group.excused for group in groups) and sum(len(group.survivors) for group in groups) == 4


async def test_model_that_is_given_up_ends_the_run(make_imitating, frozen):
    with pytest.raises(DeadlinePassed, match="http://teacher"):
        async with dispatching(make_imitating(frozen)) as dispatcher:
            dispatcher.start_group()
            frozen.go_away(for_at_most_s=-1)
            await finish(dispatcher)


async def test_setup_waits_for_frozen_models(make_imitating, make_env, frozen):
    env = make_imitating(frozen)
    await env.setup()
    assert frozen.waited == [frozen.timeout_s]
    await env.algorithm.close()
    assert frozen.closed == 1
    live = make_env()
    await live.setup()  # the policy's pool has neither: it belongs to the run
    await live.algorithm.close()


# --- tasks that end, rollouts that are too many -----------------------------------------------------------------------


async def test_samples_carry_the_loss_of_their_env(make_env):
    env = make_env()
    env.loss = "toy"
    assert {sample.loss for rollout in (await play_one(env)).rollouts for sample in rollout.samples} == {"toy"}


# --- without a group --------------------------------------------------------------------------------------------------


class OneByOne(RewardAlgorithm):
    """Scores a rollout when it is let go, by its index."""

    def attach(self, **live):
        super().attach(**live)
        self.gates = [asyncio.Event() for _ in range(4)]

    async def score_rollout(self, rollout):
        await self.gates[rollout.index].wait()
        await super().score_rollout(rollout)


async def let_go(dispatcher, env, *indices):
    """What is emitted when rollouts are let go one after the other, as (group, indices, credited)."""
    for index in indices:
        env.algorithm.gates[index].set()
        await asyncio.sleep(0.05)
    groups = emitted(dispatcher)
    assert all(rollout.samples[0].advantages is not None for group in groups for rollout in group.rollouts)
    return [(group.id, [rollout.index for rollout in group.rollouts]) for group in groups]


async def test_rollouts_of_no_group_relative_algorithm_go_one_by_one(make_env):
    env = make_env(algorithm=OneByOne)
    async with dispatching(env) as dispatcher:
        dispatcher.start_group()
        assert await let_go(dispatcher, env, 2, 0) == [(0, [2]), (0, [0])]
        assert dispatcher.rollouts_in_flight == 2 and len(dispatcher.in_flight) == 1
        state = dispatcher.state_dict()
        assert dispatcher.drop(math.inf) == 2, "the others are counted where they are"
    again = make_env(algorithm=OneByOne)
    async with dispatching(again) as dispatcher:
        dispatcher.load_state_dict(state)
        assert dispatcher.start_group() == dispatcher.rollouts_in_flight == 2
        assert await let_go(dispatcher, again, 0, 1, 2, 3) == [(0, [1]), (0, [3]), (0, [])], "each is sent once"
        assert not dispatcher.in_flight


@pytest.mark.parametrize(
    ("algorithm", "curriculum", "waits"),
    [
        (GRPOAlgorithm, {}, True),
        (SFTDistillAlgorithm, {}, False),
        (Algorithm, {}, False),
        (RewardAlgorithm, {}, False),
        (functools.partial(RewardAlgorithm, length_penalty="turns"), {}, True),
        (RewardAlgorithm, {"easy_threshold": 1.0}, True),
        (RewardAlgorithm, {"online_difficulty_filtering": True}, True),
    ],
)
def test_group_is_waited_for_where_it_is_compared(make_env, algorithm, curriculum, waits):
    assert make_env(algorithm=algorithm, curriculum=curriculum).waits_for_group is waits
