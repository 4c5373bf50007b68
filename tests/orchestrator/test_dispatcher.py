"""The dispatcher: whole groups, shares by weight, and nothing that ends unnoticed."""

import asyncio
import contextlib
import math

import pytest
import verifiers.v1 as vf

from prl.config.schema import EnvConfig
from prl.episodes.environment import Environment
from prl.errors import DeadlinePassed, EngineError, PrlError
from prl.orchestrator.algo.base import Algorithm
from prl.orchestrator.algo.grpo import GRPOAlgorithm, GRPOConfig
from prl.orchestrator.buffer import Buffer, BufferConfig
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
    assert all("0.02 s (timeout_s or group_timeout_s of envs.slow)" in rollout.error for rollout in group.rollouts)


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
    ended = []
    dispatcher = Dispatcher([make_env(group_size=16, algorithm=NoAnswer(None, policy_pool=pool))], ended.append)
    dispatcher.start_group()
    await finish(dispatcher)
    (group,) = ended
    lost = [rollout for rollout in group.rollouts if rollout.error]
    assert dispatcher.failure is None and 0 < len(lost) < 16
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
    ended = []
    env = make_env(group_size=16, task=GradedLast, algorithm=Notes(None, policy_pool=pool), timeout_s=2.0)
    dispatcher = Dispatcher([env], ended.append)
    dispatcher.start_group()
    await asyncio.wait_for(finish(dispatcher), 5)
    (group,) = ended
    assert len(group.survivors) == 16, "the scores came in time for the graders"
    assert len(Notes.seen) == 16 and set(map(id, Notes.seen)) == set(map(id, group.rollouts)), "each one once"
    waited = [len(rollout.trace.last_reply) == 3 for rollout in Notes.seen]
    assert waited == sorted(waited) and 0 < sum(waited) < 16


class Breaks(Algorithm):
    """Somebody's own class, with a bug in one of its hooks."""

    def __init__(self, hook, error):
        super().__init__(None, policy_pool=None)
        self.hook, self.error = hook, error

    async def score_rollout(self, rollout):
        if self.hook == "score_rollout":
            raise self.error

    def score_group(self, group):
        if self.hook == "score_group":
            raise self.error


@pytest.mark.parametrize("hook", ["score_rollout", "score_group"])
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("advantages must align"), "env 'mine', Breaks: advantages must align"),
        (KeyError("reward"), "env 'mine', Breaks: KeyError: 'reward'"),
        (PrlError("a message of its own"), "a message of its own"),
    ],
)
async def test_an_error_of_the_algorithm_is_one_of_the_run_and_says_whose_it_is(make_env, hook, error, said):
    ended = []
    dispatcher = Dispatcher([make_env("mine", algorithm=Breaks(hook, error))], ended.append)
    dispatcher.start_group()
    await finish(dispatcher)
    assert ended == [None] and type(dispatcher.failure) is PrlError and str(dispatcher.failure) == said


@pytest.mark.parametrize("hook", ["score_rollout", "score_group"])
async def test_a_cancellation_that_an_algorithm_lets_escape_ends_the_run_by_its_envs_name(make_env, hook):
    ended = []
    dispatcher = Dispatcher([make_env("mine", algorithm=Breaks(hook, asyncio.CancelledError()))], ended.append)
    dispatcher.start_group()
    await asyncio.wait_for(finish(dispatcher), 5)
    assert ended == [None] and type(dispatcher.failure) is PrlError
    assert str(dispatcher.failure) == "env 'mine': the work on a group was cancelled from within"


@pytest.mark.parametrize("how", ["drop_stale", "drop_surplus", "close"])
async def test_a_group_that_nobody_wants_any_more_is_no_failure(make_env, pool, how):
    ended = []
    pool.delay_of = lambda n: 60.0
    dispatcher = Dispatcher([make_env()], ended.append)
    dispatcher.start_group()
    await asyncio.sleep(0.01)
    if how == "close":
        await dispatcher.close()
    else:
        assert dispatcher.drop_surplus(0) == 4 if how == "drop_surplus" else dispatcher.drop_stale(3, 1) == 4
    await asyncio.wait_for(finish(dispatcher), 5)
    assert ended == [None] and dispatcher.failure is None


class LeavesEarly(vf.Task):
    """Its grader lets a cancellation escape for replies of more than one character."""

    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        if len(trace.last_reply) > 1:
            raise asyncio.CancelledError
        return 1.0


async def test_a_cancellation_that_a_grader_lets_escape_is_its_rollouts_alone(make_env):
    ended = []
    dispatcher = Dispatcher([make_env(group_size=16, task=LeavesEarly)], ended.append)
    dispatcher.start_group()
    await asyncio.wait_for(finish(dispatcher), 5)
    (group,) = ended
    assert dispatcher.failure is None and 0 < len(group.survivors) < 16
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


async def played(env):
    """One group of the env, to its end; and the dispatcher that started it."""
    ended = []
    dispatcher = Dispatcher([env], ended.append)
    dispatcher.start_group()
    await asyncio.wait_for(finish(dispatcher), 5)
    (group,) = ended
    return dispatcher, group


async def test_a_groups_deadline_cuts_slow_scoring_and_the_others_train(make_env, pool):
    algorithm = ScoresSlowly(None, policy_pool=pool)
    env = make_env("slow", group_size=16, algorithm=algorithm)
    env.environment.config.group_timeout_s = 0.3
    dispatcher, group = await played(env)
    late = [rollout for rollout in group.rollouts if rollout.error]
    assert dispatcher.failure is None and algorithm.going_on == 0 and 0 < len(late) < 16
    assert {len(rollout.trace.last_reply) for rollout in late} == {3}
    said = "TimeoutError: not scored when its group had taken 0.3 s (envs.slow.group_timeout_s)"
    assert {(rollout.error, rollout.error_kind) for rollout in late} == {(said, "timeout")}
    assert {max(rollout.advantages) for rollout in group.survivors} == {float(16 - len(late))}


async def test_credit_that_waits_is_given_to_those_whom_the_deadline_left(make_env, pool):
    class ScoresAndWaits(ScoresSlowly):
        async def score_group(self, group):
            await asyncio.sleep(0.01)
            super().score_group(group)

    algorithm = ScoresAndWaits(None, policy_pool=pool)
    env = make_env("slow", group_size=16, algorithm=algorithm)
    env.environment.config.group_timeout_s = 0.3
    _, group = await played(env)
    late = [rollout for rollout in group.rollouts if rollout.error]
    assert 0 < len(late) < 16 and {rollout.error_kind for rollout in late} == {"timeout"}
    assert {max(rollout.advantages) for rollout in group.survivors} == {float(16 - len(late))}


async def test_a_groups_deadline_cuts_the_credit_of_the_group(make_env, pool):
    class CreditsSlowly(Algorithm):
        async def score_group(self, group):
            await asyncio.sleep(60.0)

    env = make_env("slow", group_size=4, algorithm=CreditsSlowly(None, policy_pool=pool))
    env.environment.config.group_timeout_s = 0.5
    dispatcher, group = await played(env)
    said = "TimeoutError: not scored when its group had taken 0.5 s (envs.slow.group_timeout_s)"
    assert [(rollout.error, rollout.error_kind) for rollout in group.rollouts] == [(said, "timeout")] * 4
    assert dispatcher.failure is None


@pytest.mark.parametrize("limit", ["timeout_s", "group_timeout_s"])
async def test_the_shorter_of_two_deadlines_ends_a_slow_engine(make_env, pool, limit):
    ended = []
    pool.delay_of = lambda n: 60.0
    env = make_env("slow", timeout_s=9.0)
    env.environment.config.group_timeout_s = 9.0
    setattr(env.environment.config, limit, 0.05)
    dispatcher = Dispatcher([env], ended.append)
    dispatcher.start_group()
    await asyncio.wait_for(finish(dispatcher), 5)
    said = "TimeoutError: no end after 0.05 s (timeout_s or group_timeout_s of envs.slow)"
    assert {(rollout.error, rollout.error_kind) for rollout in ended[0].rollouts} == {(said, "timeout")}


async def test_a_group_in_time_has_nothing_to_do_with_its_deadline(make_env):
    ended = []
    env = make_env(group_size=8)
    env.environment.config.group_timeout_s = 30.0
    dispatcher = Dispatcher([env], ended.append)
    dispatcher.start_group()
    await finish(dispatcher)
    assert len(ended[0].survivors) == 8


async def test_a_timeout_of_the_algorithms_own_is_a_bug_of_its_own(make_env):
    ended = []
    env = make_env("mine", algorithm=Breaks("score_rollout", TimeoutError("my judge")))
    env.environment.config.group_timeout_s = 30.0
    dispatcher = Dispatcher([env], ended.append)
    dispatcher.start_group()
    await finish(dispatcher)
    assert ended == [None] and str(dispatcher.failure) == "env 'mine', Breaks: TimeoutError: my judge"


# --- envs that converse -----------------------------------------------------------------------------------------------


@pytest.fixture
def make_conversing(pool, scripted):
    def make(taskset, script, *, group_size=4, weight=1.0, **args):
        """An env of a module's, in which the model says what the script has for it."""
        config = EnvConfig(taskset=taskset, args={"num_tasks": 12, **args}, weight=weight)
        environment, sampler = Environment(taskset.rpartition(".")[2], config, eval_tasks=0), scripted(script)
        buffer, algorithm = Buffer(BufferConfig(), environment.tasks, 0), GRPOAlgorithm(GRPOConfig(), policy_pool=pool)
        return TrainEnv(environment, buffer, sampler, sampler, algorithm, group_size)

    return make


def credit(rollout):
    return max(rollout.advantages, key=abs)


@pytest.mark.parametrize("bad", ['<tool_call>\n{"name": "calculate"', EngineError("http://engine is gone", 503)])
async def test_a_conversation_that_fails_costs_itself_alone_and_the_others_get_their_credit(make_conversing, bad):
    def script(conversation, turn):
        right = str(task.data.answer)
        return [bad, right, "no idea", right][int(conversation.split("/")[-3])]

    ended, env = [], make_conversing("prl.envs.calculator", script)
    task = env.environment.tasks[0]
    env.buffer.next = lambda: task
    dispatcher = Dispatcher([env], ended.append)
    async with env.environment.serving():
        dispatcher.start_group()
        await finish(dispatcher)
    (group,) = ended
    assert dispatcher.failure is None and [rollout.error is None for rollout in group.rollouts] == [False] + [True] * 3
    assert group.rollouts[0].error_kind == ("engine" if isinstance(bad, Exception) else "tool_call")
    assert group.rollouts[0].advantages is None and not group.rollouts[0].samples
    assert [rollout.reward for rollout in group.survivors] == [1.0, 0.0, 1.0]
    assert [credit(rollout) for rollout in group.survivors] == pytest.approx([1 / 3, -2 / 3, 1 / 3])


def kuhn(conversation, turn):
    """The player bets; the opponent calls in the episodes 1 and 2, else it folds."""
    *_, episode, side, _ = conversation.split("/")
    return "bet" if side == "player" else "call" if episode in "12" else "fold"


async def test_the_sides_of_a_game_are_no_baseline_for_each_other(make_conversing):
    ended, env = [], make_conversing("prl.envs.kuhn_poker", kuhn)
    king_first = next(task for task in env.environment.tasks if task.data.cards == "KJ" and task.data.seat == 0)
    env.buffer.next = lambda: king_first
    dispatcher = Dispatcher([env], ended.append)
    async with env.environment.serving():
        dispatcher.start_group()
        assert env.rollouts_per_group == dispatcher.rollouts_in_flight == 8
        await finish(dispatcher)
    (group,) = ended
    mine, theirs = by_seat(group.rollouts)
    assert [rollout.reward for rollout in mine] == [0.75, 1.0, 1.0, 0.75]
    assert [rollout.reward for rollout in theirs] == [0.25, 0.0, 0.0, 0.25]
    assert [credit(rollout) for rollout in mine] == [-0.125, 0.125, 0.125, -0.125]
    assert [credit(rollout) for rollout in theirs] == [0.125, -0.125, -0.125, 0.125]


async def test_shares_count_the_rollouts_of_both_sides(make_env, make_conversing, dispatch):
    game, toy = make_conversing("prl.envs.kuhn_poker", kuhn), make_env("toy", group_size=4)
    async with game.environment.serving():
        dispatcher = dispatch([game, toy])
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
        names.append(list(dispatcher.in_flight.values())[-1].env.name)
    return names


@pytest.fixture
async def dispatch():
    """`dispatch(envs)`: a dispatcher that is closed in the end."""
    made = []

    def make(envs, on_end=lambda group: None):
        made.append(Dispatcher(envs, on_end))
        return made[-1]

    yield make
    for dispatcher in made:
        await dispatcher.close()


@pytest.mark.parametrize("kind", ["source", "references"])
async def test_an_env_whose_model_is_away_is_passed_over(make_env, frozen, dispatch, kind):
    needs = {"source": frozen} if kind == "source" else {"references": [frozen]}
    dispatcher = dispatch([make_env("live"), make_env("needy", **needs)])
    assert set(started(dispatcher, 4)) == {"live", "needy"}
    frozen.go_away()
    assert set(started(dispatcher, 10)) == {"live"}
    frozen.come_back()
    assert set(started(dispatcher, 4)) == {"live", "needy"}


async def test_an_env_needs_all_of_its_models(make_imitating, frozen, renderer, dispatch):
    other = type(frozen)(renderer._tokenizer)
    env = make_imitating(frozen, references=[other])
    dispatcher = dispatch([env])
    for model in (frozen, other):
        assert env.up and dispatcher.start_group()
        model.go_away()
        assert not env.up and not dispatcher.start_group()
        model.come_back()


async def test_when_all_envs_wait_nothing_starts_and_nothing_counts(make_imitating, make_distilling, frozen, dispatch):
    dispatcher = dispatch([make_imitating(frozen, weight=3.0), make_distilling(frozen)])
    frozen.go_away()
    assert not any(dispatcher.start_group() for _ in range(50)) and not dispatcher.in_flight
    frozen.come_back()
    names = started(dispatcher, 40)
    assert (names.count("imitating"), names.count("distilling")) == (30, 10)


@pytest.mark.parametrize("weight", [1.0, 3.0])
@pytest.mark.parametrize("absences", [1, 3])
async def test_who_comes_back_gets_its_share_again_and_catches_up_on_nothing(
    make_env, make_imitating, frozen, dispatch, weight, absences
):
    dispatcher = dispatch([make_env("live"), make_env("other"), make_imitating(frozen, weight=weight)])
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


async def test_who_was_ahead_of_its_share_when_it_went_is_not_set_back(make_env, make_imitating, frozen, dispatch):
    """Its one large group counts, before and after."""
    dispatcher = dispatch([make_imitating(frozen, group_size=8), make_env("live", group_size=1)])
    assert started(dispatcher, 2) == ["imitating", "live"]
    frozen.go_away()
    assert started(dispatcher, 2) == ["live"] * 2
    frozen.come_back()
    assert started(dispatcher, 7) == ["live"] * 5 + ["imitating", "live"]


async def test_a_model_that_stays_away_is_an_error_that_names_it(make_env, make_imitating, frozen, dispatch):
    dispatcher = dispatch([make_env("live"), make_imitating(frozen)])
    frozen.go_away(for_at_most_s=-1)
    with pytest.raises(DeadlinePassed, match="http://teacher"):
        dispatcher.start_group()


async def test_a_group_that_fails_while_its_model_is_away_is_excused(make_imitating, make_distilling, frozen, dispatch):
    for make in (make_imitating, make_distilling):
        ended = []
        dispatcher = dispatch([make(frozen)], ended.append)
        dispatcher.start_group()
        frozen.go_away()
        await finish(dispatcher)
        (group,) = ended
        assert group.excused and not group.survivors
        assert {rollout.error for rollout in group.rollouts} == {"EngineError: http://teacher is gone"}
        frozen.come_back()
        dispatcher.start_group()
        await finish(dispatcher)
        assert not ended[1].excused and len(ended[1].survivors) == 4


async def test_a_group_whose_model_has_just_been_given_up_ends_the_run(make_imitating, frozen, dispatch):
    dispatcher = dispatch([make_imitating(frozen)])
    dispatcher.start_group()
    frozen.go_away(for_at_most_s=-1)
    await finish(dispatcher)
    assert isinstance(dispatcher.failure, DeadlinePassed) and "http://teacher" in str(dispatcher.failure)


async def test_groups_of_a_frozen_model_never_age(make_env, make_imitating, make_distilling, pool, frozen, dispatch):
    ended = []
    pool.delay = frozen.delay = 0.05
    dispatcher = dispatch([make_env("live"), make_imitating(frozen), make_distilling(frozen)], ended.append)
    started(dispatcher, 3)
    await asyncio.sleep(0)
    pool.version = 100
    assert dispatcher.drop_stale(100, 0) == 8, "those of the two that the policy plays"
    await finish(dispatcher)
    assert ended[:2] == [None, None]
    (group,) = ended[2:]
    assert group.env_name == "imitating" and group.start_version == math.inf
    assert {(rollout.start_version, rollout.end_version) for rollout in group.rollouts} == {(None, None)}


async def test_what_a_frozen_model_said_has_no_logprobs(make_imitating, frozen, dispatch):
    ended = []
    dispatcher = dispatch([make_imitating(frozen)], ended.append)
    dispatcher.start_group()
    await finish(dispatcher)
    for rollout in ended[0].survivors:
        assert not rollout.live
        (sample,) = rollout.samples
        assert sample.logprobs == [0.0] * len(sample.token_ids)
        assert sample.ce_weights == [float(m) for m in sample.mask] and any(sample.mask)
        assert sample.rl_weights == [0.0] * len(sample.mask) and sample.advantages is None


async def test_setup_waits_for_the_frozen_models_and_close_closes_them(make_imitating, make_env, frozen):
    env = make_imitating(frozen)
    await env.setup()
    assert frozen.waited == [frozen.timeout_s]
    await env.close()
    assert frozen.closed == 1
    live = make_env()
    await live.setup()  # the policy's pool has neither: it belongs to the run
    await live.close()


# --- tasks that end, rollouts that are too many -----------------------------------------------------------------------


async def test_an_env_without_tasks_is_passed_over_for_good(make_env, make_imitating, frozen, dispatch):
    small = make_imitating(frozen, tasks=2, weight=9.0, buffer=BufferConfig(easy_threshold=0.0))
    dispatcher = dispatch([small, make_env("live")])
    assert "imitating" in started(dispatcher, 3)
    for task in small.buffer.tasks:
        small.buffer.update(task, 1.0)
    frozen.go_away(for_at_most_s=-1)
    assert started(dispatcher, 10) == ["live"] * 10, "its model may have gone as well: nobody needs it"


async def test_where_every_env_is_without_tasks_nothing_starts(make_env, dispatch):
    env = make_env(tasks=1, buffer=BufferConfig(easy_threshold=0.0))
    dispatcher = dispatch([env])
    assert dispatcher.start_group()
    env.buffer.update(env.buffer.tasks[0], 0.0)
    assert not dispatcher.start_group() and len(dispatcher.in_flight) == 1, "what is under way stays so"


async def test_a_group_knows_its_task(make_env, dispatch):
    ended = []
    env = make_env(buffer=BufferConfig(shuffle=False))
    dispatcher = dispatch([env], ended.append)
    started(dispatcher, 2)
    await finish(dispatcher)
    assert {group.id: group.task for group in ended} == {0: env.buffer.tasks[0], 1: env.buffer.tasks[1]}


async def test_surplus_is_cancelled_by_its_start_and_counted_once(make_env, make_imitating, pool, frozen, dispatch):
    ended = []
    pool.delay = frozen.delay = 0.05
    dispatcher = dispatch([make_env("live"), make_imitating(frozen)], ended.append)
    started(dispatcher, 2)
    pool.version = 1
    started(dispatcher, 2)
    assert dispatcher.drop_surplus(0) == 4 and dispatcher.drop_surplus(0) == 0, (
        "of the live ones that began with version 0"
    )
    await asyncio.sleep(0.01)
    assert ended == [None] and sorted(g.start_version for g in dispatcher.in_flight.values()) == [1, math.inf, math.inf]
    assert dispatcher.drop_surplus(math.inf) == 12
    await asyncio.sleep(0.01)
    assert not dispatcher.in_flight


@pytest.mark.parametrize("drop", [lambda d: d.drop_surplus(0), lambda d: d.drop_stale(9, 0)])
async def test_a_group_that_comes_to_its_end_although_it_was_dropped_does_not_arrive(
    make_env, dispatch, drop, monkeypatch
):
    """Cancelling what has just ended changes nothing, and a library may take a cancellation for its own."""

    async def stubborn(task, n, sampler, *, group_id, arrived):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        return []

    ended = []
    env = make_env()
    monkeypatch.setattr(env.environment, "play", stubborn)
    dispatcher = dispatch([env], ended.append)
    started(dispatcher, 1)
    await asyncio.sleep(0)
    assert drop(dispatcher) == 4 and drop(dispatcher) == 0
    await finish(dispatcher)
    assert ended == [None] and dispatcher.failure is None
