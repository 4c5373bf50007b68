"""The difficulty pools' files in a checkpoint: `easy_examples.jsonl` and `hard_examples.jsonl`, one task per line."""

import hashlib
import json
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prl.errors import ConfigError

if TYPE_CHECKING:
    from verifiers.v1.task import Task

RETIRED = ("easy", "hard")
"""The pools that are not sampled from; the third pool, `normal`, holds all other tasks."""


def pool_path(folder: Path | str, pool: str) -> Path:
    return Path(folder).expanduser() / f"{pool}_examples.jsonl"


def entry(env_name: str, task: "Task") -> dict[str, Any]:
    """The line of a task: its env, verifiers' key for it, and its data."""
    return {"env": env_name, "key": task.key, "task": task.data.model_dump(mode="json", exclude_none=True)}


def fingerprint(entry: dict[str, Any], hash_keys: list[str] | None) -> str:
    """A hash of the fields `hash_keys` of the task's data; null = verifiers' own key, which hashes all of them."""
    if hash_keys is None:
        return entry["key"]
    chosen = json.dumps([entry["task"].get(key) for key in hash_keys], sort_keys=True)
    return hashlib.sha256(chosen.encode()).hexdigest()


def write(folder: Path, entries: dict[str, list[dict[str, Any]]]) -> None:
    """Write both pools into `folder`; `entries` are their lines by pool."""
    from prl.wire.files import write_atomically  # composing a config must not import msgspec

    for pool in RETIRED:
        lines = [json.dumps(line, ensure_ascii=False) + "\n" for line in entries[pool]]
        write_atomically(pool_path(folder, pool), "".join(lines).encode())


def read(folder: str, pool: str, where: str) -> list[dict[str, Any]]:
    """The lines of a pool. Raises ConfigError for a line that does not describe a task; `where` is the buffer's key."""
    entries = []
    path = pool_path(folder, pool)
    for number, line in enumerate(path.read_bytes().splitlines(), 1):  # text would also break at U+2028
        try:
            match json.loads(line):
                case {"env": str(), "key": str(), "task": dict()} as found:
                    entries.append(found)
                case _:
                    raise ValueError("it must have env and key, which are strings, and task, an object")
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{where}.load_from: line {number} of {path} does not describe a task: {error}"
            ) from error
    return entries


def warn_of_other_envs(load_from: str, env_names: Iterable[str]) -> None:
    """Warn if none of the tasks saved in `load_from` belongs to an env of this run."""
    saved = {entry["env"] for pool in RETIRED for entry in read(load_from, pool, "buffer")}
    if saved and not saved.intersection(env_names):
        warnings.warn(
            f"buffer.load_from={load_from!r}: its tasks belong to the envs {', '.join(sorted(saved))}, and this run "
            f"has only {', '.join(sorted(env_names))}: none is retired. +env@envs.<name>=<option> gives an env its old "
            "name",
            stacklevel=2,
        )
