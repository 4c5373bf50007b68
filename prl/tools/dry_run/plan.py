"""A dry run: what a run would start, where, and what memory each of its processes would take there, from its config."""

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from rich import box
from rich.table import Table

from prl.algorithms.base import Algorithm
from prl.base.errors import ConfigError
from prl.base.terminal import Console
from prl.config import hardware
from prl.config.build import build, class_of
from prl.config.gpus import visible_gpus
from prl.config.hardware import CUDA_CONTEXT, GIB, MIB, gpu_memory_bytes
from prl.config.model_shape import ModelShape
from prl.config.schema import ModelConfig, TrainConfig
from prl.config.validate import hosts_teacher, places_processes
from prl.engines.base import Engine
from prl.launch import specs
from prl.launch.launcher import in_words
from prl.launch.local import resolve_model
from prl.tools.dry_run.memory import FLOAT, Pass, trainer_memory
from prl.tools.dry_run.shape import shape_of

RAM, GPU = "RAM", "GPU"
"""Devices: the memory of the machine, and its `GPU 0`, `GPU 1`, …"""
COMMAND, ENGINE, TRAINER = 0.3 * GIB, 0.6 * GIB, 300 * MIB
"""What a process has in memory beside its tensors: code and what it keeps of starting. Seen on a CPU."""
STATES = ("weights", "gradients", "optimiser", "reference")
"""Parts of a rank's memory that it keeps between steps, in host memory with `trainer.cpu_offload`."""
WIDTH = 160
"""Of a table in a file or a pipe, characters."""
REMEDY = (
    "lower what takes most (trainer.tokens_per_forward, engine.kv_cache_gb or engine.gpu_memory_utilization), "
    "set trainer.gradient_checkpointing=full, trainer.cpu_offload=true or model.lora.rank, or take a smaller model"
)


@dataclass
class Plan:
    """A prediction of what a run would take."""

    capacities: dict[str, float]
    """Bytes by device."""
    processes: dict[str, list[tuple[str, dict[str, float]]]] = field(default_factory=lambda: defaultdict(list))
    """By device, the processes that have memory there, and of each the bytes by part."""
    caches: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By the name of an engine, the tokens that its KV cache has room for, and those of the longest sequence."""

    def add(
        self, name: str, in_ram: dict[str, float], on_gpu: dict[str, float] | None = None, gpus: Iterable[int] = ()
    ) -> None:
        """Add a process with what it has in RAM, and on each of its GPUs."""
        self.processes[RAM].append((name, in_ram))
        for gpu in gpus:
            self.processes[f"{GPU} {gpu}"].append((name, (on_gpu or {}) | {"process": CUDA_CONTEXT}))

    def used(self, device: str) -> float:
        """Bytes of a device that all processes take together."""
        return sum(sum(parts.values()) for _, parts in self.processes[device])

    def problems(self) -> Iterator[str]:
        """Yield what does not fit, and what to change."""
        for name, (tokens, longest) in self.caches.items():
            if tokens < longest:
                yield (
                    f"the KV cache of {name} has room for {tokens:,} tokens, less than one sequence of {longest:,}: "
                    "raise engine.kv_cache_gb (on GPUs engine.gpu_memory_utilization or .tensor_parallel_size)"
                )
        for device, capacity in self.capacities.items():
            used = self.used(device)
            if used > capacity:
                yield f"{device} would hold {used / GIB:.1f} GiB, and it has {capacity / GIB:.1f} GiB: {REMEDY}"

    def table(self) -> Table:
        """Return what each process has where; processes and devices that have the same are in one row."""
        drawn = Table("device", "process", "GiB", "of it", box=box.SIMPLE_HEAD, pad_edge=False)
        by_content = groupby(self.capacities, lambda name: (self.capacities[name], self.processes[name]))
        for (capacity, processes), group in by_content:
            first, *others = group
            device = f"{first} to {others[-1].split()[-1]}" if others else first
            for (name, parts), alike in groupby(processes):
                large = sorted((value, part) for part, value in parts.items() if value >= GIB / 200)
                of_it = ", ".join(f"{part} {value / GIB:,.2f}" for value, part in reversed(large))
                drawn.add_row(device, f"{len(list(alike))} x {name}", f"{sum(parts.values()) / GIB:,.2f}", of_it)
            used = f"{self.used(first) / GIB:,.2f}"
            drawn.add_row(device, "all", used, f"at the peak of a step, of {capacity / GIB:,.2f}", end_section=True)
        return drawn


def dry_run(config: TrainConfig) -> None:
    """Print what a run of `config`, which is prepared, would take on the machine that is assumed.

    Starts no process, loads no weights and writes nothing. Raises ConfigError for what the machine has no room for,
    naming what to change; the table is printed before that.
    """
    planned = plan(config)
    Console(width=None if sys.stdout.isatty() else WIDTH).print(planned.table())
    for name, (tokens, longest) in planned.caches.items():
        print(f"KV cache of {name}: {tokens:,} tokens, {tokens / longest:,.1f} sequences of {longest:,}")
    if places_processes(config):
        print(f"asks Ray for {in_words(specs.bundles_of(config))}")
    for problem in planned.problems():
        raise ConfigError(problem)
    print("fits")


def plan(config: TrainConfig) -> Plan:
    """The processes of a run whose config has passed, on a machine as `prl.config.hardware` knows it."""
    placed, memory = specs.placement(config), gpu_memory_bytes()
    numbers = [int(name) if name.isdigit() else place for place, name in enumerate(visible_gpus())]
    gpus = {f"{GPU} {place}": memory[min(number, len(memory) - 1)] for place, number in enumerate(numbers)}
    planned = Plan({RAM: float(hardware.memory_bytes())} | gpus)
    planned.add("orchestrator", {"process": COMMAND})
    policy = shape_of(config.model, "model.path", lora=config.model.lora, trained=True)
    if not config.engine.urls:
        add_engine(planned, "engine", config.model, config.engine, policy, placed.engines)
    model, engine = config.teacher.model, config.teacher.engine
    if model is not None and hosts_teacher(config) and not engine.urls:
        shape = shape_of(model, "teacher.model.path", trained=False)
        add_engine(planned, "teacher", model, engine, shape, placed.teachers)
    for number, place in enumerate(placed.ranks):
        on_gpu, in_ram = memory_of_rank(config, policy, first=number == 0)
        planned.add("trainer", in_ram | {"process": TRAINER}, on_gpu, place)
    return planned


def add_engine(
    planned: Plan, name: str, model: ModelConfig, engine: Any, shape: ModelShape, places: list[tuple[int, ...]]
) -> None:
    """Add the servers of an engine, each with the GPUs of its place, or none. One in the run's process is left out."""
    if engine.in_process:
        return
    device = engine.device_type
    dtype = resolve_model(model, device).dtype
    least = min((value for name, value in planned.capacities.items() if name != RAM), default=0.0)
    gpu_bytes = least if device == "cuda" else None
    kind = class_of(engine, Engine, name)
    memory = kind.memory(engine, shape, dtype, gpu_bytes=gpu_bytes, updated=name == "engine")
    if memory.cache_tokens is not None:
        planned.caches[name] = (memory.cache_tokens, model.max_model_len)
    for place in places:
        planned.add(name, {"process": ENGINE} | ({} if place else memory.parts), memory.parts, place)


def memory_of_rank(
    config: TrainConfig, policy: ModelShape, *, first: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """Return what a rank of the trainer has on its GPU, and in the machine's memory, bytes by part.

    The latter at its peak: in a step, or before. The first of several ranks, or one with a GPU, loads all weights into
    RAM and hands each rank its part.
    """
    trainer, cuda = config.trainer, config.trainer.device_type == "cuda"
    shards = trainer.shard_size or trainer.num_processes
    parts = trainer_memory(policy, pass_of(config), references=count_references(config), shards=shards)
    in_ram = {name: value for name, value in parts.items() if not cuda or (trainer.cpu_offload and name in STATES)}
    on_gpu = {name: value for name, value in parts.items() if name not in in_ram}
    loads = first and (cuda or trainer.num_processes > 1)
    loading = {"loading": float(policy.parameters * FLOAT * loads)}
    return on_gpu, max(in_ram, loading, key=lambda parts: sum(parts.values()))


def pass_of(config: TrainConfig) -> Pass:
    """The largest forward pass of a rank: sequences as long as they may be, which share nothing."""
    trainer, cuda = config.trainer, config.trainer.device_type == "cuda"
    length = min(trainer.seq_len, config.model.max_model_len)
    return Pass(
        tokens=max(trainer.tokens_per_forward, length),
        length=length,
        size=trainer.precision.size,
        checkpointing=trainer.gradient_checkpointing,
        head_chunk=trainer.head_chunk,
        cuda=cuda,
        spread=cuda or trainer.precision.is_mixed or trainer.num_processes > 1 or trainer.cpu_offload,
    )


def count_references(config: TrainConfig) -> int:
    """Return how many references of the envs' algorithms the trainer keeps."""
    algorithms = [build(node, Algorithm, key) for key, node in (config.node_of(env, "algo") for env in config.envs)]
    return len({name for algorithm in algorithms for name in algorithm.trainer_references()})
