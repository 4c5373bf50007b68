"""A dry run as tables of text."""

import math
import sys
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import get_args

from rich import box
from rich.table import Table
from rich.text import Text

from prl.config.hardware import GIB
from prl.config.instantiate import plain
from prl.config.schema import TrainConfig
from prl.dry_run.advice import KEY, changed
from prl.dry_run.memory import Recomputed
from prl.dry_run.plan import CONTEXT, GPU, STATES, Plan, Sizes, a_pass, of_rank
from prl.dry_run.shape import ModelShape
from prl.launch.local import LocalLauncher
from prl.terminal import Console
from prl.text import safe

WIDTH = 160
"""Of tables in a file or a pipe, characters."""
PARTS = (*STATES, "gathered", "activations", "head", "update", "KV cache", "heap", "loading")
"""Columns of memory; the rest is of the process itself."""
SHARDS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of ranks that are shown with one copy of the weights between them."""


def show(config: TrainConfig, sizes: Sizes, found: Plan) -> None:
    """Print what a run would be."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    for each in (processes(config, found), model(config, sizes), step(config), memory(found), caches(found)):
        console.print(each)
    if shown := sharded(config, sizes, found):
        console.print(shown)


def table(title: str, head: Sequence[str], rows: Iterable[Iterable[str]], numbers: Iterable[str] = ()) -> Table:
    """Text in columns; `numbers` are aligned to the right."""
    drawn = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, show_header=any(head))
    for name in head:
        drawn.add_column(Text(name), justify="right" if name in numbers else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(safe(cell)) for cell in row))
    return drawn


def processes(config: TrainConfig, found: Plan) -> Table:
    """What would be started where; ranks in one row."""
    head = ["process", "device", "threads", "listens", "python -m"]
    rows = []
    for name, group in groupby(found.processes, lambda each: each.name):
        alike = list(group)
        first, last = alike[0], alike[-1]
        gpus = list(dict.fromkeys([*first.gpus, *last.gpus]))
        each = ", one each" if len(first.gpus) == 1 else f", {len(first.gpus)} each"
        device = devices(gpus) + each * (len(alike) > 1) if gpus else first.device
        rows.append([counted(name, len(alike)), device, str(first.threads), first.port, first.command])
    rows += [["inference", "runs already", "", url, ""] for url in config.inference.urls]
    launcher = plain(config.launcher)["_target_"]
    own = f"{LocalLauncher.__module__}.{LocalLauncher.__qualname__}"
    others = "" if launcher == own else f"; {launcher} may start them elsewhere"
    return table(f"Processes{others}", head, rows, ["threads"])


def counted(name: str, count: int) -> str:
    """A name with how many there are."""
    return f"{count} x {name}" if count > 1 else name


def devices(names: Sequence[str]) -> str:
    """Devices that follow one another, in words."""
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1].removeprefix(f'{GPU} ')}"


def model(config: TrainConfig, sizes: Sizes) -> Table:
    """Parameters of the models."""
    rows = [[Path(config.model.path).name, *counts(sizes.policy)]]
    if sizes.policy.adapters:
        rows.append([f"adapters of rank {config.model.lora.rank}", f"{sizes.policy.adapters:,}", "", "", "", ""])
    if sizes.teacher is not None and config.teacher.model is not None:
        rows.append([Path(config.teacher.model.path).name, *counts(sizes.teacher)])
    head = ["model", "parameters", "embedding", "head", "layers", "of a layer"]
    return table("Parameters", head, rows, head[1:])


def counts(shape: ModelShape) -> list[str]:
    head = "tied" if shape.tied else f"{shape.head:,}"
    return [f"{shape.parameters:,}", f"{shape.embedding:,}", head, str(shape.layers), f"{shape.layer:,}"]


def step(config: TrainConfig) -> Table:
    """Tokens of a training step, and how they are packed."""
    orchestrator, trainer, longest = config.orchestrator, config.trainer, config.model.max_model_len
    size, ranks, how = orchestrator.batch_size, trainer.num_processes, a_pass(config)
    tokens = orchestrator.token_batch_size if size is None else size * min(longest, trainer.seq_len)
    per_rank = math.ceil(tokens / ranks)
    completion = config.sampling.max_tokens
    rows = [
        ["batch", f"{size:,} rollouts" if size is not None else f"{tokens:,} tokens"],
        ["a sequence", f"at most {min(longest, trainer.seq_len):,} tokens, prompt and completion"],
        ["a completion", f"at most {min(completion or longest, longest - 1):,} tokens a turn"],
        ["a step", f"at most {tokens:,} tokens" + ", of one sequence a rollout" * (size is not None)],
        ["rows", f"at most {math.ceil(per_rank / trainer.seq_len):,} full ones of {trainer.seq_len:,} a rank"],
        ["passes", f"at most {math.ceil(per_rank / how.tokens):,} full ones of {how.tokens:,} tokens a rank"],
    ]
    return table("A step", ["", ""], rows)


def gib(value: float) -> str:
    """Bytes in GiB; nothing for none."""
    return f"{value / GIB:,.2f}" if abs(value) >= 0.005 * GIB else "0" if value else ""


def memory(found: Plan) -> Table:
    """What each process holds where, and what there is; devices that hold the same in one block."""
    held = {
        device: [(each.name, each.held[device]) for each in found.processes if device in each.held]
        for device in sorted(found.used(), key=lambda name: (GPU in name, len(name), name))
    }
    named = [part for part in PARTS if any(parts.get(part) for rows in held.values() for _, parts in rows)]
    head = ["device", "process", *named, "rest", "sum"]
    rows = []
    for _, group in groupby(held, lambda device: (held[device], found.capacities.get(device))):
        alike = list(group)
        device = devices(alike)
        for (name, parts), same in groupby(held[alike[0]]):
            rest = sum(value for part, value in parts.items() if part not in named)
            cells = [gib(value) for value in (*(parts.get(part, 0) for part in named), rest, sum(parts.values()))]
            rows.append([device, counted(name, len(list(same))), *cells])
        capacity = found.capacities.get(alike[0], 0)
        there = "unknown" if math.isinf(capacity) else f"{capacity / GIB:.2f}"
        rows.append([device, f"all, of {there}", *[""] * (len(named) + 1), gib(found.used()[alike[0]])])
    return table("Memory, GiB at the peak of a step (of several alike: each)", head, rows, head[2:])


def caches(found: Plan) -> Table:
    """KV caches: how many tokens and sequences they hold."""
    head = ["each", "bytes a token", "tokens", "sequences", "longest"]
    rows = [
        [
            each.process,
            f"{each.bytes_per_token:,}",
            f"{each.tokens:,}",
            f"{each.tokens / each.longest:,.1f}",
            f"{each.longest:,}",
        ]
        for each in found.caches
    ]
    return table("KV cache", head, rows, head[1:])


def sharded(config: TrainConfig, sizes: Sizes, found: Plan) -> Table | None:
    """What a rank would hold, were weights, gradients and optimiser spread over ranks; None without several GPUs."""
    gpus = [name for name in found.capacities if GPU in name]
    if len(gpus) < 2 or all(each.device != "cuda" for each in found.processes if each.name.startswith("trainer")):
        return None
    capacity = min(found.capacities[name] for name in gpus)
    states = ["weights", "gradients", "optimiser", "gathered"]
    modes = get_args(Recomputed)
    passes = [name for mode in modes for name in (f"activations ({mode})", "head", "sum")]
    rows = []
    for ranks in (count for count in SHARDS if count <= len(gpus)):
        alone = {"trainer.num_processes": ranks, "trainer.shard_size": None, "trainer.cpu_offload": False}
        each = [of_rank(changed(config, alone | {KEY: mode}), sizes) for mode in modes]
        row = [str(ranks), *(gib(each[0][name]) for name in states)]
        for parts in each:
            row += [gib(parts["activations"]), gib(parts["head"]), gib(sum(parts.values()) + CONTEXT)]
        rows.append(row)
    title = f"A rank, GiB of {capacity / GIB:.2f}, by ranks that share one copy of the weights, and what is recomputed"
    return table(title, ["ranks", *states, *passes], rows, ["ranks", *states, *passes])
