"""What a run would start, where, and what memory each of its processes would take there, from its config alone."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from prl.config import machine
from prl.config.gpus import Gpus, visible_gpus
from prl.config.hardware import GIB, MIB, gpu_memory_bytes
from prl.config.instantiate import plain
from prl.config.schema import InferenceConfig, ModelConfig, TrainConfig
from prl.config.validate import hosts_teacher, resolve_device
from prl.dry_run.memory import (
    MASTER,
    Pass,
    Recomputed,
    Served,
    engine_memory,
    kv_bytes_per_token,
    kv_tokens,
    trainer_memory,
)
from prl.dry_run.shape import ModelShape, optimiser_bytes, shape_of, with_adapters
from prl.launch import specs, threads
from prl.launch.local import resolve_model
from prl.trainer.config import runs_in_half

RAM, GPU = "RAM", "GPU"
"""Devices: the memory of a node, and its `GPU 0`, `GPU 1`, …; of several nodes all begin with `node 1`, `node 2`, …"""
COMMAND, ENGINE, TRAINER = 0.3 * GIB, 0.6 * GIB, 300 * MIB
"""What a process has in memory beside its tensors: code and what it keeps of starting. Seen on a CPU."""
STATES = ("weights", "gradients", "optimiser", "reference")
"""Parts of a rank's memory that it keeps between steps, in host memory with `trainer.cpu_offload`."""
CONTEXT = 0.6 * GIB
"""What CUDA takes of a GPU for each process. An assumption: prl has not run on one."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is found out once about the models of a run."""

    policy: ModelShape
    teacher: ModelShape | None
    """None where the launcher hosts none."""
    optimiser: int
    """Bytes that the optimiser keeps of all that is trained."""

    @classmethod
    def of(cls, config: TrainConfig) -> "Sizes":
        """Raises ConfigError for what cannot be counted."""
        policy, model = shape_of(config.model, "model.path", trained=True)
        if config.model.lora.rank is not None:
            policy = with_adapters(policy, model, config.model)
        hosted = config.teacher.model if hosts_teacher(config) else None
        teacher = None if hosted is None else shape_of(hosted, "teacher.model.path", trained=False)[0]
        return cls(policy=policy, teacher=teacher, optimiser=optimiser_bytes(model, config.trainer.optim))


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process of the run."""

    name: str
    """Of ranks and servers without their number."""
    command: str
    device: str
    """`cpu` or `cuda`."""
    gpus: tuple[str, ...] = ()
    """Devices that it computes on."""
    threads: int = 1
    port: str = "none"
    held: dict[str, dict[str, float]] = field(default_factory=dict)
    """Bytes by device and part."""


@dataclass(frozen=True, kw_only=True)
class Cache:
    """The KV cache of each engine of a model."""

    process: str
    key: str
    """Of the engine's node."""
    bytes_per_token: int
    tokens: int
    longest: int
    """Tokens of the longest sequence."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run would take."""

    processes: list[Process]
    caches: list[Cache]
    capacities: dict[str, float]
    """Bytes by device."""

    def used(self) -> dict[str, float]:
        """Bytes by device that all processes take together."""
        found: dict[str, float] = defaultdict(float)
        for process in self.processes:
            for device, parts in process.held.items():
                found[device] += sum(parts.values())
        return found

    def problems(self) -> Iterator[str]:
        """What does not fit."""
        for cache in self.caches:
            if cache.tokens < cache.longest:
                yield (
                    f"the KV cache of {cache.process} has room for {cache.tokens:,} tokens, less than one sequence of "
                    f"{cache.longest:,}"
                )
        for device, used in self.used().items():
            if used > self.capacities[device]:
                yield f"{device} would hold {used / GIB:.1f} GiB, and it has {self.capacities[device] / GIB:.1f} GiB"


class Devices(NamedTuple):
    """Where a process has memory."""

    ram: str
    gpus: tuple[str, ...]


def plan(config: TrainConfig, sizes: Sizes) -> Plan:
    """The processes of a run whose config has passed, on a machine as `prl.config.hardware` knows it."""
    memory, names, placed = gpu_memory_bytes(), visible_gpus(), specs.placement(config)
    numbers = [int(name) if name.isdigit() else place for place, name in enumerate(names)]
    gpus = [memory[min(number, len(memory) - 1)] for number in numbers]
    ram = machine.memory_bytes()
    capacities: dict[str, float] = {RAM: math.inf if ram is None else ram}
    capacities |= {f"{GPU} {place}": size for place, size in enumerate(gpus)}

    def devices(own: Gpus) -> Devices:
        return Devices(RAM, tuple(f"{GPU} {gpu}" for gpu in own))

    engines = [
        ("inference", "", config.model, config.inference, sizes.policy, placed.engines),
        ("teacher", "teacher.", config.teacher.model, config.teacher.inference, sizes.teacher, placed.teachers),
    ]
    first = {RAM: {"process": COMMAND}}
    processes = [Process(name="orchestrator", command="prl.train", device="cpu", held=first)]
    caches = []
    for name, prefix, model, inference, shape, theirs in engines:
        if model is None or shape is None or inference.urls:
            continue
        compute = threads.of_teacher(config, model) if prefix else threads.of_engine(config, model)
        for place in theirs:
            process, cache = engine(name, prefix, model, inference, shape, gpus, devices(place))
            processes.append(replace(process, threads=compute))
        caches.append(cache)
    trainers = ranks(config, sizes, [devices(place) for place in placed.ranks])
    return Plan(processes=[*processes, *trainers], caches=caches, capacities=capacities)


def engine(
    name: str,
    prefix: str,
    model: ModelConfig,
    inference: InferenceConfig,
    shape: ModelShape,
    gpus: Sequence[int],
    own: Devices,
) -> tuple[Process, Cache]:
    """A model server, its config keys under `prefix`, and its KV cache.

    `gpus` is the memory of each, bytes; `own` are the devices that the server has.
    """
    device = resolve_device(inference.device)
    resolved, cuda = resolve_model(model, device), device == "cuda"
    spans = inference.tensor_parallel_size if cuda else 1
    how = Served(
        dtype=resolved.dtype,
        device=device,
        tensor_parallel=spans,
        max_num_seqs=inference.max_num_seqs,
        updated=not prefix,
        cache=None if cuda else inference.kv_cache_gb * GIB,
        share=min(gpus, default=0) * inference.gpu_memory_utilization,
    )
    parts = dict(engine_memory(shape, how))
    tokens = kv_tokens(shape, how, parts["KV cache"])
    if cuda:  # of its share it takes all that it may
        parts["KV cache"] = max(0, parts["KV cache"] - CONTEXT)
        tokens = kv_tokens(shape, how, parts["KV cache"])
    base = {own.ram: {"process": ENGINE}}
    theirs = {gpu: parts | {"process": CONTEXT} for gpu in own.gpus}
    process = Process(
        name=name,
        command=f"prl.inference.server --model {Path(model.path).name}",
        device=device,
        gpus=own.gpus,
        port=f"{inference.host}:{inference.port or '<a free one>'}",
        held=base | theirs if cuda else {own.ram: parts | base[own.ram]},
    )
    cache = Cache(
        process=name,
        key=f"{prefix}inference",
        bytes_per_token=kv_bytes_per_token(shape, how.dtype, spans) * spans,
        tokens=tokens,
        longest=model.max_model_len,
    )
    return process, cache


def ranks(config: TrainConfig, sizes: Sizes, own: Sequence[Devices]) -> list[Process]:
    """The ranks of the trainer; `own` are the devices of each."""
    trainer, cuda = config.trainer, resolve_device(config.trainer.device) == "cuda"
    parts = {key: value for key, value in of_rank(config, sizes).items() if value}
    count = trainer.num_processes
    processes = []
    for rank, (ram, gpus) in enumerate(own):
        process: dict[str, float] = {"process": TRAINER}
        if not cuda:
            loaded = sizes.policy.parameters * MASTER if rank == 0 and count > 1 else 0
            held = {ram: or_loading(parts, loaded) | process}
        else:
            offloaded = {key: parts[key] for key in STATES if key in parts and trainer.cpu_offload}
            loaded = sizes.policy.parameters * MASTER if rank == 0 else 0  # into host memory
            there = {key: value for key, value in parts.items() if key not in offloaded}
            held = {ram: or_loading(offloaded, loaded) | process} | {gpu: there | {"process": CONTEXT} for gpu in gpus}
        processes.append(
            Process(
                name="trainer" if count == 1 else "trainer rank",
                command="prl.trainer",
                device="cuda" if cuda else "cpu",
                gpus=gpus,
                threads=threads.of_trainer(config),
                port="none" if count == 1 else "none; ranks meet at a file",
                held=held,
            )
        )
    return processes


def or_loading(parts: dict[str, float], loaded: int) -> dict[str, float]:
    """What a rank holds in RAM at its peak: in a step, or before, while it loads so many bytes of weights.

    The first rank has all of them then, and hands each its part; a reference it loads beside its part of the policy.
    """
    before = {"weights": parts["weights"]} if "weights" in parts and "reference" in parts else {}
    loading = before | {"loading": float(loaded)}
    return loading if sum(loading.values()) > sum(parts.values()) else parts


def of_rank(config: TrainConfig, sizes: Sizes) -> dict[str, float]:
    """Bytes of one rank of the trainer, by part."""
    trainer = config.trainer
    return trainer_memory(
        sizes.policy,
        a_pass(config),
        optimiser=sizes.optimiser,
        reference=holds_reference(config),
        shards=trainer.shard_size or trainer.num_processes,
    )


def a_pass(config: TrainConfig) -> Pass:
    """The largest forward pass of a rank: sequences as long as they may be, which share nothing."""
    trainer, device = config.trainer, resolve_device(config.trainer.device)
    cuda, half = device == "cuda", runs_in_half(config.trainer.dtype, device)
    return Pass(
        budget=trainer.tokens_per_forward,
        length=min(trainer.seq_len, config.model.max_model_len),
        row=trainer.seq_len,
        precision="bfloat16" if half else "float32",
        checkpointing=cast(Recomputed, trainer.gradient_checkpointing),
        trees=trainer.share_prefixes or cuda,
        head_chunk=trainer.head_chunk,
        cuda=cuda,
        spread=cuda or half or trainer.num_processes > 1 or trainer.cpu_offload,
    )


def holds_reference(config: TrainConfig) -> bool:
    """Whether the trainer keeps the initial model: an env's algorithm has a KL to it."""
    kls: list[Any] = [plain(config.node_of(env, "algo")[1]).get("kl") or {} for env in config.envs]
    return any(kl.get("coef") and kl.get("reference", "initial") == "initial" for kl in kls)
