"""What lies in a run directory, which may come from a stranger."""

import os
from collections.abc import Collection
from pathlib import Path

from prl.errors import ConfigError

PLACES = ("", "logs", "rollouts", "tokens", "batches", "weights", "checkpoints", "events", ".hydra")
"""The folders of a run directory, itself among them, in which a run writes, or removes, files under known names."""


def check_entries(run_dir: Path, files: Collection[str]) -> None:
    """Raise ConfigError for what a run directory has in the place of a file of its own.

    That is a symbolic link, which leads to somebody's own files (the directory itself may be one, to another disk), a
    FIFO or a device, which nobody may ever be done with, or a directory under one of the names `files`.
    """
    for place in PLACES:
        for entry in entries(run_dir / place):
            if entry.is_symlink():
                raise ConfigError(
                    f"{entry.path} is a symbolic link to {os.readlink(entry.path)!r}, where a run would write or "
                    "remove files: remove the link, or name another run.dir"
                )
            if not entry.is_file() and (not entry.is_dir() or (not place and entry.name in files)):
                raise ConfigError(f"{entry.path} is no regular file: remove it, or name another run.dir")


def has_config(run_dir: Path) -> bool:
    """Whether a run has got as far as its config: a start that died may have left an empty one, or none."""
    path = run_dir / "config.yaml"
    return path.exists() and path.stat().st_size > 0


def entries(folder: Path) -> list[os.DirEntry[str]]:
    """What is in a folder, by name; nothing where it is none, is not there or cannot be read."""
    try:
        return sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return []
