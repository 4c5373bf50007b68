"""Mazes in few tokens: the prompt has start, goal and walls, each as row and column, the reply the cells of a way.

    maze 5: 12>30 01 22 23        22 is a wall, so e.g. 11 21 31 30, written 11213130

Reward 1 if each cell of the reply is beside the one before and free, the first one beside the start, and the last one
is the goal, whatever their number; else 0.
"""

import random
from collections.abc import Iterable, Iterator

import verifiers.v1 as vf
from pydantic import Field

from prl.envs.tasksets.base import AnswerTask, SplitConfig, enough

__all__ = ["MazeTaskset"]

Cell = tuple[int, int]


class Maze:
    """A grid of as many rows as columns, with walls, a start and a goal."""

    def __init__(self, size: int, start: Cell, goal: Cell, walls: set[Cell]):
        self.size, self.start, self.goal, self.walls = size, start, goal, walls

    def beside(self, cell: Cell) -> list[Cell]:
        """Return the free cells beside a cell."""
        row, column = cell
        around = [(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)]
        return [(r, c) for r, c in around if 0 <= r < self.size and 0 <= c < self.size and (r, c) not in self.walls]

    def solved_by(self, reply: str) -> bool:
        """Return whether a reply is a way from the start to the goal."""
        text = reply.strip()
        if len(text) % 2 or not (text.isascii() and text.isdigit()):
            return False
        cell = self.start
        for place in range(0, len(text), 2):
            there = (int(text[place]), int(text[place + 1]))
            if there not in self.beside(cell):
                return False
            cell = there
        return cell == self.goal

    def shortest_way(self, rng: random.Random) -> list[Cell] | None:
        """Return one of the shortest ways, without the start; None if there is none."""
        ways: dict[Cell, list[Cell]] = {self.start: []}
        edge = [self.start]
        while edge and self.goal not in ways:
            rng.shuffle(edge)
            reached: list[Cell] = []
            for cell in edge:
                for there in self.beside(cell):
                    if there not in ways:
                        ways[there] = [*ways[cell], there]
                        reached.append(there)
            edge = reached
        return ways.get(self.goal)


def written(cells: Iterable[Cell]) -> list[str]:
    """Return cells as they stand in prompts and replies: row and column, a digit each."""
    return [f"{row}{column}" for row, column in cells]


class MazeData(vf.TaskData):
    size: int
    start: Cell
    goal: Cell
    walls: list[Cell]
    demonstration: str
    """A shortest way."""


class MazeTask(AnswerTask[MazeData]):
    """The prompt is its identity."""

    def grade(self, reply: str) -> float:
        data = self.data
        return float(Maze(data.size, data.start, data.goal, set(data.walls)).solved_by(reply))


class MazeConfig(SplitConfig):
    size: int = Field(5, ge=2, le=9)
    """Rows and columns."""
    blocked: float = Field(0.3, ge=0, lt=1)
    """Chance that a cell is a wall."""
    min_way: int = Field(3, ge=1)
    """Moves of the shortest way, at least."""
    max_way: int = 20
    """Moves of the shortest way, at most."""


class MazeTaskset(vf.Taskset[MazeTask, MazeConfig]):
    """Grids with random walls, start and goal, of those that have a way as long as asked for."""

    IN_PROCESS = True
    MAX_TOKENS = 64

    def load(self) -> Iterator[MazeTask]:
        rng = random.Random(self.config.seed)
        drawn = (self._maze(rng) for _ in range(5 * enough(self.config.num_tasks)))
        mazes = self.config.chosen((data for data in drawn if data), self.config.num_tasks)
        return (MazeTask(data, self.config.task) for data in mazes)

    def _maze(self, rng: random.Random) -> MazeData | None:
        """Draw a maze; None if it has no way as long as asked for."""
        cells = [(row, column) for row in range(self.config.size) for column in range(self.config.size)]
        start, goal = rng.sample(cells, 2)
        walls = [cell for cell in cells if rng.random() < self.config.blocked and cell not in (start, goal)]
        way = Maze(self.config.size, start, goal, set(walls)).shortest_way(rng)
        if way is None or not self.config.min_way <= len(way) <= self.config.max_way:
            return None
        size, (begin, end) = self.config.size, written([start, goal])
        prompt = f"maze {size}: {begin}>{end} {' '.join(written(walls))}"
        demonstration = "".join(written(way))
        return MazeData(
            id=prompt, prompt=prompt, size=size, start=start, goal=goal, walls=walls, demonstration=demonstration
        )
