"""What earlier processes have found out of files, where finding it out takes imports of seconds."""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import msgspec

T = TypeVar("T")
LIBRARIES = ("torch", "transformers")
"""What is found depends on their versions."""


def remembered(parts: Iterable[bytes], find: Callable[[], T], kind: type[T]) -> T:
    """Return what `find` returns, or has returned in an earlier process for the same `parts` and libraries.

    What it raises is not remembered. A cache that cannot be read or written is done without.

    Args:
        parts: All that the answer depends on.
        find: Finds the answer.
        kind: Its type, which JSON can hold.
    """
    digest = hashlib.sha256()
    for part in (*parts, *(version(name).encode() for name in LIBRARIES)):
        digest.update(len(part).to_bytes(8, "big") + part)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "prl"
    file = cache / "found" / f"{digest.hexdigest()}.json"
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(file.read_bytes(), type=kind)
    found = find()
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_suffix(f".{os.getpid()}")
        draft.write_bytes(msgspec.json.encode(found))
        draft.replace(file)
    return found
