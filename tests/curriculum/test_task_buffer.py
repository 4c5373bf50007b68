"""The curriculum: passes over the tasks, repeatable; pools of what is not sampled any more."""

import json
from pathlib import Path

import pytest
import verifiers.v1 as vf

from prl.base.errors import PrlError
from prl.curriculum.base import Context, Curriculum
from prl.curriculum.pools import RETIRED, TaskCurriculum, write_pools


def loaded(tasks, seed=0, name="math", **options):
    curriculum = TaskCurriculum(**options)
    curriculum.load(tasks, seed=seed, env_name=name)
    return curriculum


def take(n, *, tasks=5, seed=0, shuffle=True):
    curriculum = loaded([f"task {i}" for i in range(tasks)], seed, shuffle=shuffle)
    return [curriculum.next() for _ in range(n)], curriculum


def test_no_task_comes_twice_before_all_have_come_once():
    got, curriculum = take(15)
    assert all(len(set(got[start : start + 5])) == 5 for start in (0, 5, 10))
    assert curriculum.passes == 3


def test_the_seed_alone_decides_the_order():
    assert take(12, seed=3)[0] == take(12, seed=3)[0]
    assert take(12, seed=3)[0] != take(12, seed=4)[0]


def test_without_shuffling_tasks_come_as_they_are():
    assert take(7, shuffle=False)[0] == [f"task {i % 5}" for i in range(7)]


# --- pools ------------------------------------------------------------------------------------------------------------


class Sum(vf.Task):
    """Nothing but its data."""


class SumData(vf.TaskData):
    left: int


def sums(n, **changed):
    return [Sum(SumData(**{"idx": i, "prompt": f"{i}+1=", "left": i} | changed)) for i in range(n)]


def pooled(tasks=4, *, seed=0, name="math", **options):
    """A curriculum over `tasks` sums, or over those given."""
    made = sums(tasks) if isinstance(tasks, int) else tasks
    return loaded(made, seed, name, **{"easy_threshold": 0.75, "hard_threshold": 0.25} | options)


@pytest.mark.parametrize(
    ("reward", "pool"),
    [
        (0.75, "easy"),
        (0.75 - 1e-16, "easy"),
        (0.7499, "normal"),
        (0.2501, "normal"),
        (0.25 + 1e-16, "hard"),
        (0.25, "hard"),
    ],
)
def test_thresholds_are_inclusive(reward, pool):
    curriculum = pooled()
    assert curriculum.update(curriculum.tasks[1], reward) == curriculum.pool_of(curriculum.tasks[1]) == pool
    assert curriculum.counts() == {"easy": 0, "normal": 3, "hard": 0} | {pool: 1 if pool != "normal" else 4}


@pytest.mark.parametrize(
    ("easy", "hard", "pools"),
    [(0.75, None, ["easy", "normal"]), (None, 0.25, ["normal", "hard"]), (None, None, [None, None])],
)
def test_without_a_threshold_nothing_goes_to_its_pool(easy, hard, pools):
    curriculum = pooled(easy_threshold=easy, hard_threshold=hard)
    assert [curriculum.update(task, reward) for task, reward in zip(curriculum.tasks, (1.0, 0.0))] == pools
    assert curriculum.pooled is (pools != [None, None])


def test_retired_tasks_leave_the_pass_and_none_comes_twice():
    curriculum = pooled(8)
    first = [curriculum.next() for _ in range(3)]
    waiting = [task for task in curriculum.tasks if task not in first]
    curriculum.update(first[0], 1.0)
    curriculum.update(waiting[0], 0.0)
    rest = [curriculum.next() for _ in range(4)]
    assert set(map(id, rest)) == set(map(id, waiting[1:])) and curriculum.passes == 1
    second = [curriculum.next() for _ in range(6)]
    assert set(map(id, second)) == set(map(id, [*first[1:], *waiting[1:]])) and curriculum.passes == 2


@pytest.mark.parametrize("later", [0.0, 0.5])
def test_retired_task_stays_retired(later):
    curriculum = pooled()
    task = curriculum.tasks[2]
    assert curriculum.update(task, 1.0) == "easy" and curriculum.update(task, later) == "easy"
    assert curriculum.counts() == {"easy": 1, "normal": 3, "hard": 0} and curriculum.take_evicted() == {"easy": 1}


@pytest.mark.parametrize(("seats", "pool"), [((1.0, 0.8), "easy"), ((1.0, -1.0), "normal"), ((0.0, 0.1), "hard")])
def test_the_seats_of_a_game_have_to_agree(seats, pool):
    curriculum = pooled()
    assert curriculum.update(curriculum.tasks[0], *seats) == pool


def test_a_buffer_that_refills_begins_again_with_all(caplog):
    caplog.set_level("INFO")
    curriculum = pooled(3, refill=True)
    seen = []
    for _ in range(2):
        tasks = [curriculum.next() for _ in range(3)]
        seen.append({task.data.idx for task in tasks})
        for task in tasks:
            assert curriculum.update(task, 1.0) == "easy" and not curriculum.ended
        assert curriculum.counts()["easy"] == 3
    assert seen == [{0, 1, 2}] * 2
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["env math: no normal task left (3 easy, 0 hard of 3); all are sampled again"]
    curriculum.next()
    assert curriculum.counts() == {"easy": 0, "normal": 3, "hard": 0}


# --- pools from a checkpoint ------------------------------------------------------------------------------------------


@pytest.fixture
def save(tmp_path):
    def write(*buffers):
        entries = {p: [task for b in buffers for task in b.retired_to(p)] for p in RETIRED}
        write_pools(tmp_path, entries)
        return str(tmp_path)

    return write


def retired(curriculum):
    return {task.data.left: pool for task in curriculum.tasks if (pool := curriculum.pool_of(task)) != "normal"}


@pytest.fixture
def saved(save):
    """Pools of ten sums: 0 to 5 easy, 6 to 8 hard."""
    curriculum = pooled(10)
    for task, reward in zip(curriculum.tasks, [1.0] * 6 + [0.0] * 3):
        curriculum.update(task, reward)
    return save(curriculum)


EASY, HARD = dict.fromkeys(range(6), "easy"), dict.fromkeys((6, 7, 8), "hard")


def test_pools_come_back_as_they_were(saved):
    for thresholds in ({}, {"easy_threshold": None, "hard_threshold": None}):
        curriculum = pooled(10, load_from=saved, **thresholds)
        assert curriculum.pooled and retired(curriculum) == EASY | HARD
    assert [curriculum.next().data.left for _ in range(3)] == [9] * 3 and curriculum.take_evicted() == {}


def test_pools_switched_off_or_on_at_resume(saved):
    with_pools, tasks = pooled(4, refill=False), sums(4)
    for task in with_pools.tasks[:3]:
        with_pools.update(task, 1.0)
    off, same = pooled(tasks, easy_threshold=None, hard_threshold=None), pooled(4)
    for curriculum in (off, same):
        curriculum.load_state_dict(with_pools.state_dict())
    assert {off.next().data.idx for _ in range(8)} == {0, 1, 2, 3} and off.counts()["normal"] == 4
    assert not off.take_evicted() and {same.next().data.idx for _ in range(8)} == {3}
    with_pools.update(with_pools.tasks[3], 1.0)
    off.load_state_dict(with_pools.state_dict())
    assert with_pools.ended and not off.ended

    on = pooled(10, load_from=saved)
    on.load_state_dict(pooled(10, easy_threshold=None, hard_threshold=None).state_dict())
    assert retired(on) == EASY | HARD, "those that it begins with now"
    again = pooled(10, load_from=saved)
    again.load_state_dict(pooled(10).state_dict())
    assert retired(again) == {}, "of a run with pools, its own"


@pytest.mark.parametrize("seed", range(3))
def test_shares_given_at_resume_are_drawn_once(saved, seed):
    before = pooled(10, load_from=saved)
    state = before.state_dict()

    def going_on(state, **options):
        curriculum = pooled(10, seed=seed, **options)
        curriculum.load_state_dict(state)
        return curriculum

    after = going_on(state, easy_fraction=0.5, hard_fraction=1.0)
    left = retired(after)
    assert len(left) == 3 and left.items() <= EASY.items() and after.counts() == {"easy": 3, "normal": 7, "hard": 0}
    assert retired(going_on(state, easy_fraction=0.5, hard_fraction=1.0)) == left, "by the seed of the run"
    assert {after.next().data.left for _ in range(20)} == set(range(10)) - left.keys()
    for options in ({"easy_fraction": 0.5, "hard_fraction": 1.0}, {"load_from": saved, "easy_fraction": 0.0}):
        again = going_on(after.state_dict(), **options)
        assert retired(again) == left, "the shares have been drawn"
    assert retired(going_on(after.state_dict(), easy_fraction=1.0)) == {}, "another share is another wish"
    free = next(task for task in after.tasks if task.data.left not in left and task.data.left < 6)
    assert after.update(free, 1.0) == "easy", "until their next group"
    begun = pooled(10, load_from=saved, easy_fraction=0.5)
    same = going_on(begun.state_dict(), load_from=saved, easy_fraction=0.5)
    assert retired(same) == retired(begun), "what a run began with is not drawn again where it goes on"


def played(curriculum, steps, reward=1.0):
    """The tasks in each pool after each of `steps`, in which a task is played that then retires."""
    counts = []
    for step in steps:
        curriculum.update(curriculum.next(Context(step=step)), reward)
        counts.append(tuple(curriculum.counts().values()))
    return counts


def test_shares_come_back_every_few_steps():
    """easy, normal, hard: at step 4 half of three easy tasks (two) return, at step 7 half of four."""
    curriculum = pooled(10, refresh_every=3, easy_fraction=0.5)
    easy = [count[0] for count in played(curriculum, range(1, 8))]
    assert easy == [1, 2, 3, 2, 3, 4, 3]
    curriculum = pooled(10, refresh_every=2, hard_fraction=1.0, easy_fraction=0.0)
    assert played(curriculum, [1], 1.0) + played(curriculum, [2, 3, 4, 5], 0.0) == [
        (1, 9, 0),
        (1, 8, 1),
        (1, 8, 1),
        (1, 7, 2),
        (1, 8, 1),
    ]


def test_tasks_that_come_back_are_those_of_the_seed_and_outlast_a_resume():
    options = {"refresh_every": 2, "easy_fraction": 0.5}
    whole, again, other = (pooled(12, seed=seed, **options) for seed in (0, 0, 1))
    played(whole, range(1, 10))
    played(again, range(1, 6))
    resumed = pooled(12, seed=7, **options)
    resumed.load_state_dict(json.loads(json.dumps(again.state_dict())))
    played(resumed, range(6, 10))
    played(other, range(1, 10))
    assert retired(resumed) == retired(whole) != retired(other)


def test_share_of_each_pool_comes_back_by_the_seed(saved):
    def load(seed):
        return retired(pooled(10, seed=seed, load_from=saved, easy_fraction=0.5, hard_fraction=1 / 3))

    for seed in range(5):
        left = load(seed)
        assert left == load(seed) and left.items() <= (EASY | HARD).items()
        assert (list(left.values()).count("easy"), list(left.values()).count("hard")) == (3, 2)
    assert len({tuple(load(seed)) for seed in range(5)}) > 1


def test_tasks_are_found_by_the_fields_named(saved):
    """In another order, under other numbers: verifiers' own key no longer fits, the prompt does."""
    again = [Sum(SumData(idx=100 - i, prompt=f"{i}+1=", left=i)) for i in reversed(range(10))]
    assert retired(pooled(again, load_from=saved)) == {}
    assert retired(pooled(again, load_from=saved, hash_keys=["prompt"])) == EASY | HARD
    assert retired(pooled(again, load_from=saved, hash_keys=["left", "prompt"])) == EASY | HARD
    assert retired(pooled(again, load_from=saved, hash_keys=["idx"])) == {}
    assert retired(pooled(sums(10, prompt="?"), load_from=saved, hash_keys=["left"])) == EASY | HARD


def test_equal_tasks_are_retired_by_their_number(save):
    curriculum = pooled(sums(4, prompt="?"))
    curriculum.update(curriculum.tasks[0], 1.0)
    curriculum.update(curriculum.tasks[3], 0.0)
    again = pooled(sums(4, prompt="?"), load_from=save(curriculum), hash_keys=["prompt"])
    assert again.counts() == {"easy": 1, "normal": 2, "hard": 1}


def test_pools_of_other_tasks_are_worth_a_warning(saved, caplog):
    curriculum = pooled(sums(3, prompt="?"), load_from=saved)
    assert retired(curriculum) == {}
    messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert ["0 of the 6 easy" in messages[0], "0 of the 3 hard" in messages[1]] == [True, True] and len(messages) == 2


def test_a_line_can_be_read(save):
    curriculum = pooled([Sum(SumData(idx=0, prompt="π\u2028+1=", left=0))])
    curriculum.update(curriculum.tasks[0], 1.0)
    path = Path(save(curriculum)) / "easy_examples.jsonl"
    (line,) = path.read_bytes().splitlines()
    entry = json.loads(line)
    assert (entry["env"], entry["key"]) == ("math", curriculum.tasks[0].key)
    assert entry["task"]["prompt"] == "π\u2028+1=" and entry["task"]["left"] == 0
    assert "π" in line.decode(), "readable as it is"
    assert retired(pooled(curriculum.tasks, load_from=str(path.parent))) == {0: "easy"}
    assert (path.parent / "hard_examples.jsonl").read_bytes() == b""


# --- the interface ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("refill", [False, True])
def test_retired_task_returns_only_by_refill(refill):
    curriculum = pooled(2, refill=refill)
    curriculum.update(curriculum.tasks[0], 1.0)
    assert list(map(curriculum.returns, curriculum.tasks)) == [refill, True]
    curriculum.update(curriculum.tasks[1], 0.0)
    assert curriculum.ended is not refill
    if not refill:
        with pytest.raises(PrlError, match="env 'math' has no task left"):
            curriculum.next()


def test_a_curriculum_that_learns_from_rewards_reads_them():
    class Learns(TaskCurriculum):
        def update(self, task, *rewards):
            return super().update(task, *rewards)

    assert Learns().reads_rewards and not TaskCurriculum().reads_rewards


def test_buffer_of_ones_own_writes_two_methods():
    class Cycle(Curriculum):
        def load(self, tasks, *, seed, env_name):
            self.left = list(tasks)

        def next(self, context):
            self.left.append(self.left.pop(0))
            return self.left[-1]

    curriculum = Cycle(online_difficulty_filtering=True)
    curriculum.load(["a", "b"], seed=0, env_name="math")
    assert [curriculum.next(Context()) for _ in range(3)] == ["a", "b", "a"] and curriculum.reads_rewards
    assert curriculum.update("a", 1.0) is curriculum.pool_of("a") is None and curriculum.returns("a")
    assert not (
        curriculum.ended
        or curriculum.pooled
        or curriculum.counts()
        or curriculum.retired_to("easy")
        or curriculum.take_evicted()
    )
