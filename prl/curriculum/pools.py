"""prl's own curriculum: seeded passes over the tasks, with difficulty pools for those that are too easy or too hard."""

import hashlib
import json
import logging
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Le

from prl.base.errors import UNREADABLE, ConfigError, PrlError
from prl.curriculum.base import Context, Curriculum
from prl.rollouts.rewards import at_least, at_most

if TYPE_CHECKING:
    from verifiers.v1.task import Task

log = logging.getLogger(__name__)

RETIRED = ("easy", "hard")
"""The pools that are not sampled from; the third pool, `normal`, holds all other tasks."""


@dataclass(kw_only=True, eq=False)
class TaskCurriculum(Curriculum):
    """The tasks of one env in passes: no task comes twice before all have come once.

    With thresholds, or with pools loaded from a checkpoint, each task is in one of three pools, `normal`, `easy` and
    `hard`, and only normal tasks are handed out. One group decides. A retired task stays retired, whatever its groups
    still in flight show later; only `refill` brings it back, or a run that goes on without pools. So an env that has
    ended does not begin again.
    """

    shuffle: bool = True
    """Reorder the tasks before each epoch (seeded)."""
    easy_threshold: float | None = None
    """Mean reward of a group from which its task moves into the easy pool and is not sampled again. null = never."""
    hard_threshold: float | None = None
    """Mean reward of a group up to which its task moves into the hard pool and is not sampled again. null = never."""
    refill: bool = False
    """When an env has no normal task left, sample all tasks again. False = it ends; with the last env the run ends."""
    load_from: str | None = None
    """A checkpoint folder with `easy_examples.jsonl` and `hard_examples.jsonl` for the pools; null = empty pools."""
    hash_keys: list[str] | None = None
    """Fields of a task's data that identify it in pools of an earlier run, or of this run before a resume. null =
    verifiers' `task.key`: all fields."""
    easy_fraction: Annotated[float, Ge(0), Le(1)] = 0.0
    """Share of the easy tasks of `load_from` to sample again, drawn at random (seeded). With `run.resume`: of the run's
    own pool, once. With `refresh_every`: of the pool at that time."""
    hard_fraction: Annotated[float, Ge(0), Le(1)] = 0.0
    """The same for the hard tasks."""
    refresh_every: Annotated[int, Ge(1)] | None = None
    """Steps after which `easy_fraction` and `hard_fraction` of the pools are sampled again, each time; null = never."""

    def check(self, where: str) -> None:
        super().check(where)
        easy, hard = self.easy_threshold, self.hard_threshold
        if easy is not None and hard is not None and not easy > hard:
            raise ConfigError(f"{where}.easy_threshold={easy} must be above {where}.hard_threshold={hard}")
        if self.refresh_every is not None and not self.easy_fraction and not self.hard_fraction:
            raise ConfigError(f"{where}.refresh_every={self.refresh_every}: set {where}.easy_fraction or hard_fraction")

    def load(self, tasks: "Sequence[Task]", *, seed: int, env_name: str) -> None:
        self.tasks = tasks
        self.env_name = env_name
        self.random = random.Random(seed)
        self.passes = 0
        self._refreshed = 1
        """The step at which the last tasks came back by `refresh_every`, or the first."""
        self._evicted: Counter[str] = Counter()
        self._order: list[int] = []
        """Indices of the tasks left in this pass, the next one last."""
        self._retired: dict[int, str] = {}
        """The pool of each retired task, by index."""
        self._hashes: dict[int, str] = {}
        """Hashes of retired tasks, by index: `state_dict` is asked at every step."""
        self._index = {task: index for index, task in enumerate(tasks)}  # verifiers' tasks compare by identity
        if self.hash_keys is not None:
            known = type(tasks[0].data).model_fields
            unknown = ", ".join(key for key in self.hash_keys if key not in known)
            if not self.hash_keys or unknown:
                raise ConfigError(
                    f"{self.where}.hash_keys: tasks of env {env_name!r} have no field {unknown or 'of no name'!r}: "
                    f"name some of {', '.join(known)}"
                )
        if self.load_from is not None:
            self._load_pools(self.load_from)

    @property
    def pooled(self) -> bool:
        return (self.easy_threshold, self.hard_threshold, self.load_from) != (None, None, None)

    @property
    def reads_rewards(self) -> bool:
        learns = type(self).update is not TaskCurriculum.update
        return self.online_difficulty_filtering or learns or (self.easy_threshold, self.hard_threshold) != (None, None)

    @property
    def ended(self) -> bool:
        return len(self._retired) == len(self.tasks) and not self.refill

    def next(self, context: Context | None = None) -> "Task":
        if self.ended:
            raise PrlError(f"env {self.env_name!r} has no task left: {self.describe()}")
        if context is not None and self.refresh_every and context.step - self._refreshed >= self.refresh_every:
            self._refreshed = context.step
            self._release([self.easy_fraction, self.hard_fraction])
        if len(self._retired) == len(self.tasks):
            log.info("env %s: no normal task left (%s); all are sampled again", self.env_name, self.describe())
            self._retired, self._order = {}, []
        while True:
            if not self._order:
                self.passes += 1
                self._order = [index for index in range(len(self.tasks)) if index not in self._retired]
                if self.shuffle:
                    self.random.shuffle(self._order)
                # Taken from the end, which costs nothing however many tasks there are.
                self._order.reverse()
            # A group in flight may have retired a task since this pass was drawn up.
            if (index := self._order.pop()) not in self._retired:
                return self.tasks[index]

    def update(self, task: "Task", *rewards: float) -> str | None:
        """Move a task into a pool, as `Curriculum.update` says. In a game all trained agents must
        be past the threshold."""
        pool, index = self._judge(rewards), self._index.get(task)
        # One group decides: those still in flight when a task retires change nothing.
        if pool is not None and index is not None and index not in self._retired:
            self._retired[index] = pool
            self._evicted[pool] += 1
            self._warn_if_ended()
        return self.pool_of(task)

    def returns(self, task: "Task") -> bool:
        return self.refill or self.pool_of(task) in (None, "normal")

    def pool_of(self, task: "Task") -> str | None:
        return self._retired.get(self._index.get(task, -1), "normal") if self.pooled else None

    def counts(self) -> dict[str, int]:
        retired = Counter(self._retired.values())
        return {"easy": retired["easy"], "normal": len(self.tasks) - len(self._retired), "hard": retired["hard"]}

    def describe(self) -> str:
        return "{easy} easy, {hard} hard of {total}".format(**self.counts(), total=len(self.tasks))

    def retired_to(self, pool: str) -> list[dict[str, Any]]:
        return [
            entry_of(self.env_name, self.tasks[index])
            for index, retired_to in sorted(self._retired.items())
            if retired_to == pool
        ]

    def take_evicted(self) -> Counter[str]:
        evicted, self._evicted = self._evicted, Counter()
        return evicted

    def state_dict(self) -> dict[str, Any]:
        """Return the pass that has begun, the numbers of its remaining tasks, the hashes of retired ones, and
        the generator."""
        for index in self._retired.keys() - self._hashes.keys():
            self._hashes[index] = fingerprint(entry_of(self.env_name, self.tasks[index]), self.hash_keys)
        return {
            "tasks": len(self.tasks),
            "pooled": self.pooled,
            "passes": self.passes,
            "order": list(self._order),
            "retired": [[self._hashes[index], pool] for index, pool in self._retired.items()],
            "hash_keys": self.hash_keys,
            "fractions": [self.easy_fraction, self.hard_fraction],
            "evicted": dict(self._evicted),
            "refreshed": self._refreshed,
            "random": self.random.getstate(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["tasks"] != len(self.tasks):
            raise ValueError(f"it is of {state['tasks']} tasks, and there are {len(self.tasks)}")
        self.passes, self._order = state["passes"], list(state["order"])
        self._refreshed = state.get("refreshed", 1)  # earlier checkpoints have none
        # msgpack has made lists of the tuples that `setstate` wants.
        version, internal, gauss = state["random"]
        self.random.setstate((version, tuple(internal), gauss))
        if self.pooled and state["pooled"]:  # else they are off now, or `load_from` is new
            fractions = [self.easy_fraction, self.hard_fraction]
            drawn = fractions == state["fractions"]  # for `load_from`, or as the run went on before
            self._retire(state["retired"], state["hash_keys"], [0.0, 0.0] if drawn else fractions, "the checkpoint")
            self._evicted = Counter(state["evicted"])

    def _release(self, shares: Sequence[float]) -> None:
        """Sample these shares of the easy and of the hard tasks again, drawn at random."""
        for pool, share in zip(RETIRED, shares, strict=True):
            # In the order in which they retired, so that the seed decides which ones come back.
            indices = [index for index, retired_to in self._retired.items() if retired_to == pool]
            released = self.random.sample(indices, round(share * len(indices)))
            self._retired = {index: pool for index, pool in self._retired.items() if index not in set(released)}
            log.info("env %s: %d of %d %s tasks are sampled again", self.env_name, len(released), len(indices), pool)

    def _judge(self, rewards: Sequence[float]) -> str | None:
        """The pool to which a group's rewards retire its task, if any."""
        # In a game the weakest side has to be past the threshold for easy, the strongest for hard.
        if self.easy_threshold is not None and at_least(min(rewards), self.easy_threshold):
            return "easy"
        return "hard" if self.hard_threshold is not None and at_most(max(rewards), self.hard_threshold) else None

    def _warn_if_ended(self) -> None:
        if self.ended:
            log.warning(
                "env %s has no task left (%s) and ends; %s.refill=true samples them again",
                self.env_name,
                self.describe(),
                self.where,
            )

    def _load_pools(self, folder: str) -> None:
        """Retire the tasks that the pools in `folder` hold, less the shares that are sampled again."""
        certain = [key for key in self.hash_keys or () if all(getattr(t.data, key) is not None for t in self.tasks)]
        try:
            entries = [(entry, pool) for pool in RETIRED for entry in read_pool(folder, pool, certain)]
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self.where}.load_from={folder!r} is no folder checkpoints/step_<n> of a run with difficulty pools: "
                f"{error}"
            ) from error
        own = [(entry, pool) for entry, pool in entries if entry["env"] == self.env_name]
        saved = [[fingerprint(entry, self.hash_keys), pool] for entry, pool in own]
        if entries and not saved:
            log.warning(
                "env %s: no task in %s.load_from=%s is of an env of that name", self.env_name, self.where, folder
            )
        self._retire(saved, self.hash_keys, [self.easy_fraction, self.hard_fraction], folder)

    def _retire(self, saved: list[list[str]], hash_keys: list[str] | None, shares: list[float], source: str) -> None:
        """Retire the tasks that are saved by hash and pool, less the shares of both pools that are sampled again."""
        own: dict[str, list[int]] = {}
        for index, task in enumerate(self.tasks):
            # By content, not by place: another run, or another version of the data, has other numbers.
            own.setdefault(fingerprint(entry_of(self.env_name, task), hash_keys), []).append(index)
        self._retired = {}
        for pool in RETIRED:
            hashes = [task_hash for task_hash, retired_to in saved if retired_to == pool]
            candidates = [own.get(task_hash) for task_hash in hashes]
            indices = [equal.pop(0) for equal in candidates if equal]  # of equal tasks, as many as were saved
            self._retired |= dict.fromkeys(indices, pool)
            level = logging.WARNING if hashes and not indices else logging.INFO
            counts = f"{len(indices)} of the {len(hashes)} {pool} tasks in {source} are among its own"
            log.log(level, "env %s: %s", self.env_name, counts)
        self._release(shares)
        self._warn_if_ended()


def pool_path(folder: Path | str, pool: str) -> Path:
    return Path(folder).expanduser() / f"{pool}_examples.jsonl"


def entry_of(env_name: str, task: "Task") -> dict[str, Any]:
    """The line of a task: its env, verifiers' key for it, and its data."""
    return {"env": env_name, "key": task.key, "task": task.data.model_dump(mode="json", exclude_none=True)}


def fingerprint(entry: dict[str, Any], hash_keys: list[str] | None) -> str:
    """A hash of the fields `hash_keys` of the task's data; null = verifiers' own key, which hashes all of them."""
    if hash_keys is None:
        return entry["key"]
    chosen = [entry["task"].get(key) for key in hash_keys]
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()


def write_pools(folder: Path, entries: dict[str, list[dict[str, Any]]]) -> None:
    """Write both pools into `folder`; `entries` are their lines by pool."""
    from prl.base.files import write_atomically  # composing a config must not import msgspec

    for pool in RETIRED:
        lines = [json.dumps(line, ensure_ascii=False) + "\n" for line in entries[pool]]
        write_atomically(pool_path(folder, pool), "".join(lines).encode())


def read_pool(folder: str, pool: str, fields: Sequence[str]) -> list[dict[str, Any]]:
    """Return the lines of a pool; raise ValueError naming file, line and field of one that lacks `fields` of a task."""
    file, entries = pool_path(folder, pool), []
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):  # text would also break at U+2028
        try:
            entry = json.loads(line)
            for field in fields:
                entry["task"][field]
            entries.append({field: entry[field] for field in ("env", "key", "task")})
        except (TypeError, KeyError, *UNREADABLE) as error:
            lacking = f"has no field {error}" if isinstance(error, KeyError) else f"is no task of a pool: {error}"
            raise ValueError(f"{file}, line {number} {lacking}") from error
    return entries
