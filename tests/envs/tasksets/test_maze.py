"""env=maze: which moves earn a reward; its grids can all be left by the way that comes with them."""

import pytest

from prl.envs.environment import load_taskset
from prl.envs.tasksets.maze import grade, shortest

ROWS = ["s.#", "..#", "#.g"]


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("drdr", 1.0),
        (" RDDR\n", 1.0),
        ("drulrdddr", 0.0),  # out of the grid
        ("rlrlrddr", 1.0),  # to and fro
        ("rlrlrlrddr", 0.0),  # ten moves, nine fields
        ("drd", 0.0),
        ("drdrr", 0.0),
        ("rr", 0.0),
        ("dd", 0.0),
        ("u", 0.0),
        ("d r d r", 0.0),
        ("", 0.0),
    ],
)
def test_moves_that_end_at_the_goal_earn_one(reply, reward):
    assert grade(reply, ROWS) == reward


def test_the_way_that_is_shown_is_the_shortest():
    assert shortest(ROWS) in ("drdr", "rddr") and shortest(["s#", "#g"]) is None
    assert len(shortest(["s..", "##.", "g.."])) == 6


def test_every_grid_has_a_way_and_the_size_that_was_asked_for():
    tasks = list(load_taskset("prl.envs.tasksets.maze", {"min_size": 2, "max_size": 5, "num_tasks": 300}, "e.args"))
    assert len(tasks) == 300 and {len(task.data.rows) for task in tasks} == {2, 3, 4, 5}
    assert all(task.grade(task.data.demonstration) == 1.0 for task in tasks)


def test_few_grids_are_all_there_are():
    tasks = list(load_taskset("prl.envs.tasksets.maze", {"min_size": 2, "max_size": 2, "walls": 0}, "e.args"))
    assert 5 <= len(tasks) <= 12  # the goal has 12 places beside the start in 2 x 2 fields, some of them held out
