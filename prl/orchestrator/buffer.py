"""Which task comes next, and which has been learnt from enough."""

import logging
import math
import random
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prl.errors import ConfigError, PrlError
from prl.orchestrator import pools

log = logging.getLogger(__name__)


@dataclass
class BufferConfig:
    """Goes through an env's tasks in passes; what turns out too easy or too hard can be retired or left untrained."""

    _target_: str = "prl.orchestrator.buffer.Buffer"
    shuffle: bool = True
    """Reorder the tasks before each pass (seeded)."""
    easy_threshold: float | None = None
    """A group's mean reward from which its task is retired to the easy pool: it is not sampled again. null = never."""
    hard_threshold: float | None = None
    """A group's mean reward up to which its task is retired to the hard pool. null = never."""
    refill: bool = False
    """When an env has no task left, all it retired are sampled again. False = it ends, and the run with its last env."""
    load_from: str | None = None
    """A checkpoint folder, with whose `easy_examples.jsonl` and `hard_examples.jsonl` the pools begin; null = empty."""
    hash_keys: list[str] | None = None
    """Fields of a task's data by which it is found in `load_from`. null = verifiers' `task.key`: all of them."""
    easy_fraction: float = 0.0
    """Share of `load_from`'s easy tasks that are sampled again, drawn at random (seeded)."""
    hard_fraction: float = 0.0
    """Likewise of its hard tasks."""
    online_difficulty_filtering: bool = False
    """Drop a group whose mean reward is exactly 0 or 1 before it takes a place in a batch. For rewards from 0 to 1."""
    oversampling_factor: float = 1.0
    """How many times the rollouts that a batch needs may be under way. Above 1 a full batch waits for no slow rollout:
    what would be too old for the next is discarded, which favours short ones."""


class Buffer:
    """The tasks of one env, handed out in passes: none comes twice before all have come once.

    With thresholds (or pools to start with) each task is in one of three pools, `normal`, `easy` and `hard`, and only normal
    tasks are handed out. One group decides, and a retired task stays retired, whatever groups of it that were under way
    show later; `refill` alone brings it back. So an env that has ended does not begin again.
    """

    @classmethod
    def check(cls, config: BufferConfig, where: str) -> None:
        """Raise ConfigError for a config that cannot work; `where` is its key. Called before anything is started."""
        easy, hard, folder = config.easy_threshold, config.hard_threshold, config.load_from
        for key, value in (("easy_threshold", easy), ("hard_threshold", hard)):
            if value is not None and not math.isfinite(value):
                raise ConfigError(f"{where}.{key} must be a finite number or null, got {value}")
        if easy is not None and hard is not None and not easy > hard:
            raise ConfigError(f"{where}.easy_threshold={easy} must be above {where}.hard_threshold={hard}")
        for key in ("easy_fraction", "hard_fraction"):
            if not 0 <= getattr(config, key) <= 1:
                raise ConfigError(f"{where}.{key} must be from 0 to 1, got {getattr(config, key)}")
        if not 1 <= config.oversampling_factor < math.inf:
            raise ConfigError(f"{where}.oversampling_factor must be at least 1, got {config.oversampling_factor}")
        for key in ("easy_fraction", "hard_fraction", "hash_keys"):
            if folder is None and getattr(config, key) not in (0, None):
                raise ConfigError(
                    f"{where}.{key}={getattr(config, key)} is about the pools that a run begins with, and this one loads "
                    f"none: add {where}.load_from=<run>/checkpoints/step_<n>, or leave it out"
                )
        if config.refill and (folder, easy, hard) == (None, None, None):
            raise ConfigError(
                f"{where}.refill=true without difficulty pools: no task is ever retired. Add a threshold, "
                f"{where}.easy_threshold=… or {where}.hard_threshold=…, or choose buffer=pools"
            )
        for pool in pools.RETIRED if folder is not None else ():
            if not (path := pools.file(Path(folder).expanduser(), pool)).is_file():
                raise ConfigError(
                    f"{where}.load_from={folder!r} has no {path.name}: give a folder checkpoints/step_<n> of a run with "
                    "difficulty pools"
                )

    def __init__(self, config: BufferConfig, tasks: Sequence, seed: int, env_name: str = ""):
        self.config = config
        self.tasks = tasks
        self.env_name = env_name
        self.shuffle = config.shuffle
        self.random = random.Random(seed)
        self.passes = 0
        self.evicted: Counter[str] = Counter()
        """Tasks retired to each pool since somebody last took this."""
        self._order: list[int] = []
        self._retired: dict[int, str] = {}
        self._index = {id(task): index for index, task in enumerate(tasks)}
        check_hash_keys(config.hash_keys, tasks[0])
        if config.load_from is not None:
            self._load(Path(config.load_from).expanduser())

    @property
    def pooled(self) -> bool:
        """Whether tasks are kept in pools at all."""
        return (self.config.easy_threshold, self.config.hard_threshold, self.config.load_from) != (None, None, None)

    @property
    def ended(self) -> bool:
        """Whether there is no task to hand out, and never will be."""
        return len(self._retired) == len(self.tasks) and not self.config.refill

    def next(self):
        """The next task. Raises PrlError once the env has ended."""
        if self.ended:
            raise PrlError(f"env {self.env_name!r} has no task left: {self.describe()}")
        if len(self._retired) == len(self.tasks):
            log.info("env %s: no normal task left (%s); all are sampled again", self.env_name, self.describe())
            self._retired, self._order = {}, []
        while True:
            if not self._order:
                self.passes += 1
                self._order = [index for index in range(len(self.tasks)) if index not in self._retired]
                if self.shuffle:
                    self.random.shuffle(self._order)
                self._order.reverse()
            if (index := self._order.pop()) not in self._retired:
                return self.tasks[index]

    def update(self, task: Any, *rewards: float) -> str | None:
        """Take note of the mean reward of a group of `task`: of a game, the mean of each seat, which have to agree.

        Returns the pool the task is in now, None without pools.
        """
        if not self.pooled:
            return None
        pool = self._judge(rewards)
        index = self._index.get(id(task))
        if pool != "normal" and index is not None and index not in self._retired:
            self._retired[index] = pool
            self.evicted[pool] += 1
            self._warn_if_ended()
        return self.pool_of(task)

    def pool_of(self, task: Any) -> str | None:
        """The pool that `task` is in; None without pools."""
        return self._retired.get(self._index.get(id(task)), "normal") if self.pooled else None

    def counts(self) -> dict[str, int]:
        """Tasks in each pool."""
        retired = Counter(self._retired.values())
        return {"easy": retired["easy"], "normal": len(self.tasks) - len(self._retired), "hard": retired["hard"]}

    def describe(self) -> str:
        counts = self.counts()
        return f"{counts['easy']} easy, {counts['hard']} hard of {len(self.tasks)}"

    def retired_to(self, pool: str) -> list[dict[str, Any]]:
        """The tasks of a pool as plain data, to be saved."""
        return [
            pools.entry(self.env_name, self.tasks[i]) for i, where in sorted(self._retired.items()) if where == pool
        ]

    def _judge(self, rewards: Sequence[float]) -> str:
        easy, hard = self.config.easy_threshold, self.config.hard_threshold
        if easy is not None and all(reward >= easy for reward in rewards):
            return "easy"
        return "hard" if hard is not None and all(reward <= hard for reward in rewards) else "normal"

    def _warn_if_ended(self) -> None:
        if self.ended:
            log.warning(
                "env %s has no task left (%s) and ends; buffer.refill=true samples them again",
                self.env_name,
                self.describe(),
            )

    def _load(self, folder: Path) -> None:
        """Retire the tasks that `folder`'s pools hold, less a share of each."""
        indexes: dict[str, list[int]] = {}
        for index, task in enumerate(self.tasks):
            known = pools.fingerprint(pools.entry(self.env_name, task), self.config.hash_keys)
            indexes.setdefault(known, []).append(index)
        for pool in pools.RETIRED:
            entries = [entry for entry in pools.read(folder, pool) if entry["env"] == self.env_name]
            same = [indexes.get(pools.fingerprint(entry, self.config.hash_keys)) for entry in entries]
            found = [
                waiting.pop(0) for waiting in same if waiting
            ]  # of tasks that look the same, as many as there were
            lifted = set(self.random.sample(found, round(getattr(self.config, f"{pool}_fraction") * len(found))))
            self._retired |= {index: pool for index in found if index not in lifted}
            log.log(
                logging.WARNING if entries and not found else logging.INFO,
                "env %s: %d of the %d %s tasks in %s are among its own; %d of them are sampled again",
                self.env_name,
                len(found),
                len(entries),
                pool,
                folder,
                len(lifted),
            )
        self._warn_if_ended()


def warn_of_strangers(load_from: str, env_names: Iterable[str]) -> None:
    """Warn if the tasks of the pools in `load_from` are all of envs with other names."""
    folder = Path(load_from).expanduser()
    saved = {entry["env"] for pool in pools.RETIRED for entry in pools.read(folder, pool)}
    if saved and not saved.intersection(env_names):
        warnings.warn(
            f"buffer.load_from={load_from!r}: its tasks are those of {', '.join(sorted(saved))}, and this run has only "
            f"{', '.join(sorted(env_names))}: none is retired. +env@envs.<name>=<option> gives an env the name it had",
            stacklevel=2,
        )


def check_hash_keys(hash_keys: list[str] | None, task: Any) -> None:
    """Raise ConfigError for a key that the task's data does not have."""
    if hash_keys is not None and not hash_keys:
        raise ConfigError("buffer.hash_keys is empty: name fields of the task's data, or null for all of them")
    for key in hash_keys or ():
        if key not in (known := type(task.data).model_fields):
            raise ConfigError(
                f"buffer.hash_keys: {key!r} is no field of {type(task.data).__name__}; it has {', '.join(known)}"
            )
