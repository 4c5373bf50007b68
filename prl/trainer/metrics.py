"""Metrics as sums and counts, so that a mean over micro-batches and ranks is exact."""

from collections.abc import Mapping

import msgspec
import torch
import torch.distributed as dist

Number = torch.Tensor | float | int


class Totals:
    """Adds up (sum, count) pairs by name, and plain counts."""

    def __init__(self):
        self._means: dict[str, tuple[Number, Number]] = {}
        self._counts: dict[str, Number] = {}

    def add(self, name: str, total: Number, count: Number) -> None:
        before = self._means.get(name, (0.0, 0))
        self._means[name] = (before[0] + total, before[1] + count)

    def add_all(self, pairs: Mapping[str, tuple[Number, Number]]) -> None:
        for name, (total, count) in pairs.items():
            self.add(name, total, count)

    def add_count(self, name: str, count: Number) -> None:
        self._counts[name] = self._counts.get(name, 0) + count

    def reduce(self, device: torch.device) -> dict[str, float]:
        """Means and counts over all ranks, whose names may differ: an algorithm may have samples on one rank only."""
        local = {
            "means": {name: (float(total), float(count)) for name, (total, count) in self._means.items()},
            "counts": {name: float(count) for name, count in self._counts.items()},
        }
        means: dict[str, list[float]] = {}
        counts: dict[str, float] = {}
        for part in _gather(local, device):
            for name, (total, count) in part["means"].items():
                pair = means.setdefault(name, [0.0, 0.0])
                pair[0] += total
                pair[1] += count
            for name, count in part["counts"].items():
                counts[name] = counts.get(name, 0.0) + count
        return {name: total / count for name, (total, count) in means.items() if count} | counts


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
