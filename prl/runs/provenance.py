"""The origin of a run: `provenance.json` in its directory, and the uncommitted changes in `provenance.diff`.

Nothing that looks like a secret is recorded (`prl/base/masking.py`), and nothing of the environment.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import struct
import subprocess
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import prl
from prl.base.errors import ConfigError
from prl.base.files import write_atomically
from prl.base.masking import masked, masked_text
from prl.config.hardware import instruction_set, listed

MAX_DIFF = 1_000_000
"""Longest `provenance.diff`, bytes."""
HASHED_WHOLE = 2 * 1024**3
"""Weights up to this many bytes are hashed whole; of larger ones the files' sizes and headers are."""
GIT = ("git", "-c", "core.fsmonitor=false")  # else git may start a daemon that outlives the run


def write_provenance(
    run_dir: Path,
    seed: int,
    threads: Mapping[str, int | None],
    models: Mapping[str, str],
    tasks: Mapping[str, Mapping[str, Iterable[str]]],
) -> None:
    """Write `provenance.json`, and `provenance.diff` where prl runs from a checkout with changes.

    Args:
        run_dir: The run's directory.
        seed: The run's seed.
        threads: The threads of each process that the run starts, by its kind.
        models: The paths of the models that the run loads, by their config keys.
        tasks: The hashes of each env's tasks, by env and by `train` or `eval`.
    """
    commit, diff = checkout(Path(prl.__file__).resolve().parents[1])
    if diff:
        write_atomically(run_dir / "provenance.diff", masked_text(diff).encode()[:MAX_DIFF])
    installed = packages()
    record = {
        "command": command_line(sys.orig_argv),
        "cwd": str(Path.cwd()),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "prl": installed.get("prl"),  # None where it runs from its source alone
        "git": commit,
        "python": platform.python_version(),
        "packages": installed,
        "platform": platform.platform(),
        "host": platform.node(),
        "cpus": os.cpu_count(),
        "instruction_set": instruction_set(),
        "threads": dict(threads),
        "gpus": gpus(),
        "seed": seed,
        "models": {key: model_hash(path) for key, path in models.items()},
        "data": {env: {split: data_hash(hashes) for split, hashes in of.items()} for env, of in tasks.items()},
    }
    text = json.dumps(record, indent=2, ensure_ascii=False)  # in a locale without them, bytes of names are surrogates
    write_atomically(run_dir / "provenance.json", text.encode(errors="surrogateescape") + b"\n")


def checkout(folder: Path) -> tuple[dict[str, Any] | None, str]:
    """The commit that `folder` is at, and how its tracked files differ from it; None where it is no git checkout."""

    def git(*command: str) -> str:
        """Return what git prints; nothing where it is missing, fails or takes longer than ten seconds."""
        line = [*GIT, "-C", str(folder), *command]
        try:
            done = subprocess.run(line, capture_output=True, encoding="utf-8", errors="replace", timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout if done.returncode == 0 else ""

    commit = git("rev-parse", "HEAD").strip() if (folder / ".git").exists() else ""
    if not commit:
        return None, ""
    changed = git("status", "--porcelain").splitlines()
    # Programs that a user's git config names for diffs are not run, nor their colours written.
    diff = git("diff", "HEAD", "--no-ext-diff", "--no-textconv", "--no-color")
    untracked = [line[3:] for line in changed if line.startswith("??")]
    result = {"commit": commit, "changed": bool(changed), "untracked": untracked[:100]}
    return result | {"diff_cut": len(diff.encode()) > MAX_DIFF}, diff


def gpus() -> list[str]:
    """Names of this machine's GPUs; none where its driver hangs, which a run on CPUs need not mind."""
    with contextlib.suppress(ConfigError):
        return [gpu.name for gpu in listed()]
    return []


@functools.cache
def packages() -> dict[str, str]:
    """The versions of all installed packages."""
    # A distribution parses its file of metadata again for each attribute: three times .3 s, while the run waits.
    found = [each.metadata for each in importlib.metadata.distributions()]
    return {each["Name"]: each["Version"] for each in sorted(found, key=lambda each: each["Name"])}


# --- hashes -----------------------------------------------------------------------------------------------------------


def model_hash(path: str) -> dict[str, Any]:
    """A hash of a model's weights: of its `*.safetensors` files in the order of their names.

    Of large files it covers name, size and header (names, shapes and offsets of the tensors), not the numbers; `method`
    says which. A model of the hub has its name alone.
    """
    folder = Path(path).expanduser()
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not files:
        return {"path": path, "method": "name only"}
    whole = sum(file.stat().st_size for file in files) <= HASHED_WHOLE
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as weights:
            if whole:
                digest.update(hashlib.file_digest(weights, "sha256").digest())
            else:
                # A safetensors file begins with the length of its header, eight bytes.
                digest.update(weights.read(struct.unpack("<Q", weights.read(8))[0]))
    method = "files" if whole else "names, sizes and headers of the files"
    return {"path": path, "method": method, "sha256": digest.hexdigest()}


def data_hash(hashes: Iterable[str]) -> dict[str, Any]:
    """A hash of tasks, from theirs in their order."""
    listed = list(hashes)
    return {"tasks": len(listed), "sha256": hashlib.sha256("\n".join(listed).encode()).hexdigest()}


# --- what was asked for ----------------------------------------------------------------------------------------------


def command_line(arguments: list[str]) -> str:
    """Arguments as they are typed in a shell, without secrets."""
    return shlex.join(masked(arguments))
