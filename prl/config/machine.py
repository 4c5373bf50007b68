"""What this machine can hold: sizes that no run could start with are refused before one tries."""

import contextlib
import math
import os
from pathlib import Path
from typing import Any

from prl.config.hardware import GIB, assumed
from prl.config.model_folder import has_weights, local_folder, tensors_of
from prl.config.schema import ModelConfig
from prl.errors import ConfigError

BYTES_PER_PARAMETER = 8
"""What a copy of the model takes for each parameter at least: weight and gradient, 4 bytes each. AdamW: 8 more."""


def cores() -> int:
    """CPU cores that this process may use."""
    if (given := assumed().cores) is not None:
        return given
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int | None:
    """Memory that this process may have, of the machine or of its control group; None where it does not say."""
    if (given := assumed().ram_gb) is not None:
        return None if math.isinf(given) else int(given * GIB)
    result = []
    with contextlib.suppress(OSError, ValueError, AttributeError):
        result.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with contextlib.suppress(OSError, ValueError):  # "max" where there is no limit
        result.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(result, default=None)


def check_memory(gib: float, what: str) -> None:
    """Raise ConfigError where `gib` GiB are more than the machine has; `what` needs them, and names the key."""
    total = memory_bytes()
    if total is not None and gib * GIB > total:
        raise ConfigError(f"{what}: that takes {gib:.4g} GiB, and this machine has {total / GIB:.1f} GiB of memory")


def check_ranks(trainer: Any, model: ModelConfig) -> None:
    """Raise ConfigError for trainer ranks whose weights and gradients no memory of a machine without a GPU holds."""
    ranks = trainer.num_processes
    copies = 1 if trainer.shard_size is None else ranks / trainer.shard_size
    check_memory(
        copies * (parameters_of(model) or 0) * BYTES_PER_PARAMETER / GIB,
        f"trainer.num_processes={ranks} with the weights and gradients of model.path={model.path!r}",
    )


def parameters_of(model: ModelConfig) -> int | None:
    """Parameters of a model folder, from its weights' headers; None for a name on the hub, or without weights."""
    folder = local_folder(model.path)
    if folder is None or not has_weights(folder):
        return None
    return sum(math.prod(shape) for _, shape in tensors_of(folder, f"model.path={model.path!r}"))


def check_run_dir(path: str) -> None:
    """Raise ConfigError for a run directory that cannot be made or written to."""
    where = f"run.dir={path[:200]!r}"
    if not path.strip() or not path.isprintable():
        raise ConfigError(f"{where} is no directory's path: leave it out for outputs/<run.name>")
    folder = Path(path).expanduser().absolute()
    nearest = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"{where} cannot be made: {nearest} is no directory that can be written to")
