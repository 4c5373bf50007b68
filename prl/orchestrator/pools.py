"""The files of the difficulty pools: `easy_examples.jsonl` and `hard_examples.jsonl` in a checkpoint, a JSON line a task."""

import hashlib
import json
from pathlib import Path
from typing import Any

from prl.errors import ConfigError

RETIRED = ("easy", "hard")


def file(folder: Path, pool: str) -> Path:
    return folder / f"{pool}_examples.jsonl"


def entry(env_name: str, task: Any) -> dict[str, Any]:
    """A task as a line: its env, verifiers' key for it, and its data."""
    return {"env": env_name, "key": task.key, "task": task.data.model_dump(mode="json", exclude_none=True)}


def fingerprint(entry: dict[str, Any], hash_keys: list[str] | None) -> str:
    """A hash of the fields `hash_keys` of the task's data; null = verifiers' own key, a hash of all of them."""
    if hash_keys is None:
        return entry["key"]
    chosen = json.dumps([entry["task"].get(key) for key in hash_keys], sort_keys=True)
    return hashlib.sha256(chosen.encode()).hexdigest()


def write(folder: Path, entries: dict[str, list[dict[str, Any]]]) -> None:
    """Write both pools into `folder`; `entries` are their lines by pool."""
    from prl.wire.files import write_atomically  # what composes a config should not wait for msgspec

    for pool in RETIRED:
        lines = [json.dumps(line, ensure_ascii=False) + "\n" for line in entries[pool]]
        write_atomically(file(folder, pool), "".join(lines).encode())


def read(folder: Path, pool: str) -> list[dict[str, Any]]:
    """The lines of a pool. Raises ConfigError for one that is none."""
    entries = []
    for number, line in enumerate(file(folder, pool).read_bytes().splitlines(), 1):  # a text would also break at U+2028
        try:
            found = json.loads(line)
            if not (
                isinstance(found["env"], str) and isinstance(found["key"], str) and isinstance(found["task"], dict)
            ):
                raise ValueError("env and key must be strings, and task an object")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigError(f"buffer.load_from: line {number} of {file(folder, pool)} is no task: {error}") from error
        entries.append(found)
    return entries
