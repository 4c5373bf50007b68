"""What this machine can hold: sizes that no run could start with are refused before one tries."""

import contextlib
import math
import os
from pathlib import Path

from prl.config.model_folder import local_folder, tensors_of
from prl.config.schema import ModelConfig
from prl.errors import ConfigError

RANKS_PER_CORE = 8
"""Trainer ranks on each core of a machine without a GPU, at most: with more they only wait for each other."""
BYTES_PER_PARAMETER = 8
"""What a rank keeps of each parameter at least: weight and gradient, 4 bytes each. AdamW keeps 8 more."""
GIB = 1 << 30


def memory_bytes() -> int | None:
    """Memory that this process may have, of the machine or of its control group; None where it does not say."""
    found = []
    with contextlib.suppress(OSError, ValueError, AttributeError):
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with contextlib.suppress(OSError, ValueError):  # "max" where there is no limit
        found.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(found, default=None)


def check_memory(gib: float, key: str) -> None:
    """Raise ConfigError where `gib` GiB are more than the machine has."""
    total = memory_bytes()
    if total is not None and gib * GIB > total:
        raise ConfigError(f"{key}={gib}: this machine has {total / GIB:.1f} GiB of memory")


def check_ranks(ranks: int, model: ModelConfig) -> None:
    """Raise ConfigError for more trainer ranks than a machine without a GPU can run."""
    cores, total = os.cpu_count() or 1, memory_bytes()
    if ranks > RANKS_PER_CORE * cores:
        raise ConfigError(
            f"trainer.num_processes={ranks}: this machine has {cores} cores; more than {RANKS_PER_CORE} ranks for each "
            "would only wait for each other"
        )
    folder = local_folder(model.path)
    if folder is None or total is None:
        return
    parameters = sum(math.prod(shape) for _, shape in tensors_of(folder, f"model.path={model.path!r}"))
    if ranks * parameters * BYTES_PER_PARAMETER > total:
        raise ConfigError(
            f"trainer.num_processes={ranks}: the ranks would keep {ranks * parameters * BYTES_PER_PARAMETER / GIB:.1f} "
            f"GiB of weights and gradients of model.path={model.path!r}, and this machine has {total / GIB:.1f} GiB"
        )


def check_run_dir(path: str) -> None:
    """Raise ConfigError for a run directory that cannot be made or written to."""
    where = f"run.dir={path[:200]!r}"
    if not path.strip() or not path.isprintable():
        raise ConfigError(f"{where} is no directory's path: leave it out for outputs/<run.name>")
    folder = Path(path).expanduser()
    try:
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{where} is a file: give a directory that does not exist yet")
        nearest = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    except OSError as error:  # a name that is too long
        raise ConfigError(f"{where} cannot be made: {error.strerror or error}") from error
    if not nearest.is_dir():
        raise ConfigError(f"{where} cannot be made: {nearest} is a file")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"{where} cannot be written to: {nearest} is read-only for this user")
