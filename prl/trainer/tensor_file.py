"""Writes a safetensors file tensor by tensor, so that no process needs room for all of them.

The file is the one that safetensors' own `save_file` writes, byte for byte: its header has to be known first, which
takes names, number formats and shapes. Written for safetensors 0.8.
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

FORMATS = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Their names in a file, in the order in which tensors of these formats lie in it: so each begins at a multiple of its
size."""
ALIGNED = 8
"""The first tensor begins at a multiple of this many bytes."""


def write_tensors(
    path: Path,
    layout: Mapping[str, torch.Tensor],
    tensors: Iterable[tuple[str, torch.Tensor]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write `tensors` as they come, in any order; each is let go of before the next one is asked for.

    Args:
        path: of the file, in a folder that is there.
        layout: by name the shape and number format of each tensor; on any device, meta too.
        tensors: names and tensors on any device.
        metadata: of the file.

    Raises:
        TypeError: a number format that such files do not have.
        ValueError: what came is not what `layout` says.
        OSError: it cannot be written.
    """
    header, starts = header_of(layout, metadata)
    left = dict(layout)
    with open(path, "wb") as file:
        file.write(header)
        for name, tensor in tensors:
            expected = left.pop(name, None)
            if expected is None or (tensor.shape, tensor.dtype) != (expected.shape, expected.dtype):
                raise ValueError(f"{path}: {name} came with shape {list(tensor.shape)} as {tensor.dtype}, unexpected")
            file.seek(len(header) + starts[name])
            file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            del tensor
    if left:
        raise ValueError(f"{path}: {next(iter(left))} did not come")


def send_all(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Go through tensors of which another rank writes the file, since to gather each is a collective."""
    for _ in tensors:
        pass


def header_of(layout: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None) -> tuple[bytes, dict[str, int]]:
    """The bytes before the tensors, and where each tensor begins after them. Raises TypeError as `write_tensors`."""
    for name, tensor in layout.items():
        if tensor.dtype not in FORMATS:
            raise TypeError(f"{name} has numbers of {tensor.dtype}, which safetensors files do not have")
    order = {dtype: place for place, dtype in enumerate(FORMATS)}
    entries: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    starts, stop = {}, 0
    for name in sorted(layout, key=lambda each: (order[layout[each].dtype], each)):
        shape, dtype = list(layout[name].shape), layout[name].dtype
        starts[name], stop = stop, stop + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": FORMATS[dtype], "shape": shape, "data_offsets": [starts[name], stop]}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNED)
    return len(text).to_bytes(8, "little") + text, starts
