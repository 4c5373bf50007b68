"""What arrives: shown to the buffer, dropped by online difficulty filtering or not, and counted to the last token.

Failed rollouts are counted by kind, and too many of them end the run."""

import pytest

from prl.errors import EngineError, PrlError
from prl.inference.sampler import OverlongPrompt
from prl.orchestrator.intake import LEAST, WINDOW, Intake
from prl.orchestrator.types import Group
from prl.rollouts.rollout import ERROR_KINDS, Outcome, Stage

ODF = {"online_difficulty_filtering": True}
POOLS = {"easy_threshold": 1.0, "hard_threshold": 0.0}


@pytest.fixture
def arrive(make_env, make_rollout):
    """`arrive(rewards…, of=env number)` on envs `a` and `b`; a reward of None is a rollout that failed."""

    class Fixture:
        def __init__(self, tokens=5, **config):
            envs = [make_env(name, tasks=4, buffer=config) for name in ("a", "b")]
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
            self.group = Group(0, self.envs[of], 0, self.envs[of].buffer.tasks[task], rollouts)
            return self.intake.admit(self.group)

    return Fixture


def take(intake):
    """The line without the counts of failed rollouts, which have a test of their own."""
    return {key: value for key, value in intake.take().items() if not key.startswith(("errors/", "rollouts/errored"))}


@pytest.mark.parametrize(
    ("rewards", "admitted"),
    [
        ((1.0, 1.0), False),
        ((0.0, 0.0), False),
        ((0.7 + 0.2 + 0.1, 0.7 + 0.2 + 0.1), False),
        ((0.7 + 0.2 + 0.1, 1.0, None), False),
        ((0.1 + 0.2 - 0.3, 0.0), False),
        ((1e-9, 0.0), True),
        ((1.0, 1.0 - 1e-9), True),
        ((1.0, 0.99), True),
        ((0.0, 0.01), True),
        ((0.5, 0.5), True),
        ((0.0, 1.0), True),
        ((1.0, None, 1.0), False),
        ((None, 0.0), False),
        ((None, None), True),
    ],
)
def test_a_group_whose_survivors_mean_0_or_1_is_dropped(arrive, rewards, admitted):
    assert arrive(**ODF)(*rewards) is admitted
    assert arrive()(*rewards) is True, "and none where nobody asked for it"


def test_what_is_dropped_says_why_unless_it_failed(arrive):
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


def test_a_rollout_that_sampled_nothing_keeps_its_outcome(arrive):
    odf = arrive(**ODF)
    odf(0.5)
    empty = odf.group.rollouts[0]
    empty.leave(Stage.EMPTY, "nothing was sampled")
    empty.trace.rewards.clear()
    assert not odf.intake.admit(odf.group) and empty.outcome.stage is Stage.EMPTY


def test_the_pools_see_what_is_dropped_and_every_rollout_learns_its_pool(arrive):
    both = arrive(**ODF, **POOLS)
    for number, (rewards, pool) in enumerate([((1.0, None), "easy"), ((0.0, 0.0), "hard"), ((0.0, 1.0), "normal")]):
        both(*rewards, task=number)
        assert {rollout.difficulty_pool for rollout in both.group.rollouts} == {pool}
    both(None, task=0)
    assert both.group.rollouts[0].difficulty_pool == "easy", "of a group that failed the pool its task is in"
    plain = arrive(**ODF)
    plain(1.0)
    assert plain.group.rollouts[0].difficulty_pool is None


def test_a_game_is_dropped_when_every_seat_is_of_one_mind(arrive):
    odf = arrive(**ODF, **POOLS)
    sides = ["one", "two", "one", "two"]
    assert odf(0.75, -0.75, 0.5, -0.5, agents=sides), (
        "zero is what the sides' rewards add up to, and the mean of neither"
    )
    assert odf.group.rollouts[0].difficulty_pool == "normal"
    assert odf(1.0, 0.0, 1.0, 0.0, agents=sides, task=1), (
        "who wins is settled, but neither side finds it too easy or too hard"
    )
    assert odf.group.rollouts[0].is_active and odf.group.rollouts[0].difficulty_pool == "normal"
    assert odf(1.0, 0.5, 1.0, 0.5, agents=sides, task=1) and odf(0.0, 0.5, 0.0, 0.5, agents=sides, task=1)
    for task, reward, pool in ((2, 1.0, "easy"), (3, 0.0, "hard")):
        assert not odf(*[reward] * 4, agents=sides, task=task)
        assert {(r.outcome.reason, r.difficulty_pool) for r in odf.group.rollouts} == {
            (f"online difficulty filtering: mean reward {reward:g}", pool)
        }
    line = odf.intake.take()
    assert (line["filtered_rollouts/a/easy"], line["filtered_rollouts/a/hard"]) == (4.0, 4.0)


def test_a_game_that_one_side_always_wins_goes_on_for_ever(arrive):
    odf = arrive(**ODF)
    for _ in range(5):
        odf(1.0, 1.0)
        odf(1.0, 0.0, agents=["one", "two"])
    odf.intake.check(1, 1)


@pytest.mark.parametrize("n", [3, *range(12, 39)])
def test_equal_rewards_reach_a_threshold_that_equals_them(arrive, n):
    pools = arrive(easy_threshold=0.95, hard_threshold=0.05)
    for task, (reward, pool) in enumerate([(0.95, "easy"), (0.05, "hard"), (0.949, "normal"), (0.051, "normal")]):
        pools(*[reward] * n, task=task)
        assert pools.group.rollouts[0].difficulty_pool == pool


def test_a_steps_numbers_by_hand(arrive):
    both = arrive(**ODF, **POOLS, tokens=5)
    both(1.0, 1.0, 1.0, task=0)
    both(0.0, None, task=1)
    both(0.5, 0.25, task=2)
    both(0.0, of="b")
    assert take(both.intake) == {
        "tokens/generated": 40.0,  # those of what failed and of what was dropped too
        "rollouts/arrived": 8.0,  # likewise
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


def test_without_pools_and_filtering_there_are_no_numbers_of_them(arrive):
    plain = arrive()
    plain(1.0)
    assert set(take(plain.intake)) == {
        "tokens/generated",
        "rollouts/arrived",
        "reward/all/arrived",
        "reward/a/arrived",
    }


@pytest.mark.parametrize("config", [{}, {"refill": True, **POOLS}])
def test_more_dropped_in_a_row_than_is_bearable_is_an_error_that_says_what_they_were(arrive, config):
    odf = arrive(**ODF, **config)
    odf(1.0, 1.0)
    odf(0.5)
    for number, reward in enumerate((1.0, 1.0, 0.0)):
        odf(reward, reward, task=number)
    odf(None, None)
    odf.intake.check(1, 7)
    with pytest.raises(
        PrlError, match="dropped 6 rollouts in a row, 4 in groups with a mean reward of 1 and 2 with one of 0"
    ):
        odf.intake.check(1, 6)


def test_tasks_that_are_retired_by_it_are_dropped_without_end_because_there_is_one(arrive):
    odf = arrive(**ODF, **POOLS)
    for number in range(4):
        odf(*[1.0] * 50, task=number)
    odf.intake.check(1, 1)


def test_a_task_of_neither_pool_may_not_be_dropped_for_ever(arrive):
    odf = arrive(**ODF, easy_threshold=1.0)
    odf(0.0, 0.0)
    with pytest.raises(PrlError, match="dropped 2 rollouts"):
        odf.intake.check(1, 2)


# --- failed rollouts --------------------------------------------------------------------------------------------------


@pytest.fixture
def make_budget(make_env):
    """`make_budget(names of envs, limit)`"""
    return lambda names, limit: Intake([make_env(name) for name in names], limit)


@pytest.fixture
def make_group(make_rollout, make_env):
    def make(fine=0, failed=0, *, env="toy", error=None, kind=None, excused=False):
        rollouts = [make_rollout(env=env) for _ in range(fine + failed)]
        for rollout in rollouts[fine:]:
            rollout.fail(error or KeyError("x"), kind)
        return Group(0, make_env(env), 0, None, rollouts, excused)

    return make


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TimeoutError("late"), "timeout"),
        (OverlongPrompt("long"), "overlong_prompt"),
        (EngineError("gone", 503), "engine"),
        (KeyError("x"), "env"),
    ],
)
def test_an_exception_says_what_kind_it_is(make_rollout, error, kind):
    rollout = make_rollout()
    rollout.fail(error)
    rollout.fail(ValueError("the first one counts"))
    assert rollout.error_kind == kind and rollout.error.startswith(type(error).__name__)


def test_failures_are_counted_by_env_and_kind_since_the_last_time(make_group, make_budget):
    failures = make_budget(["a", "b"], 0.5)
    failures.admit(make_group(1, 2, env="a"))
    failures.admit(make_group(0, 1, env="b", error=TimeoutError("late")))
    failures.admit(make_group(0, 1, env="b", error=EngineError("no", 400), kind="reference", excused=True))
    line = failures.take()
    assert {key for key, value in line.items() if value and key.startswith(("errors/", "rollouts/errored"))} == {
        "errors/all/env",
        "errors/a/env",
        "errors/all/timeout",
        "errors/b/timeout",
        "errors/all/reference",
        "errors/b/reference",
        "rollouts/errored",
    }
    assert (line["errors/all/env"], line["errors/b/timeout"], line["rollouts/errored"]) == (2.0, 1.0, 4.0)
    assert line["rollouts/errored"] == sum(value for key, value in line.items() if key.startswith("errors/all/"))
    again = failures.take()
    assert {value for key, value in again.items() if key.startswith(("errors/", "rollouts/errored"))} == {0.0}
    assert sum(key.startswith("errors/") for key in line) == 3 * len(ERROR_KINDS)


def test_what_was_left_out_is_no_failure(make_group, make_budget):
    group = make_group(3, 0)
    for rollout, stage in zip(group.rollouts, (Stage.STALE, Stage.SURPLUS, Stage.EMPTY), strict=True):
        rollout.leave(stage, "x")
    failures = make_budget(["toy"], 0.0)
    failures.admit(group)
    line = failures.take()
    failed = {value for key, value in line.items() if key.startswith(("errors/", "rollouts/errored"))}
    assert failed == {0.0} and "stale" not in ERROR_KINDS


def test_the_limit_itself_is_allowed_and_a_rollout_more_is_not(make_group, make_budget):
    failures = make_budget(["toy"], 0.25)
    failures.admit(make_group(75, 25))
    failures.check(1, 1)
    failures.admit(make_group(0, 1, error=EngineError("gone", 503)))
    expected = r"step 7: 26 of the last 101 .* 'toy' .*max_error_share=0.25.*env: 25, engine: 1.*gone"
    with pytest.raises(PrlError, match=expected):
        failures.check(7, 1)


def test_few_rollouts_are_not_judged_and_old_ones_are_forgotten(make_group, make_budget):
    failures = make_budget(["toy"], 0.5)
    failures.admit(make_group(0, LEAST - 1))
    failures.check(1, 1)
    failures.admit(make_group(LEAST, 0))
    failures.check(1, 1)
    failures.admit(make_group(WINDOW, 0))
    failures.admit(make_group(0, WINDOW // 2))
    failures.check(1, 1)
    failures.admit(make_group(0, 1))
    with pytest.raises(PrlError, match=f"{WINDOW // 2 + 1} of the last {WINDOW}"):
        failures.check(1, 1)


def test_an_env_is_judged_by_its_own_rollouts(make_group, make_budget):
    failures = make_budget(["good", "bad"], 0.5)
    failures.admit(make_group(1000, 0, env="good"))
    failures.admit(make_group(10, 60, env="bad"))
    with pytest.raises(PrlError, match="60 of the last 70 rollouts of env 'bad'"):
        failures.check(1, 1)


def test_failures_while_a_model_was_away_are_not_held_against_the_env(make_group, make_budget):
    failures = make_budget(["toy"], 0.5)
    failures.admit(make_group(3, 500, excused=True))
    failures.admit(make_group(LEAST, 0))
    failures.check(1, 1)


def test_the_first_failure_of_each_kind_is_told(make_group, make_budget, caplog):
    failures = make_budget(["toy"], 0.5)
    for _ in range(3):
        failures.admit(make_group(1, 2, error=EngineError("gone", 503)))
    failures.admit(make_group(0, 1, error=TimeoutError("late")))
    assert [record.getMessage().partition("(")[2] for record in caplog.records] == [
        "engine; the first of its kind): EngineError: gone",
        "timeout; the first of its kind): TimeoutError: late",
    ]
