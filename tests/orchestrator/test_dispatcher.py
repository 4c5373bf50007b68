"""The dispatcher: whole groups, shares by weight, and nothing that ends unnoticed."""

import asyncio
import contextlib
import math
from typing import ClassVar

import pytest
import verifiers.v1 as vf
from patience import patient

from prl.config.schema import EnvConfig
from prl.episodes.environment import Environment
from prl.errors import DeadlinePassed, EngineError, PrlError
from prl.orchestrator.algo.base import Algorithm
from prl.orchestrator.algo.grpo import GRPOAlgorithm
from prl.orchestrator.dispatcher import Dispatcher
from prl.orchestrator.types import TrainEnv, by_seat


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


async def test_a_group_is_one_request(make_env, pool):
    await play_one(make_env(group_size=8))
    assert pool.requests == 1


async def test_envs_share_rollouts_not_groups_by_their_weights(make_env):
    envs = [make_env("heavy", weight=3.0, group_size=2), make_env("light", weight=1.0, group_size=4)]
    ended = await play(*envs, groups=70)
    rollouts = {name: sum(len(g.rollouts) for g in ended if g.env.name == name) for name in ("heavy", "light")}
    assert rollouts == {"heavy": 120, "light": 40}


async def test_stale_groups_are_cancelled_counted_in_rollouts_and_never_finish(make_env, pool):
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


async def test_every_started_group_is_finished_or_dropped_once(make_env, pool):
    pool.delay = 0.01
    dropped = 0
    async with dispatching(make_env("a"), make_env("b")) as dispatcher:
        for version in range(20):
            pool.version = version
            dispatcher.start_group()
            await asyncio.sleep(0.001)
            dropped += dispatcher.drop(version - 9)
        while dispatcher.rollouts_in_flight > 8:
            await asyncio.sleep(0)
        for _ in range(3):
            dispatcher.start_group()
        left = set(dispatcher.in_flight)
    finished = [group.id for group in emitted(dispatcher)]
    assert len(finished) == len(set(finished)) == 23 - len(left) - dropped // 4 and finished and len(left) >= 3
    assert not {group.id for group in left} & set(finished)
    assert not dispatcher.in_flight


async def test_an_algorithms_exception_ends_the_block_and_the_other_groups(make_env):
    with pytest.raises(PrlError, match="env 'toy', Buggy: ZeroDivisionError"):
        async with dispatching(make_env(algorithm=Buggy), make_env("other")) as dispatcher:
            dispatcher.start_group()
            dispatcher.start_group()
            await asyncio.sleep(60)
    assert not dispatcher.in_flight


async def test_a_failing_grader_leaves_a_partial_group(make_env):
    group = await play_one(make_env(group_size=16, task=BadGrader))
    assert 0 < len(group.survivors) < 16
    assert all("too long for me" in r.error for r in group.rollouts if r not in group.survivors)
    baseline = sum(r.reward for r in group.survivors) / len(group.survivors)
    assert all(r.advantages[-1] == pytest.approx(r.reward - baseline) for r in group.survivors)


async def test_the_end_of_the_block_cancels_what_is_in_flight(make_env, pool):
    pool.delay = 60.0
    async with dispatching(make_env()) as dispatcher:
        dispatcher.start_group()
        await asyncio.sleep(0)
    assert not dispatcher.in_flight and not emitted(dispatcher)


async def test_a_group_that_takes_too_long_fails_with_the_key_to_turn(make_env, pool):
    pool.delay = 60.0
    group = await play_one(make_env("slow", timeout_s=0.02))
    assert not group.survivors
    assert all("0.02 s (timeout_s or group_timeout_s of envs.slow)" in rollout.error for rollout in group.rollouts)


class HangsOnTheLongest(vf.Task):
    """Grades in half a second, all but the longest replies, which it never grades."""

    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        await asyncio.sleep(60.0 if len(trace.last_reply) == 3 else 0.5)
        return 1.0


async def test_a_hanging_grader_costs_its_own_rollout_and_graders_run_side_by_side(make_env):
    group = await play_one(make_env("slow", task=HangsOnTheLongest, group_size=16, timeout_s=2.0))
    late = [rollout for rollout in group.rollouts if rollout.error]
    assert 0 < len(late) < 16 and all("2 s (timeout_s or group_timeout_s of envs.slow)" in r.error for r in late)
    assert all(rollout.reward == 1.0 and rollout.samples for rollout in group.survivors)


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


class GradedLast(vf.Task):
    """Grades the longest replies once another rollout has been scored."""

    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        if len(trace.last_reply) == 3:
            await Notes.scored.wait()
        return 1.0


class Notes(Algorithm):
    async def score_rollout(self, rollout):
        self.seen.append(rollout)
        self.scored.set()


async def test_a_rollout_is_scored_on_arrival_not_when_its_group_is_complete(make_env, pool, monkeypatch):
    monkeypatch.setattr(Notes, "scored", asyncio.Event(), raising=False)
    monkeypatch.setattr(Notes, "seen", [], raising=False)
    env = make_env(group_size=16, task=GradedLast, algorithm=Notes, timeout_s=2.0)
    group = await play_one(env)
    assert len(group.survivors) == 16, "the scores came in time for the graders"
    assert len(Notes.seen) == 16 and set(map(id, Notes.seen)) == set(map(id, group.rollouts)), "each one once"
    waited = [len(rollout.trace.last_reply) == 3 for rollout in Notes.seen]
    assert waited == sorted(waited) and 0 < sum(waited) < 16


class Breaks(Algorithm):
    """A user's own class, with a bug in one of its hooks."""

    hook: ClassVar[str]
    raises: ClassVar[BaseException]

    async def score_rollout(self, rollout):
        if self.hook == "score_rollout":
            raise self.raises.with_traceback(None)

    def score_group(self, group):
        if self.hook == "score_group":
            raise self.raises.with_traceback(None)


@pytest.fixture
def breaks(monkeypatch):
    """`breaks(hook, error)`: the class, with that bug."""

    def make(hook, error):
        monkeypatch.setattr(Breaks, "hook", hook, raising=False)
        monkeypatch.setattr(Breaks, "raises", error, raising=False)
        return Breaks

    return make


@pytest.mark.parametrize("hook", ["score_rollout", "score_group"])
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("advantages must align"), "env 'mine', Breaks: advantages must align"),
        (KeyError("reward"), "env 'mine', Breaks: KeyError: 'reward' ("),
        (SystemExit(0), "env 'mine', Breaks: SystemExit: 0 ("),
        (KeyboardInterrupt(), "env 'mine', Breaks: KeyboardInterrupt ("),
        (BaseExceptionGroup("odd", [SystemExit(0)]), "env 'mine', Breaks: BaseExceptionGroup: odd (1 sub-exception) ("),
        (PrlError("a message of its own"), "a message of its own"),
    ],
)
async def test_an_error_of_the_algorithm_is_one_of_the_run_and_says_whose_it_is(make_env, breaks, hook, error, said):
    with pytest.raises(PrlError) as raised:
        await play_one(make_env("mine", algorithm=breaks(hook, error)))
    where = f"{__file__}, line {getattr(Breaks, hook).__code__.co_firstlineno + 2})" * said.endswith("(")
    assert type(raised.value) is PrlError and str(raised.value) == said + where


@pytest.mark.parametrize("hook", ["score_rollout", "score_group"])
async def test_a_cancellation_that_an_algorithm_lets_escape_ends_the_run_by_its_envs_name(make_env, breaks, hook):
    with pytest.raises(PrlError) as raised:
        await play_one(make_env("mine", algorithm=breaks(hook, asyncio.CancelledError())))
    assert type(raised.value) is PrlError
    assert str(raised.value) == "env 'mine': the work on a group was cancelled from within"


async def test_a_cancellation_that_an_env_lets_escape_ends_the_run_by_its_name(make_env, monkeypatch):
    async def leaks(task, n, sampler, *, group_id):
        raise asyncio.CancelledError
        yield

    env = make_env("mine")
    monkeypatch.setattr(env.environment, "play", leaks)
    with pytest.raises(PrlError, match="env 'mine': the work on a group was cancelled from within"):
        await play_one(env)


@pytest.mark.parametrize("how", ["drop", "close"])
async def test_a_group_that_is_cancelled_is_not_a_failure(make_env, pool, how):
    pool.delay_of = lambda n: 60.0
    async with dispatching(make_env()) as dispatcher:
        dispatcher.start_group()
        await asyncio.sleep(0.01)
        if how != "close":
            assert dispatcher.drop(0) == 4
            assert not dispatcher.in_flight
    assert not dispatcher.in_flight and not emitted(dispatcher)


async def test_a_cancelled_group_that_fails_as_it_stops_is_not_emitted_and_no_failure(make_env, monkeypatch):
    async def fails(task, n, sampler, *, group_id):
        try:
            await asyncio.sleep(60)
        finally:
            raise RuntimeError("a bug of the env's clean-up")
        yield

    env = make_env()
    monkeypatch.setattr(env.environment, "play", fails)
    async with dispatching(env) as dispatcher:
        dispatcher.start_group()
        await asyncio.sleep(0.01)
        assert dispatcher.drop(0) == 4
        await asyncio.sleep(0.01)
    assert not dispatcher.in_flight and not emitted(dispatcher)


class LeavesEarly(vf.Task):
    """Its grader lets a cancellation escape for replies of more than one character."""

    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        if len(trace.last_reply) > 1:
            raise asyncio.CancelledError
        return 1.0


async def test_a_cancellation_that_a_grader_lets_escape_is_its_rollouts_alone(make_env):
    group = await play_one(make_env(group_size=16, task=LeavesEarly))
    assert 0 < len(group.survivors) < 16
    assert {rollout.error for rollout in group.rollouts} == {
        None,
        "RuntimeError: the env's code let CancelledError escape",
    }


# --- a deadline of the whole group ------------------------------------------------------------------------------------


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


async def test_a_groups_deadline_cuts_slow_scoring_and_the_others_train(make_env, pool):
    env = make_env("slow", group_size=16, algorithm=ScoresSlowly)
    env.environment.config.group_timeout_s = 0.3
    group = await play_one(env)
    late = [rollout for rollout in group.rollouts if rollout.error]
    assert env.algorithm.going_on == 0 and 0 < len(late) < 16
    assert {len(rollout.trace.last_reply) for rollout in late} == {3}
    said = "TimeoutError: not scored when its group had taken 0.3 s (envs.slow.group_timeout_s)"
    assert {(rollout.error, rollout.error_kind) for rollout in late} == {(said, "timeout")}
    assert {max(rollout.advantages) for rollout in group.survivors} == {float(16 - len(late))}


async def test_credit_that_waits_is_given_to_those_whom_the_deadline_left(make_env, pool):
    class ScoresAndWaits(ScoresSlowly):
        async def score_group(self, group):
            await asyncio.sleep(0.01)
            super().score_group(group)

    env = make_env("slow", group_size=16, algorithm=ScoresAndWaits)
    env.environment.config.group_timeout_s = 0.3
    group = await play_one(env)
    late = [rollout for rollout in group.rollouts if rollout.error]
    assert 0 < len(late) < 16 and {rollout.error_kind for rollout in late} == {"timeout"}
    assert {max(rollout.advantages) for rollout in group.survivors} == {float(16 - len(late))}


async def test_a_groups_deadline_cuts_the_credit_of_the_group(make_env, pool):
    class CreditsSlowly(Algorithm):
        async def score_group(self, group):
            await asyncio.sleep(60.0)

    env = make_env("slow", group_size=4, algorithm=CreditsSlowly)
    env.environment.config.group_timeout_s = 0.5
    group = await play_one(env)
    said = "TimeoutError: not scored when its group had taken 0.5 s (envs.slow.group_timeout_s)"
    assert [(rollout.error, rollout.error_kind) for rollout in group.rollouts] == [(said, "timeout")] * 4


@pytest.mark.parametrize("limit", ["timeout_s", "group_timeout_s"])
async def test_the_shorter_of_two_deadlines_ends_a_slow_engine(make_env, pool, limit):
    pool.delay_of = lambda n: 60.0
    env = make_env("slow", timeout_s=9.0)
    env.environment.config.group_timeout_s = 9.0
    setattr(env.environment.config, limit, 0.05)
    group = await play_one(env)
    said = "TimeoutError: not finished after 0.05 s (timeout_s or group_timeout_s of envs.slow)"
    said += ", waiting for model 'policy'"
    assert {(rollout.error, rollout.error_kind) for rollout in group.rollouts} == {(said, "timeout")}


async def test_a_timeout_of_the_algorithms_own_is_a_bug_of_its_own(make_env, breaks):
    env = make_env("mine", algorithm=breaks("score_rollout", TimeoutError("my judge")))
    env.environment.config.group_timeout_s = 30.0
    with pytest.raises(PrlError, match=r"^env 'mine', Breaks: TimeoutError: my judge \(.*line "):
        await play_one(env)


# --- envs that converse -----------------------------------------------------------------------------------------------


@pytest.fixture
def make_conversing(make_algorithm, make_buffer, scripted):
    def make(taskset, script, *, group_size=4, weight=1.0, **args):
        """An env of a module's, in which the model says what the script has for it."""
        config = EnvConfig(taskset=taskset, args={"num_tasks": 12, **args}, weight=weight)
        environment, sampler = Environment(taskset.rpartition(".")[2], config, eval_tasks=0), scripted(script)
        return TrainEnv(
            environment=environment,
            buffer=make_buffer(environment.tasks),
            sampler=sampler,
            eval_sampler=sampler,
            algorithm=make_algorithm(GRPOAlgorithm),
            group_size=group_size,
        )

    return make


def credit(rollout):
    return max(rollout.advantages, key=abs)


async def test_a_conversation_that_fails_costs_itself_alone_and_the_others_get_their_credit(make_conversing):
    def script(conversation, turn):
        right = str(task.data.answer)
        return [EngineError("http://engine is gone", 503), right, "no idea", right][int(conversation.split("/")[-3])]

    env = make_conversing("prl.envs.calculator", script)
    task = env.environment.tasks[0]
    env.buffer.next = lambda: task
    async with env.environment.serving():
        group = await play_one(env)
    assert [rollout.error is None for rollout in group.rollouts] == [False] + [True] * 3
    assert group.rollouts[0].error_kind == "engine"
    assert group.rollouts[0].advantages is None and not group.rollouts[0].samples
    assert [rollout.reward for rollout in group.survivors] == [1.0, 0.0, 1.0]
    assert [credit(rollout) for rollout in group.survivors] == pytest.approx([1 / 3, -2 / 3, 1 / 3])


def kuhn(conversation, turn):
    """The player bets; the opponent calls in the episodes 1 and 2, else it folds."""
    *_, episode, side, _ = conversation.split("/")
    return "bet" if side == "player" else "call" if episode in "12" else "fold"


async def test_the_sides_of_a_game_are_no_baseline_for_each_other(make_conversing):
    env = make_conversing("prl.envs.kuhn_poker", kuhn)
    king_first = next(task for task in env.environment.tasks if task.data.cards == "KJ" and task.data.seat == 0)
    env.buffer.next = lambda: king_first
    async with env.environment.serving(), dispatching(env) as dispatcher:
        dispatcher.start_group()
        assert env.rollouts_per_group == dispatcher.rollouts_in_flight == 8
        (group,) = await finish(dispatcher)
    mine, theirs = by_seat(group.rollouts)
    assert [rollout.reward for rollout in mine] == [0.75, 1.0, 1.0, 0.75]
    assert [rollout.reward for rollout in theirs] == [0.25, 0.0, 0.0, 0.25]
    assert [credit(rollout) for rollout in mine] == [-0.125, 0.125, 0.125, -0.125]
    assert [credit(rollout) for rollout in theirs] == [0.125, -0.125, -0.125, 0.125]


async def test_shares_count_the_rollouts_of_both_sides(make_env, make_conversing):
    game, toy = make_conversing("prl.envs.kuhn_poker", kuhn), make_env("toy", group_size=4)
    async with game.environment.serving(), dispatching(game, toy) as dispatcher:
        names = started(dispatcher, 30)
        assert (names.count("kuhn_poker"), names.count("toy")) == (10, 20)
        assert dispatcher.rollouts_in_flight == 10 * 8 + 20 * 4


def test_seats_keep_the_order_of_their_rollouts(make_rollout):
    group = [make_rollout(reward) for reward in (1.0, 2.0, 3.0, 4.0)]
    for rollout, name in zip(group, "abba", strict=True):
        rollout.trace.agent.name = name
    assert [[rollout.reward for rollout in seat] for seat in by_seat(group)] == [[1.0, 4.0], [2.0, 3.0]]
    assert by_seat([]) == []


# --- frozen models ----------------------------------------------------------------------------------------------------


def started(dispatcher, groups):
    """The envs of the next `groups` groups, in their order."""
    names = []
    for _ in range(groups):
        assert dispatcher.start_group()
        names.append(list(dispatcher.in_flight)[-1].env.name)
    return names


@pytest.mark.parametrize("kind", ["source", "references"])
async def test_an_env_whose_model_is_away_is_passed_over(make_env, frozen, kind):
    needs = {"source": frozen} if kind == "source" else {"references": [frozen]}
    async with dispatching(make_env("live"), make_env("needy", **needs)) as dispatcher:
        assert set(started(dispatcher, 4)) == {"live", "needy"}
        frozen.go_away()
        assert set(started(dispatcher, 10)) == {"live"}
        frozen.come_back()
        assert set(started(dispatcher, 4)) == {"live", "needy"}


async def test_an_env_needs_all_of_its_models(make_imitating, frozen, renderer):
    other = type(frozen)(renderer._tokenizer)
    env = make_imitating(frozen, references=[other])
    async with dispatching(env) as dispatcher:
        for model in (frozen, other):
            assert env.up and dispatcher.start_group()
            model.go_away()
            assert not env.up and not dispatcher.start_group()
            model.come_back()


async def test_when_all_envs_wait_nothing_starts_and_nothing_counts(make_imitating, make_distilling, frozen):
    async with dispatching(make_imitating(frozen, weight=3.0), make_distilling(frozen)) as dispatcher:
        frozen.go_away()
        assert not any(dispatcher.start_group() for _ in range(50)) and not dispatcher.in_flight
        frozen.come_back()
        names = started(dispatcher, 40)
        assert (names.count("imitating"), names.count("distilling")) == (30, 10)


@pytest.mark.parametrize("weight", [1.0, 3.0])
@pytest.mark.parametrize("absences", [1, 3])
async def test_who_comes_back_gets_its_share_again_and_catches_up_on_nothing(
    make_env, make_imitating, frozen, weight, absences
):
    async with dispatching(make_env("live"), make_env("other"), make_imitating(frozen, weight=weight)) as dispatcher:
        for _ in range(absences):
            frozen.go_away()
            names = started(dispatcher, 30)
            assert (names.count("live"), names.count("other")) == (15, 15)
            frozen.come_back()
            names = started(dispatcher, 30)
            share = round(30 * weight / (weight + 2))
            assert abs(names.count("imitating") - share) <= 1 and abs(names.count("live") - names.count("other")) <= 1
            first = names[: 2 * int(weight + 2)]
            assert first.count("imitating") <= 2 * weight + 1, "no burst, not even a short one"


async def test_who_was_ahead_of_its_share_when_it_went_is_not_set_back(make_env, make_imitating, frozen):
    """Its one large group counts, before and after."""
    async with dispatching(make_imitating(frozen, group_size=8), make_env("live", group_size=1)) as dispatcher:
        assert started(dispatcher, 2) == ["imitating", "live"]
        frozen.go_away()
        assert started(dispatcher, 2) == ["live"] * 2
        frozen.come_back()
        assert started(dispatcher, 7) == ["live"] * 5 + ["imitating", "live"]


async def test_a_model_that_stays_away_is_an_error_that_names_it(make_env, make_imitating, frozen):
    async with dispatching(make_env("live"), make_imitating(frozen)) as dispatcher:
        frozen.go_away(for_at_most_s=-1)
        with pytest.raises(DeadlinePassed, match="http://teacher"):
            dispatcher.start_group()


async def test_a_group_that_fails_while_its_model_is_away_is_excused(make_imitating, make_distilling, frozen):
    for make in (make_imitating, make_distilling):
        async with dispatching(make(frozen)) as dispatcher:
            dispatcher.start_group()
            frozen.go_away()
            (group,) = await finish(dispatcher)
            assert group.excused and not group.survivors
            assert {rollout.error for rollout in group.rollouts} == {"EngineError: http://teacher is gone"}
            frozen.come_back()
            dispatcher.start_group()
            (group,) = await finish(dispatcher)
            assert not group.excused and len(group.survivors) == 4


async def test_a_group_whose_model_has_just_been_given_up_ends_the_run(make_imitating, frozen):
    with pytest.raises(DeadlinePassed, match="http://teacher"):
        async with dispatching(make_imitating(frozen)) as dispatcher:
            dispatcher.start_group()
            frozen.go_away(for_at_most_s=-1)
            await finish(dispatcher)


async def test_setup_waits_for_the_frozen_models_and_close_closes_them(make_imitating, make_env, frozen):
    env = make_imitating(frozen)
    await env.setup()
    assert frozen.waited == [frozen.timeout_s]
    await env.algorithm.close()
    assert frozen.closed == 1
    live = make_env()
    await live.setup()  # the policy's pool has neither: it belongs to the run
    await live.algorithm.close()


# --- tasks that end, rollouts that are too many -----------------------------------------------------------------------


async def test_a_group_knows_its_task(make_env):
    env = make_env(buffer={"shuffle": False})
    ended = await play(env, groups=2)
    assert {group.id: group.task for group in ended} == {0: env.buffer.tasks[0], 1: env.buffer.tasks[1]}


async def test_samples_carry_the_loss_of_their_env(make_env):
    env = make_env()
    env.loss = "toy"
    assert {sample.loss for rollout in (await play_one(env)).rollouts for sample in rollout.samples} == {"toy"}


async def test_surplus_is_cancelled_by_its_start_and_counted_once(make_env, make_imitating, pool, frozen):
    pool.delay = frozen.delay = 0.05
    async with dispatching(make_env("live"), make_imitating(frozen)) as dispatcher:
        started(dispatcher, 2)
        pool.version = 1
        started(dispatcher, 2)
        assert dispatcher.drop(0) == 4 and dispatcher.drop(0) == 0, "of the live ones that began with version 0"
        assert sorted(g.start_version for g in dispatcher.in_flight) == [1, math.inf, math.inf]
        assert dispatcher.drop(math.inf) == 12
        assert not dispatcher.in_flight


async def test_a_group_that_comes_to_its_end_although_it_was_dropped_does_not_arrive(make_env, monkeypatch):
    """Cancelling what has just ended changes nothing, and a library may take a cancellation for its own."""
    stopped = []

    async def stubborn(task, n, sampler, *, group_id):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        stopped.append(group_id)
        return
        yield

    env = make_env()
    monkeypatch.setattr(env.environment, "play", stubborn)
    async with dispatching(env) as dispatcher:
        started(dispatcher, 1)
        await asyncio.sleep(0)
        assert dispatcher.drop(0) == 4 and dispatcher.drop(0) == 0
    assert stopped == [0] and not emitted(dispatcher)
