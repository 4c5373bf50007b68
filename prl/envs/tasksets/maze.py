"""Find a way through a grid: the prompt shows its rows, `s` for the start, `g` for the goal and `#` for walls.

    maze: s.# ..# #.g     →     drdr, or rddr

The answer is the moves, letters of u, d, l and r. The reward is 1.0 if they end at the goal without leaving the grid or
entering a wall, by whatever way, in at most as many moves as there are fields; else 0.0. It gives nothing for a part of
the way: the chance of a random way falls with the size, which is what pass@k and `algo=max_rl` are about.
"""

import random
from collections import deque
from collections.abc import Iterator

import verifiers.v1 as vf
from pydantic import Field

from prl.envs.tasksets.base import AnswerTask, SplitConfig

__all__ = ["MazeTaskset"]

MOVES = {"u": (-1, 0), "d": (1, 0), "l": (0, -1), "r": (0, 1)}
START, GOAL, WALL, FREE = "sg#."
PATIENCE = 10_000
"""Grids in a row without a new task after which the settings are taken to have no more."""


def follow(rows: list[str], moves: str) -> tuple[str, int, int] | None:
    """Return what moves lead to from the start, with row and column; None if they leave the grid or enter a wall."""
    row, column = next((number, line.index(START)) for number, line in enumerate(rows) if START in line)
    for move in moves:
        down, right = MOVES.get(move, (len(rows), 0))
        row, column = row + down, column + right
        if not (0 <= row < len(rows) and 0 <= column < len(rows[0])) or rows[row][column] == WALL:
            return None
    return rows[row][column], row, column


def grade(reply: str, rows: list[str]) -> float:
    """Return the reward of `reply`, 1.0 or 0.0, by the rule above, ignoring case and surrounding whitespace."""
    moves = reply.strip().lower()
    if len(moves) > len(rows) * len(rows[0]):
        return 0.0
    end = follow(rows, moves)
    return float(end is not None and end[0] == GOAL)


def shortest(rows: list[str]) -> str | None:
    """Return the first of the shortest ways in the order of `MOVES`; None if there is none."""
    ways, seen = deque([""]), set()
    while ways:
        way = ways.popleft()
        place = follow(rows, way)
        if place is None or place in seen:
            continue
        if place[0] == GOAL:
            return way
        seen.add(place)
        ways += [way + move for move in MOVES]
    return None


class MazeData(vf.TaskData):
    rows: list[str]
    """The grid."""
    demonstration: str
    """The shortest way."""


class MazeTask(AnswerTask[MazeData]):
    """The grid itself is its identity."""

    def grade(self, reply: str) -> float:
        return grade(reply, self.data.rows)


class MazeConfig(SplitConfig):
    min_size: int = Field(3, ge=2, le=20)
    """Rows and columns of the smallest grid; the number is uniform in its range."""
    max_size: int = Field(4, ge=2, le=20)
    """Rows and columns of the largest grid."""
    walls: float = Field(0.3, ge=0, le=0.6)
    """Chance of a field to be a wall."""


class MazeTaskset(vf.Taskset[MazeTask, MazeConfig]):
    """Random grids with a way through; no grid occurs twice."""

    IN_PROCESS = True

    @property
    def MAX_TOKENS(self) -> int:
        """A move takes a token at most, and no reply has more moves than fields."""
        return self.config.max_size**2 + 8

    def load(self) -> Iterator[MazeTask]:
        config, draw = self.config, random.Random(self.config.seed)
        seen: set[str] = set()
        misses = 0
        while len(seen) < config.num_tasks and misses < PATIENCE:
            misses += 1
            size = draw.randint(config.min_size, config.max_size)
            fields = draw.choices([WALL, FREE], [config.walls, 1 - config.walls], k=size * size)
            for mark, place in zip((START, GOAL), draw.sample(range(size * size), 2), strict=True):
                fields[place] = mark
            rows = ["".join(fields[first : first + size]) for first in range(0, size * size, size)]
            text, way = " ".join(rows), shortest(rows)
            if way is not None and text not in seen and config.in_split(text):
                seen.add(text)
                misses = 0
                yield MazeTask(MazeData(id=text, prompt=f"maze: {text}", rows=rows, demonstration=way), config.task)
