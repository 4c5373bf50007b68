"""Buffers that a process makes and others open: a file without a name on a CPU, by CUDA IPC on a GPU.

The kernel frees the file (memfd) once nobody has it any more, however the processes end. On a GPU the maker's process
has the memory until it ends. What one tells the other is plain data: torch's own way to pass a tensor pickles.

Written for torch 2.13: `_share_cuda_` and `_new_shared_cuda` are what `torch.multiprocessing.reductions` calls, and no
public interface. Not yet run on a GPU.
"""

import functools
import mmap
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

ALIGNED = 64
"""Each buffer of a file begins at a multiple of this many bytes."""


class Handle(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What opens a buffer on a GPU, in the order of torch's functions."""

    memory: bytes
    """Of the allocation that the buffer is in."""
    size: int
    """Bytes, like both offsets."""
    offset: int
    """In the allocation."""
    counter: bytes
    """Shared memory in which torch counts who has opened it, and the place there."""
    counter_offset: int
    event: bytes
    """What was under way when the handle was made, and whether whoever opens it is to wait for that."""
    waits: bool


class Offer(msgspec.Struct, frozen=True):
    """What a process is told that is to open buffers; for those of a CPU the file comes with it."""

    sizes: tuple[int, ...]
    """Bytes."""
    handles: list[Handle]
    """Of each buffer on a GPU."""


Send = Callable[[bytes, list[int]], None]
"""Sends a message with open files."""


def place_of(device: torch.device) -> str:
    """The memory of a device; on a GPU it has the same name for every process, whatever number each knows it by."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"


def settle(device: torch.device) -> None:
    """Wait until what this process has begun on a device is done: another process does not see its order."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def share(sizes: tuple[int, ...], device: torch.device, others: Sequence[Send]) -> list[torch.Tensor]:
    """Make buffers of bytes, and offer them to each of the others. Raises OSError, RuntimeError."""
    if device.type == "cuda":
        buffers = _on_gpu(sizes, device)
        for send in others:  # torch counts each handle as one that opens it
            send(msgspec.msgpack.encode(Offer(sizes, [_handle(buffer) for buffer in buffers])), [])
        return buffers
    file = os.memfd_create("prl-buckets")
    try:
        os.ftruncate(file, sum(map(_room, sizes)))
        for send in others:
            send(msgspec.msgpack.encode(Offer(sizes, [])), [file])
        return _in_file(file, sizes, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(file)


def opened(message: bytes, files: list[int], device: torch.device) -> list[torch.Tensor]:
    """The buffers that are offered, to be read. Raises OSError, RuntimeError, ValueError for what is no offer."""
    try:
        offer = msgspec.msgpack.decode(message, type=Offer)
        if device.type == "cuda":
            pairs = zip(offer.handles, offer.sizes, strict=True)
            return [_opened(handle, device)[:size] for handle, size in pairs]
        [file] = files
        return _in_file(file, offer.sizes, mmap.PROT_READ)
    finally:
        for file in files:
            os.close(file)


def _room(size: int) -> int:
    return max(ALIGNED, -(-size // ALIGNED) * ALIGNED)


def _in_file(file: int, sizes: tuple[int, ...], access: int) -> list[torch.Tensor]:
    rooms = [_room(size) for size in sizes]
    memory = mmap.mmap(file, sum(rooms), mmap.MAP_SHARED, access)
    with warnings.catch_warnings():  # torch warns of what may not be written: it ends the process, as it should
        warnings.simplefilter("ignore", UserWarning)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
    return [part[:size] for part, size in zip(torch.split(whole, rooms), sizes, strict=True)]


@functools.cache
def _on_gpu(sizes: tuple[int, ...], device: torch.device) -> list[torch.Tensor]:
    """One pair for the life of this process: torch frees none that a process had opened which was killed."""
    return [torch.empty(_room(size), dtype=torch.uint8, device=device)[:size] for size in sizes]


def _handle(buffer: torch.Tensor) -> Handle:
    storage: Any = buffer.untyped_storage()
    _, *parts = storage._share_cuda_()
    return msgspec.convert(parts, Handle)


def _opened(handle: Handle, device: torch.device) -> torch.Tensor:
    index = torch.cuda.current_device() if device.index is None else device.index
    storage = torch.UntypedStorage._new_shared_cuda(index, *msgspec.structs.astuple(handle))
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
