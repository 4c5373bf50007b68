"""What arrives: shown to the curriculum, dropped by online difficulty filtering or not, and counted to the last token.

Failed rollouts are counted by kind, and too many of them end the run."""

import pytest

from prl.base.errors import EngineError, NoSignal, PrlError
from prl.filters.base import Filter
from prl.orchestrator.batcher import MAX_EMPTY_BATCHES
from prl.orchestrator.intake import LEAST, WINDOW, Intake
from prl.orchestrator.state import RunState, decode, encode
from prl.orchestrator.types import Group
from prl.rollouts.rollout import ERROR_KINDS, Outcome, Stage

ODF = {"online_difficulty_filtering": True}
POOLS = {"easy_threshold": 1.0, "hard_threshold": 0.0}


@pytest.fixture
def arrive(make_env, make_rollout):
    """`arrive(rewards…, of=env number)` on envs `a` and `b`; a reward of None is a rollout that failed."""

    class Fixture:
        def __init__(self, tokens=5, **config):
            envs = [make_env(name, tasks=4, curriculum=config) for name in ("a", "b")]
            self.intake, self.tokens = Intake(envs, 0.5), tokens
            self.envs = {env.name: env for env in envs}

        def __call__(self, *rewards, of="a", task=0, agents=None):
            rollouts = []
            for index, reward in enumerate(rewards):
                rollout = make_rollout(reward or 0.0, env=of, error="ValueError: no" if reward is None else None)
                if agents:
                    rollout.trace.agent.name = agents[index]
                rollout.__class__ = type("Counted", (type(rollout),), {"num_completion_tokens": self.tokens})
                rollouts.append(rollout)
            self.group = Group(0, self.envs[of], 0, self.envs[of].curriculum.tasks[task], rollouts)
            return self.intake.admit(self.group)

    return Fixture


@pytest.mark.parametrize(
    ("rewards", "admitted"),
    [
        ((1.0, 1.0), False),
        ((0.0, 0.0), False),
        ((0.7 + 0.2 + 0.1, 1.0, None), False),
        ((0.1 + 0.2 - 0.3, 0.0), False),
        ((1e-9, 0.0), True),
        ((1.0, 1.0 - 1e-9), True),
        ((0.0, 1.0), True),
        ((1.0, None, 1.0), False),
        ((None, None), True),
    ],
)
def test_group_with_mean_0_or_1_is_dropped(arrive, rewards, admitted):
    assert arrive(**ODF)(*rewards) is admitted
    assert arrive()(*rewards) is True, "and none where nobody asked for it"


def test_dropped_rollouts_have_a_reason(arrive):
    odf = arrive(**ODF)
    odf(1.0, None, 1.0)
    easy = Outcome(Stage.DIFFICULTY, "online difficulty filtering: mean reward 1", "easy")
    failed = Outcome(Stage.FAILED, "ValueError: no", "env")
    assert [rollout.outcome for rollout in odf.group.rollouts] == [easy, failed, easy]
    odf(0.0, 0.0)
    hard = Outcome(Stage.DIFFICULTY, "online difficulty filtering: mean reward 0", "hard")
    assert {rollout.outcome for rollout in odf.group.rollouts} == {hard}
    odf(0.5)
    assert odf.group.rollouts[0].is_active


def test_dropped_groups_reach_their_pool(arrive):
    both = arrive(**ODF, **POOLS)
    for number, (rewards, pool) in enumerate([((1.0, None), "easy"), ((0.0, 0.0), "hard"), ((0.0, 1.0), "normal")]):
        both(*rewards, task=number)
        assert {rollout.difficulty_pool for rollout in both.group.rollouts} == {pool}
    both(None, task=0)
    assert both.group.rollouts[0].difficulty_pool == "easy", "of a group that failed the pool its task is in"
    plain = arrive(**ODF)
    plain(1.0)
    assert plain.group.rollouts[0].difficulty_pool is None


def test_game_is_dropped_where_all_seats_agree(arrive):
    odf = arrive(**ODF, **POOLS)
    sides = ["one", "two", "one", "two"]
    for task, rewards in enumerate([(0.75, -0.75, 0.5, -0.5), (1.0, 0.0, 1.0, 0.0), (0.0, 0.5, 0.0, 0.5)]):
        assert odf(*rewards, agents=sides, task=task), "settled perhaps, but not for both sides"
        assert odf.group.rollouts[0].is_active and odf.group.rollouts[0].difficulty_pool == "normal"
    for task, reward, pool in ((2, 1.0, "easy"), (3, 0.0, "hard")):
        assert not odf(*[reward] * 4, agents=sides, task=task)
        assert {rollout.difficulty_pool for rollout in odf.group.rollouts} == {pool}
    line = odf.intake.take()
    assert (line["filtered_rollouts/a/easy"], line["filtered_rollouts/a/hard"]) == (4.0, 4.0)


def test_a_steps_numbers_by_hand(arrive):
    both = arrive(**ODF, **POOLS, tokens=5)
    both(1.0, 1.0, 1.0, task=0)
    both(0.0, None, task=1)
    both(0.5, 0.25, task=2)
    both(0.0, of="b")
    both(None, task=3)  # no group for a pool: it has no mean
    line = {key: value for key, value in both.intake.take().items() if not key.startswith(("errors/", "rollouts/err"))}
    assert line == {
        "tokens/generated": 45.0,  # those of what failed and of what was dropped too
        "rollouts/arrived": 9.0,  # likewise
        "reward/all/arrived": pytest.approx(3.75 / 7),
        "reward/a/arrived": pytest.approx(3.75 / 6),
        "reward/b/arrived": 0.0,
        "pool/a/easy": 0.25,
        "pool/a/normal": 0.5,
        "pool/a/hard": 0.25,
        "evicted_examples/a/easy": 1.0,
        "evicted_examples/a/hard": 1.0,
        "evicted_examples/a/easy_rate": pytest.approx(1 / 3),  # of three groups
        "evicted_examples/a/hard_rate": pytest.approx(1 / 3),
        "filtered_rollouts/a/easy": 3.0,
        "filtered_rollouts/a/hard": 1.0,
        "pool/b/easy": 0.0,
        "pool/b/normal": 0.75,
        "pool/b/hard": 0.25,
        "evicted_examples/b/easy": 0.0,
        "evicted_examples/b/hard": 1.0,
        "evicted_examples/b/easy_rate": 0.0,
        "evicted_examples/b/hard_rate": 1.0,
        "filtered_rollouts/b/easy": 0.0,
        "filtered_rollouts/b/hard": 1.0,
    }
    both(1.0, task=3)
    line = both.intake.take()
    assert (line["tokens/generated"], line["reward/a/arrived"], line["filtered_rollouts/a/easy"]) == (5.0, 1.0, 1.0)
    assert line["rollouts/arrived"] == 1.0
    assert (line["evicted_examples/a/easy"], line["evicted_examples/a/hard"], line["pool/a/easy"]) == (1.0, 0.0, 0.5)
    assert "reward/b/arrived" not in line, "nothing arrived: no number is better than a wrong one"


def test_the_rate_of_evicted_examples_counts_groups_from_before_a_resume(arrive):
    before, after = arrive(**POOLS), arrive(**POOLS)
    before(1.0, 1.0, task=0)
    before(0.5, 0.0, task=1)
    before(0.0, 0.5, of="b")
    curriculum = before.envs["a"].curriculum.state_dict()
    state = decode(encode(RunState(1, intake=before.intake.state_dict())), "its file").intake
    after.intake.load_state_dict(state, before.intake.arrived)
    after.envs["a"].curriculum.load_state_dict(curriculum)
    after(0.5, 0.25, task=2)
    after(0.0, 0.0, task=3)
    line = after.intake.take()
    rates = [line[f"evicted_examples/{name}_rate"] for name in ("a/easy", "a/hard", "b/hard")]
    assert rates == [0.25, 0.25, 0.0], "one each of four groups"
    after(0.0, 1.0, task=1)
    assert after.intake.take()["evicted_examples/a/hard_rate"] == 0.0


class EarnsNothing(Filter):
    def matches(self, rollout):
        return rollout.reward == 0


@pytest.mark.parametrize("config", [ODF, {}])
def test_groups_dropped_in_a_row_end_the_run(arrive, caplog, config):
    dropped = arrive(**config)
    for env in dropped.envs.values():
        env.filters = {"pre_batch": {"nothing": EarnsNothing(enforce=True)}}

    def warnings_of(batch_size):
        caplog.clear()
        dropped.intake.check(1, MAX_EMPTY_BATCHES * batch_size)
        return [record.getMessage() for record in caplog.records]

    dropped(None, 0.0, 0.0)
    assert warnings_of(3) == [], "what failed is another's matter"
    dropped(0.0, 0.0)
    (first,) = warnings_of(4)
    assert "Every reward is 0" in first and "too easy or too hard" in first and warnings_of(4) == [], "once"
    dropped(0.5, 1.0)
    assert warnings_of(1) == [] and "dropped" not in caplog.text
    dropped(0.0, 0.0)
    assert len(warnings_of(2)) == 1, "and once more after a group with a signal"
    for _ in range(9):
        dropped(0.0, 0.0)
    dropped(None, None)
    dropped.intake.check(1, 21)
    with pytest.raises(NoSignal, match="dropped 20 rollouts in a row .*: 20.* with reward 0: "):
        dropped.intake.check(1, 20)


def test_retired_tasks_do_not_count_as_dropped(arrive):
    odf = arrive(**ODF, **POOLS)
    for number in range(4):
        odf(*[1.0] * 50, task=number)
    odf.intake.check(1, 1)


# --- failed rollouts --------------------------------------------------------------------------------------------------


@pytest.fixture
def failures(make_env, make_rollout):
    """`failures(limit)(fine, failed, …)`: an intake that so many rollouts of an env arrive at."""

    class Fixture:
        def __init__(self, limit=0.5):
            self.envs = {name: make_env(name) for name in ("a", "b")}
            self.intake = Intake(list(self.envs.values()), limit)

        def __call__(self, fine=0, failed=0, *, env="a", error=None, kind=None, excused=False):
            rollouts = [make_rollout(env=env) for _ in range(fine + failed)]
            for rollout in rollouts[fine:]:
                rollout.fail(error or KeyError("x"), kind)
            self.intake.admit(Group(0, self.envs[env], 0, None, rollouts, excused))

    return Fixture


def test_failures_are_counted_by_env_and_kind(failures):
    arrive = failures()
    arrive(1, 2)
    arrive(0, 1, env="b", error=TimeoutError("late"))
    arrive(0, 1, env="b", error=EngineError("no", 400), kind="reference", excused=True)
    line = arrive.intake.take()
    assert {key: value for key, value in line.items() if value and key.startswith(("errors/", "rollouts/errored"))} == {
        "errors/all/env": 2.0,
        "errors/a/env": 2.0,
        "errors/all/timeout": 1.0,
        "errors/b/timeout": 1.0,
        "errors/all/reference": 1.0,
        "errors/b/reference": 1.0,
        "rollouts/errored": 4.0,
    }
    assert sum(key.startswith("errors/") for key in line) == 3 * len(ERROR_KINDS)
    assert not any(value for key, value in arrive.intake.take().items() if key.startswith("errors/"))


def test_limit_of_failures_is_exact(failures):
    arrive = failures(0.25)
    arrive(1000, env="b")
    arrive(75, 25)
    arrive.intake.check(1, 1)
    arrive(0, 1, error=EngineError("gone", 503))
    message = r"step 7: 26 of the last 101 .* 'a' .*max_error_share=0.25.*env: 25, engine: 1.*gone"
    with pytest.raises(PrlError, match=message):
        arrive.intake.check(7, 1)


def test_failures_are_judged_over_a_window(failures):
    arrive = failures()
    for fine, failed in ((0, LEAST - 1), (LEAST, 0), (WINDOW, 0), (0, WINDOW // 2)):
        arrive(fine, failed)
        arrive.intake.check(1, 1)
    arrive(0, 1)
    with pytest.raises(PrlError, match=f"{WINDOW // 2 + 1} of the last {WINDOW}"):
        arrive.intake.check(1, 1)


def test_failures_while_a_model_is_away_do_not_count(failures):
    arrive = failures()
    arrive(3, 500, excused=True)
    arrive(LEAST, 0)
    arrive.intake.check(1, 1)
