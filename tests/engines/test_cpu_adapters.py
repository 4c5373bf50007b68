"""Adapters on a CPU: what vLLM computes for the tokens of each, and nothing for those of the base."""

import pytest
import torch
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu

from prl.engines.vllm.cpu.adapters import read_each_once

NAMES = ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")


@pytest.fixture
def patched(monkeypatch):
    """Patch vLLM; returns the operations that it had."""
    had = {name: getattr(lora_ops, name) for name in NAMES}
    for module in (lora_ops, punica_cpu):
        for name in NAMES:
            monkeypatch.setattr(module, name, had[name])
    read_each_once()
    return had


@pytest.mark.parametrize(
    ("name", "columns", "more"),
    [
        ("bgmv_shrink", 8, (0.5,)),
        ("bgmv_expand", 6, (True,)),
        ("bgmv_expand", 8, (False,)),
        ("bgmv_expand_slice", 8, (1, 6, True)),
    ],
)
def test_the_operations_are_those_of_vllm_but_for_the_base(patched, name, columns, more):
    torch.manual_seed(0)
    inputs, weights, output = torch.randn(5, 4), torch.randn(3, 1, 6, 4), torch.randn(5, columns)
    places = torch.tensor([2, 0, 2, 1, 0])
    expected, before = output.clone(), output.clone()
    patched[name](inputs, weights, expected, places, *more)
    for module in (lora_ops, punica_cpu):
        found = before.clone()
        getattr(module, name)(inputs, weights, found, places, *more)
        torch.testing.assert_close(found, expected)
    places[[1, 3]] = -1
    getattr(lora_ops, name)(inputs, weights, output, places, *more)
    torch.testing.assert_close(output[[0, 2, 4]], expected[[0, 2, 4]])
    getattr(lora_ops, name)(inputs, weights, found, places[:2], *more)  # as the head is asked for a prompt's logprobs
    if more[-1] is True:
        assert torch.equal(output[[1, 3]], before[[1, 3]])
