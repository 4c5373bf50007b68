"""What arrives: shown to the buffer, dropped by online difficulty filtering or not, and counted to the last token."""

import pytest

from prl.errors import PrlError
from prl.orchestrator.intake import Intake
from prl.orchestrator.types import Group
from prl.rollouts.outcome import Outcome, Stage

ODF = {"online_difficulty_filtering": True}
POOLS = {"easy_threshold": 1.0, "hard_threshold": 0.0}


@pytest.fixture
def arrive(make_env, make_rollout):
    """`arrive(rewards…, of=env number)` on envs `a` and `b`; a reward of None is a rollout that failed."""

    class Fixture:
        def __init__(self, tokens=5, **config):
            envs = [make_env(name, tasks=4, buffer=config) for name in ("a", "b")]
            self.intake, self.tokens = Intake(envs), tokens
            self.tasks = {env.name: env.buffer.tasks for env in envs}

        def __call__(self, *rewards, of="a", task=0, agents=None):
            rollouts = []
            for index, reward in enumerate(rewards):
                rollout = make_rollout(reward or 0.0, env=of, error="ValueError: no" if reward is None else None)
                if agents:
                    rollout.trace.agent.name = agents[index]
                rollout.__class__ = type("Counted", (type(rollout),), {"num_completion_tokens": self.tokens})
                rollouts.append(rollout)
            self.group = Group(0, of, 0, rollouts, task=self.tasks[of][task])
            return self.intake.admit(self.group)

    return Fixture


@pytest.mark.parametrize(
    ("rewards", "admitted"),
    [
        ((1.0, 1.0), False),
        ((0.0, 0.0), False),
        ((1.0, 0.99), True),
        ((0.0, 0.01), True),
        ((0.5, 0.5), True),
        ((0.0, 1.0), True),
        ((1.0, None, 1.0), False),
        ((None, 0.0), False),
        ((None, None), True),
    ],
)
def test_a_group_whose_survivors_mean_exactly_0_or_1_is_dropped(arrive, rewards, admitted):
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
    odf.intake.check(1)


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
    assert both.intake.take() == {
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
        "filtered_rollouts/a/easy": 3.0,
        "filtered_rollouts/a/hard": 1.0,
        "pool/b/easy": 0.0,
        "pool/b/normal": 0.75,
        "pool/b/hard": 0.25,
        "evicted_examples/b/easy": 0.0,
        "evicted_examples/b/hard": 1.0,
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
    assert set(plain.intake.take()) == {
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
    odf.intake.check(7)
    with pytest.raises(
        PrlError, match="dropped 6 rollouts in a row, 4 in groups with a mean reward of 1 and 2 with one of 0"
    ):
        odf.intake.check(6)


def test_tasks_that_are_retired_by_it_are_dropped_without_end_because_there_is_one(arrive):
    odf = arrive(**ODF, **POOLS)
    for number in range(4):
        odf(*[1.0] * 50, task=number)
    odf.intake.check(1)


def test_a_task_of_neither_pool_may_not_be_dropped_for_ever(arrive):
    odf = arrive(**ODF, easy_threshold=1.0)
    odf(0.0, 0.0)
    with pytest.raises(PrlError, match="dropped 2 rollouts"):
        odf.intake.check(2)
