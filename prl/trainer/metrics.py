"""Metrics as sums and counts, so that a mean over micro-batches and ranks is exact."""

import msgspec
import torch
import torch.distributed as dist

Number = torch.Tensor | float | int
Metrics = dict[str, tuple[Number, Number]]
"""By name: sum and count, to be added up over micro-batches and ranks."""


def add_metric(metrics: Metrics, name: str, total: Number, count: Number) -> None:
    """Add a sum and a count to those that `name` has."""
    before = metrics.get(name, (0.0, 0))
    metrics[name] = (before[0] + total, before[1] + count)


def means_over_ranks(metrics: Metrics, device: torch.device) -> dict[str, float]:
    """The means over all ranks, whose names may differ: an algorithm may have samples on one rank only."""
    sums: Metrics = {}
    for part in _gather({name: (float(total), float(count)) for name, (total, count) in metrics.items()}, device):
        for name, pair in part.items():
            add_metric(sums, name, *pair)
    return {name: float(total / count) for name, (total, count) in sums.items() if count}


def _gather(value: dict, device: torch.device) -> list[dict]:
    """`value` of every rank, as msgpack bytes in tensors (torch's own object gather would pickle)."""
    if not dist.is_initialized():
        return [value]
    data = torch.frombuffer(bytearray(msgspec.msgpack.encode(value)), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(data)], device=device))
    padded = torch.zeros(int(max(sizes)), dtype=torch.uint8, device=device)
    padded[: len(data)] = data
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return [msgspec.msgpack.decode(bytes(part[: int(size)].tolist())) for part, size in zip(parts, sizes, strict=True)]
