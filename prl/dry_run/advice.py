"""Which setting would have a run fit that does not."""

import copy
from collections.abc import Iterator
from typing import Any

from prl.config.hardware import GIB
from prl.config.schema import TrainConfig
from prl.dry_run.plan import RAM, Plan, Sizes, plan

Change = dict[str, Any]
"""Values by config key."""


def advice(config: TrainConfig, sizes: Sizes) -> str:
    """What to set, in words: the first change that is enough by itself, else the first few that are together."""
    together: Change = {}
    for alone in (True, False):
        for changes in candidates(config, sizes):
            for change in changes:
                found = plan(changed(config, change if alone else together | change), sizes)
                if not list(found.problems()):
                    return f"set {said(change if alone else together | change)} (then {peaks(found)})"
            if changes and not alone:
                together |= changes[-1]
    least = peaks(plan(changed(config, together), sizes))
    with_it = f"with {said(together)} it is still {least}" if together else f"it is {least}"
    return f"no setting is enough ({with_it}): choose a smaller model, or a machine with more memory"


def candidates(config: TrainConfig, sizes: Sizes) -> Iterator[list[Change]]:
    """Settings that take less, a list for each key with what changes least first."""
    trainer, found = config.trainer, plan(config, sizes)
    for cache in found.caches:
        inference = config.teacher.inference if cache.key.startswith("teacher") else config.inference
        changes = caches_of(inference, cache.key, cache.bytes_per_token * cache.longest, found)
        yield [change for change in changes if has_room(plan(changed(config, change), sizes), cache.key)]
    lengths = [trainer.tokens_per_forward >> halvings for halvings in range(1, 20)]
    least = min(trainer.seq_len, trainer.tokens_per_forward)
    yield [{"trainer.tokens_per_forward": max(length, least)} for length in lengths if 2 * length > least]
    if not trainer.gradient_checkpointing:
        yield [{"trainer.gradient_checkpointing": True}]
    if trainer.num_processes > 1 and found.used()[RAM] > found.capacities[RAM]:
        yield [{"trainer.num_processes": count} for count in range(trainer.num_processes - 1, 0, -1)]


def caches_of(inference: Any, key: str, needed: float, found: Plan) -> list[Change]:
    """Other sizes of a KV cache: larger where one sequence finds no room, else smaller."""
    gpus = len(found.capacities) - 1
    room = has_room(found, key)
    if not gpus:
        least = max(1, -int(-needed // GIB))
        sizes = range(inference.kv_cache_gb - 1, least - 1, -1) if room else [least + 1]
        return [{f"{key}.kv_cache_gb": size} for size in sizes]
    shares = [round(0.05 * step, 2) for step in range(1, 19)]
    smaller = [share for share in reversed(shares) if share < inference.gpu_memory_utilization]
    larger = [share for share in shares if share > inference.gpu_memory_utilization]
    wider = [] if room else [n for n in (2, 4, 8) if inference.tensor_parallel_size < n <= gpus]
    return [
        *({f"{key}.tensor_parallel_size": count} for count in wider),
        *({f"{key}.gpu_memory_utilization": share} for share in (smaller if room else larger)),
    ]


def has_room(found: Plan, key: str) -> bool:
    """Whether the KV cache of the engine under `key` holds one sequence."""
    return all(cache.tokens >= cache.longest for cache in found.caches if cache.key == key)


def changed(config: TrainConfig, change: Change) -> TrainConfig:
    """The config with other values."""
    found = copy.deepcopy(config)
    for key, value in change.items():
        *path, name = key.split(".")
        node: Any = found
        for part in path:
            node = getattr(node, part)
        setattr(node, name, value)
    return found


def said(change: Change) -> str:
    """A change as it is typed."""
    return " ".join(f"{key}={str(value).lower()}" for key, value in change.items())


def peaks(found: Plan) -> str:
    """The fullest devices in words."""
    device, used = max(found.used().items(), key=lambda each: each[1] / found.capacities.get(each[0], 1))
    return f"{used / GIB:.1f} of {found.capacities.get(device, 0) / GIB:.1f} GiB in {device}"
