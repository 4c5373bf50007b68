"""A prediction of what a run would start, where, and of the memory that each of its processes would take there."""

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from rich import box
from rich.table import Table

from prl.base.errors import ConfigError
from prl.base.terminal import Console
from prl.config.gpus import Gpus
from prl.config.hardware import CUDA_CONTEXT, GIB, MIB, Machine
from prl.config.model_shape import ModelShape
from prl.config.trainer import Precision
from prl.config.validate import places_processes
from prl.launch.builder import PreparedRun
from prl.launch.plan import ModelPlan, in_words
from prl.tools.dry_run.memory import FLOAT, Pass, trainer_memory
from prl.tools.dry_run.shape import shape_of

RAM, GPU = "RAM", "GPU"
"""Devices: the memory of the machine, and its `GPU 0`, `GPU 1`, …"""
COMMAND, ENGINE, TRAINER = 0.3 * GIB, 0.6 * GIB, 300 * MIB
"""Memory of a process beside its tensors: code and what it keeps of starting. Seen on a CPU."""
STATES = ("weights", "gradients", "optimiser", "reference")
"""Parts of a rank's memory that it keeps between steps, in host memory with `trainer.cpu_offload`."""
WIDTH = 160
"""Characters of a line of a table in a file or a pipe."""
REMEDY = (
    "lower what takes most (trainer.tokens_per_forward, engine.kv_cache_gb or engine.gpu_memory_utilization), "
    "set trainer.gradient_checkpointing=full, trainer.cpu_offload=true or model.lora.rank, or take a smaller model"
)


@dataclass
class Prediction:
    """A prediction of what a run would take."""

    capacities: dict[str, float]
    """Bytes by device."""
    processes: dict[str, list[tuple[str, dict[str, float]]]] = field(default_factory=lambda: defaultdict(list))
    """Processes that have memory on each device, and the bytes of each by part."""
    caches: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Tokens that the KV cache of each engine has room for, and those of the longest sequence."""

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


def predict(run: PreparedRun) -> Prediction:
    """The processes of a prepared run and what each has in memory, on the machine of its plan."""
    plan, trainer = run.plan, run.config.trainer
    gpus = {f"{GPU} {place}": float(size) for place, size in enumerate(plan.machine.gpu_memory)}
    predicted = Prediction({RAM: float(plan.machine.memory)} | gpus)
    predicted.add("orchestrator", {"process": COMMAND})
    policy = shape_of(run.config.model, "model.path", lora=run.config.model.lora, trained=True)
    add_model(predicted, "engine", plan.policy, policy, plan.machine)
    if plan.teacher is not None:
        shape = shape_of(plan.teacher.spec.model, "teacher.model.path", trained=False)
        add_model(predicted, "teacher", plan.teacher, shape, plan.machine)
    passes = pass_of(
        trainer, run.config.model.max_model_len, plan.trainer.precision, cuda=plan.trainer.device == "cuda"
    )
    for number, place in enumerate(plan.trainer.gpus):
        on_gpu, in_ram = memory_of_rank(
            trainer, policy, passes, references=len(run.components.references), first=number == 0
        )
        predicted.add("trainer", in_ram | {"process": TRAINER}, on_gpu, places_of(place, plan.machine))
    return predicted


def add_model(predicted: Prediction, name: str, model: ModelPlan, shape: ModelShape, machine: Machine) -> None:
    """Add the servers that are started of a model. One in the run's process has none."""
    spec = model.spec
    gpu_bytes = float(min(machine.gpu_memory, default=0)) if spec.device == "cuda" else None
    memory = model.engine.memory(spec.config, shape, spec.model.dtype, gpu_bytes=gpu_bytes, updated=not spec.frozen)
    if memory.cache_tokens is not None and model.servers:
        predicted.caches[name] = (memory.cache_tokens, spec.model.max_model_len)
    for server in model.servers:
        in_ram = {"process": ENGINE} | ({} if server.gpus else memory.parts)
        predicted.add(name, in_ram, memory.parts, places_of(server.gpus, machine))


def places_of(gpus: Gpus, machine: Machine) -> list[int]:
    """Return the places of GPUs among those of the machine."""
    return [machine.gpus.index(gpu) for gpu in gpus]


def memory_of_rank(
    trainer: Any, policy: ModelShape, passes: Pass, *, references: int, first: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """Return what a rank of the trainer has on its GPU, and in the machine's memory, bytes by part.

    The latter at its peak: in a step, or before. The first of several ranks, or one with a GPU, loads all weights into
    RAM and hands each rank its part.
    """
    cuda = passes.cuda
    shards = trainer.shard_size or trainer.num_processes
    parts = trainer_memory(policy, passes, references=references, shards=shards)
    # With a GPU host memory has only what is offloaded.
    in_ram = {name: value for name, value in parts.items() if not cuda or (trainer.cpu_offload and name in STATES)}
    on_gpu = {name: value for name, value in parts.items() if name not in in_ram}
    loads = first and (cuda or trainer.num_processes > 1)
    loading = {"loading": float(policy.parameters * FLOAT * loads)}
    return on_gpu, max(in_ram, loading, key=lambda parts: sum(parts.values()))


def pass_of(trainer: Any, max_model_len: int, precision: Precision, *, cuda: bool) -> Pass:
    """The largest forward pass of a rank: sequences as long as they may be, which share nothing."""
    length = min(trainer.seq_len, max_model_len)
    return Pass(
        tokens=max(trainer.tokens_per_forward, length),
        length=length,
        size=precision.size,
        checkpointing=trainer.gradient_checkpointing,
        head_chunk=trainer.head_chunk,
        cuda=cuda,
        spread=cuda or precision.is_mixed or trainer.num_processes > 1 or trainer.cpu_offload,
    )


def report(run: PreparedRun, predicted: Prediction) -> None:
    """Print a prediction. Raises ConfigError, naming what to change, for what the machine has no room for."""
    Console(width=None if sys.stdout.isatty() else WIDTH).print(predicted.table())
    for name, (tokens, longest) in predicted.caches.items():
        print(f"KV cache of {name}: {tokens:,} tokens, {tokens / longest:,.1f} sequences of {longest:,}")
    if places_processes(run.config.launcher):
        print(f"asks Ray for {in_words(run.plan.bundles)}")
    for problem in predicted.problems():
        raise ConfigError(problem)
    print("fits")
