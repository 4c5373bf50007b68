"""A safetensors file that is written tensor by tensor is the one that safetensors writes."""

import json
import struct

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from prl.trainer.tensor_file import FORMATS, write_tensors


def all_formats():
    """A tensor of each number format, of three shapes, with names in an order that is not the file's."""
    draw = torch.Generator().manual_seed(0)
    tensors = {}
    for number, dtype in enumerate(FORMATS):
        for shape in ((3, 5), (), (0, 4)):
            numbers = torch.randint(0, 100, shape, generator=draw)
            tensors[f'{(7 * number) % 16}.{"é" * (number % 2)}{len(shape)}.{shape}\t"x"'] = numbers.to(dtype)
    return tensors


@pytest.mark.parametrize("metadata", [{"format": "pt"}, None])
def test_the_file_is_that_of_safetensors_byte_for_byte(tmp_path, metadata):
    tensors = all_formats()
    assert len(tensors) == 3 * len(FORMATS)
    layout = {name: tensor.to("meta") for name, tensor in tensors.items()}
    write_tensors(tmp_path / "ours", layout, reversed(tensors.items()), metadata)
    save_file(tensors, tmp_path / "theirs", metadata)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    found = load_file(tmp_path / "ours")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
    with safe_open(tmp_path / "ours", "pt") as file:
        assert file.metadata() == metadata


def test_a_header_of_any_length_ends_at_a_multiple_of_eight(tmp_path):
    for length in range(1, 18):
        name, tensor = "n" * length, torch.arange(3.0)
        write_tensors(tmp_path / "file", {name: tensor}, [(name, tensor)])
        data = (tmp_path / "file").read_bytes()
        (header,) = struct.unpack("<Q", data[:8])
        assert header % 8 == 0 and json.loads(data[8 : 8 + header])[name]["data_offsets"] == [0, 12]
        assert torch.equal(load_file(tmp_path / "file")[name], tensor)


def test_strided_tensors_and_no_tensors(tmp_path):
    tensor = torch.arange(12.0).view(3, 4).t()[1:]
    write_tensors(tmp_path / "file", {"x": tensor}, [("x", tensor)])
    assert torch.equal(load_file(tmp_path / "file")["x"], tensor)
    write_tensors(tmp_path / "empty", {}, [])
    assert load_file(tmp_path / "empty") == {}


def test_what_does_not_fit_the_layout_is_refused(tmp_path):
    layout = {"a": torch.zeros(2), "b": torch.zeros(3)}
    with pytest.raises(ValueError, match=r"file: b did not come"):
        write_tensors(tmp_path / "file", layout, [("a", torch.zeros(2))])
    for wrong in (("a", torch.zeros(3)), ("a", torch.zeros(2).double()), ("c", torch.zeros(2))):
        with pytest.raises(ValueError, match=rf"{wrong[0]} came with shape .* as torch.float"):
            write_tensors(tmp_path / "file", layout, [wrong])
    with pytest.raises(TypeError, match=r"z has numbers of torch.complex128"):
        write_tensors(tmp_path / "file", {"z": torch.zeros(2, dtype=torch.complex128)}, [])
