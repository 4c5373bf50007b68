"""What this machine can hold: sizes that no run could start with are refused before one tries."""

import contextlib
import math
import os
import shutil
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from prl.config.hardware import GIB, assumed
from prl.config.model_folder import has_weights, local_folder, read_config, tensors_of
from prl.config.schema import InferenceConfig, ModelConfig
from prl.errors import ConfigError

RANKS_PER_CORE = 8
"""Trainer ranks, or model servers, on each core without a GPU, at most: more would only wait for each other."""
BYTES_PER_PARAMETER = 8
"""What a copy of the model takes for each parameter at least: weight and gradient, 4 bytes each. AdamW: 8 more."""
ACTIVATIONS = 8
"""Vectors of the model's width that each layer keeps of a token at least, for the backward pass."""


def cores() -> int:
    """CPU cores that this process may use."""
    if (given := assumed().cores) is not None:
        return given
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_threads(threads: int | None, key: str) -> None:
    """Raise ConfigError for more threads than cores: they would only wait for each other."""
    if threads is not None and threads > cores():
        raise ConfigError(f"{key}={threads}: this command may use {cores()} cores; leave it out to have it follow them")


def memory_bytes() -> int | None:
    """Memory that this process may have, of the machine or of its control group; None where it does not say."""
    if (given := assumed().ram_gb) is not None:
        return None if math.isinf(given) else int(given * GIB)
    found = []
    with contextlib.suppress(OSError, ValueError, AttributeError):
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with contextlib.suppress(OSError, ValueError):  # "max" where there is no limit
        found.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(found, default=None)


def check_memory(gib: float, what: str) -> None:
    """Raise ConfigError where `gib` GiB are more than the machine has; `what` needs them, and names the key."""
    total = memory_bytes()
    if total is not None and gib * GIB > total:
        raise ConfigError(f"{what}: that takes {gib:.4g} GiB, and this machine has {total / GIB:.1f} GiB of memory")


def check_row(trainer: Any, model: ModelConfig) -> None:
    """Raise ConfigError for rows of `trainer.seq_len` tokens whose activations no memory of the machine holds."""
    folder = local_folder(model.path)
    config = {} if folder is None else read_config(folder, f"model.path={model.path!r}")
    width, depth = config.get("hidden_size"), config.get("num_hidden_layers")
    if isinstance(width, int) and isinstance(depth, int):
        kept = 1 if trainer.gradient_checkpointing == "full" else ACTIVATIONS
        check_memory(trainer.seq_len * width * depth * 4 * kept / GIB, f"trainer.seq_len={trainer.seq_len} in one row")


def check_sharding(trainer: Any, device: str) -> None:
    """Raise ConfigError for settings of the trainer's ranks and layers that do not go together on `device`."""
    ranks, size = trainer.num_processes, trainer.shard_size
    if size is not None and ranks % size:
        raise ConfigError(
            f"trainer.shard_size={size} does not divide trainer.num_processes={ranks}: ranks share copies of the "
            "weights in groups of this size"
        )
    if trainer.cpu_offload and device != "cuda":
        raise ConfigError("trainer.cpu_offload=true: the trainer runs in host memory as it is, without a GPU")
    if not trainer.compile:
        return
    if trainer.gradient_checkpointing == "selective":
        raise ConfigError(
            "trainer.gradient_checkpointing=selective with trainer.compile=true: a compiled layer does not show which "
            "of its products to keep; choose full or none"
        )
    compiler = os.environ.get("CXX", "g++")  # as torch chooses it
    if device == "cpu" and shutil.which(compiler) is None:
        raise ConfigError(f"trainer.compile=true needs a C++ compiler, and {compiler} is not installed")


def check_compiler() -> None:
    """Raise ConfigError where Triton can compile nothing: on a GPU engine and trainer begin with kernels of its.

    Nothing is said of a machine that is not this one.
    """
    if assumed().gpus is not None:
        return
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")  # as Triton chooses it
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # likewise
    header = Path(sysconfig.get_paths(scheme)["include"]) / "Python.h"
    if not compiler or shutil.which(compiler) is None:
        raise ConfigError(
            f"a GPU needs a C compiler, for Triton's kernels: {compiler or 'gcc'} is no program here (CC=<one>, "
            "without options)"
        )
    if not header.exists():
        raise ConfigError(f"a GPU needs Python's headers, for Triton's kernels, and {header} is not there: python3-dev")


def check_ranks(trainer: Any, model: ModelConfig) -> None:
    """Raise ConfigError for more trainer ranks than a machine without a GPU can run."""
    ranks = trainer.num_processes
    copies = 1 if trainer.shard_size is None else ranks // trainer.shard_size
    if ranks > RANKS_PER_CORE * cores():
        raise ConfigError(
            f"trainer.num_processes={ranks}: this machine has {cores()} cores; more than {RANKS_PER_CORE} ranks for "
            "each would only wait for each other"
        )
    check_memory(
        copies * (parameters_of(model) or 0) * BYTES_PER_PARAMETER / GIB,
        f"trainer.num_processes={ranks} with {copies} times the weights and gradients of model.path={model.path!r}",
    )


def check_servers(inference: InferenceConfig, key: str) -> None:
    """Raise ConfigError for more model servers than a machine without a GPU can run, and for what is for GPUs alone."""
    servers, spanned = inference.servers, inference.tensor_parallel_size
    if spanned > 1:
        raise ConfigError(
            f"{key}.tensor_parallel_size={spanned} is for GPUs, and the engine runs on a CPU: {key}.servers starts "
            "several there"
        )
    if servers > RANKS_PER_CORE * cores():
        raise ConfigError(
            f"{key}.servers={servers}: this machine has {cores()} cores; more than {RANKS_PER_CORE} servers for each "
            "would only wait for each other"
        )


def parameters_of(model: ModelConfig) -> int | None:
    """Parameters of a model folder, from its weights' headers; None for a name on the hub, or without weights."""
    folder = local_folder(model.path)
    if folder is None or not has_weights(folder):
        return None
    return sum(math.prod(shape) for _, shape in tensors_of(folder, f"model.path={model.path!r}"))


def check_run_dir(path: str, key: str = "run.dir") -> None:
    """Raise ConfigError for a run directory that cannot be made or written to; `key` names it."""
    where = f"{key}={path[:200]!r}"
    if not path.strip() or not path.isprintable():
        raise ConfigError(f"{where} is no directory's path: leave it out for outputs/<run.name>")
    folder = Path(path).expanduser()
    try:
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{where} is a file: give a directory that does not exist yet")
        nearest = next(each for each in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(each))
    except OSError as error:  # a name that is too long
        raise ConfigError(f"{where} cannot be made: {error.strerror or error}") from error
    if nearest.is_symlink() and not nearest.exists():
        raise ConfigError(
            f"{where} cannot be made: {nearest} is a link to {os.readlink(nearest)!r}, which leads nowhere: mount that "
            f"disk, or name another {key}"
        )
    if not nearest.is_dir():
        raise ConfigError(f"{where} cannot be made: {nearest} is a file")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"{where} cannot be written to: {nearest} is read-only for this user")
    if nearest != folder.absolute():
        try:  # /proc, say, tells root that it may be written to
            os.rmdir(tempfile.mkdtemp(prefix=".prl-", dir=nearest))
        except OSError as error:
            said = f"{nearest} takes no new directory ({error.strerror})"
            raise ConfigError(f"{where} cannot be made: {said}: name another {key}") from error
