"""Tensors in buckets of bounded size: how sender and receivers of weights cut the same stream."""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    import torch

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ALIGNED = 16
"""Each tensor begins at a multiple of this many bytes of its bucket."""


class TensorSpec(msgspec.Struct, array_like=True, frozen=True):
    """A tensor that is going to be sent: its Hugging Face name, number format and shape."""

    name: str
    dtype: Literal["float32", "bfloat16", "float16"]
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * BYTES[self.dtype]


class Place(msgspec.Struct, frozen=True):
    """Where a tensor is in its bucket, bytes."""

    spec: TensorSpec
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.spec.bytes


def view_of(packed: "torch.Tensor", place: Place) -> "torch.Tensor":
    """The tensor at a place of a bucket that is packed as bytes."""
    import torch

    return packed[place.start : place.stop].view(getattr(torch, place.spec.dtype)).view(place.spec.shape)


def of_two(cut: "Sequence[Sequence[Place]]") -> tuple[int, int]:
    """Bytes of two buffers that buckets use in turn: one is on its way, and the other packed or loaded meanwhile."""
    even, odd = (max((bucket[-1].stop for bucket in cut[start::2]), default=0) for start in (0, 1))
    return even, odd


def buckets(tensors: Sequence[TensorSpec], limit: int) -> Iterator[list[Place]]:
    """Cut tensors, in their order, into buckets of at most `limit` bytes; a larger one has a bucket of its own."""
    bucket: list[Place] = []
    for spec in tensors:
        start = -(-bucket[-1].stop // ALIGNED) * ALIGNED if bucket else 0
        if bucket and start + spec.bytes > limit:
            yield bucket
            bucket, start = [], 0
        bucket.append(Place(spec, start))
    if bucket:
        yield bucket
