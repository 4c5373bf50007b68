"""Which setting would have a run fit that does not."""

import copy
from collections.abc import Iterator
from typing import Any, get_args

from prl.config.hardware import GIB
from prl.config.schema import TrainConfig
from prl.dry_run.memory import Recomputed
from prl.dry_run.plan import GPU, Plan, Sizes, plan
from prl.errors import ConfigError

KEY = "trainer.gradient_checkpointing"
Change = dict[str, Any]
"""Values by config key."""


def advice(config: TrainConfig, sizes: Sizes) -> str:
    """What to set, in words: the first change that is enough by itself, else the first few that are together."""
    together: Change = {}
    for alone in (True, False):
        for changes in candidates(config, sizes):
            possible = [change for change in changes if attempt(config, together | change, sizes) is not None]
            for change in possible:
                tried = change if alone else together | change
                if fits(config, tried, sizes):
                    return said_with_peaks(config, needed(config, tried, sizes), sizes)
            if possible and not alone:
                together |= possible[-1]
    least = peaks(plan(changed(config, together), sizes))
    with_it = f"with {said(together)} it is still {least}" if together else f"it is {least}"
    return f"none of the settings tried is enough ({with_it}): choose a smaller model, or a machine with more memory"


def attempt(config: TrainConfig, change: Change, sizes: Sizes) -> Plan | None:
    """The plan with other values; None where there are not GPUs enough for it."""
    try:
        return plan(changed(config, change), sizes)
    except ConfigError:
        return None


def fits(config: TrainConfig, change: Change, sizes: Sizes) -> bool:
    """Whether a run with other values fits."""
    found = attempt(config, change, sizes)
    return found is not None and not list(found.problems())


def needed(config: TrainConfig, change: Change, sizes: Sizes) -> Change:
    """A change that fits, without what it fits without, and with no more of each than it takes."""
    for key in list(change):
        less = {other: value for other, value in change.items() if other != key}
        if fits(config, less, sizes):
            change = less
    for changes in candidates(config, sizes):
        milder = (change | each for each in changes if each.keys() <= change.keys())
        change = next((each for each in milder if fits(config, each, sizes)), change)
    return change


def said_with_peaks(config: TrainConfig, change: Change, sizes: Sizes) -> str:
    return f"set {said(change)} (then {peaks(plan(changed(config, change), sizes))})"


def candidates(config: TrainConfig, sizes: Sizes) -> Iterator[list[Change]]:
    """Settings that take less, a list for each key with what changes least first."""
    trainer, found = config.trainer, plan(config, sizes)
    crowded = {device for device, used in found.used().items() if used > found.capacities.get(device, 0)}
    full = {each.name for each in found.processes if crowded & each.held.keys()}
    for cache in found.caches:
        if cache.process not in full and has_room(found, cache.key):
            continue
        inference = config.teacher.inference if cache.key.startswith("teacher") else config.inference
        changes = caches_of(inference, cache.key, cache.bytes_per_token * cache.longest, found)
        roomy = [change for change in changes if gives_room(config, change, sizes, cache.key)]
        yield roomy if has_room(found, cache.key) else roomy[:1]
    for key, inference in (("inference", config.inference), ("teacher.inference", config.teacher.inference)):
        if inference.servers > 1 and any(cache.key == key and cache.process in full for cache in found.caches):
            yield [{f"{key}.servers": count} for count in range(inference.servers - 1, 0, -1)]
    if not full & {"trainer", "trainer rank"}:
        return
    gpus = gpus_of(found)
    if trainer.shard_size is not None:
        yield [{"trainer.shard_size": None}]
    if gpus:  # those that nothing runs on
        one = {} if trainer.shard_size is None else {"trainer.shard_size": None}
        yield [{"trainer.num_processes": count, **one} for count in range(trainer.num_processes + 1, gpus + 1)]
    lengths = [trainer.tokens_per_forward >> halvings for halvings in range(1, 20)]
    least = min(trainer.seq_len, trainer.tokens_per_forward)
    yield [{"trainer.tokens_per_forward": max(length, least)} for length in lengths if 2 * length > least]
    modes = get_args(Recomputed)
    more = modes[modes.index(trainer.gradient_checkpointing) + 1 :]
    yield [{KEY: mode} for mode in more if mode != "selective" or not trainer.compile]
    if any(GPU not in device for device in crowded):
        yield [{"trainer.num_processes": count} for count in range(trainer.num_processes - 1, 0, -1)]
    elif gpus and not trainer.cpu_offload:
        yield [{"trainer.cpu_offload": True}]


def gpus_of(found: Plan) -> int:
    return sum(GPU in device for device in found.capacities)


def caches_of(inference: Any, key: str, needed: float, found: Plan) -> list[Change]:
    """Other sizes of a KV cache: larger where one sequence finds no room, else smaller."""
    gpus = gpus_of(found)
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
        *({f"{key}.gpu_memory_utilization": share} for share in (smaller if room else larger)),
        *({f"{key}.tensor_parallel_size": count} for count in wider),
    ]


def gives_room(config: TrainConfig, change: Change, sizes: Sizes, key: str) -> bool:
    """Whether the engine under `key` has room for a sequence with other values."""
    found = attempt(config, change, sizes)
    return found is not None and has_room(found, key)


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
    return " ".join(f"{key}={'null' if value is None else str(value).lower()}" for key, value in change.items())


def peaks(found: Plan) -> str:
    """The fullest devices in words."""
    device, used = max(found.used().items(), key=lambda each: each[1] / found.capacities.get(each[0], 1))
    return f"{used / GIB:.1f} of {found.capacities.get(device, 0) / GIB:.1f} GiB in {device}"
