"""Sending by vLLM's own NCCL, between GPUs.

Written for the version of vLLM in `worker.py`. Imported where it is used: it imports vLLM.
"""

import socket
from collections.abc import Callable, Iterator
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

Described = list[tuple[str, torch.dtype, list[int]]]


class Source(WeightSource):
    """Tensors as vLLM asks for them, once."""

    def __init__(self, described: Described, tensors: Iterator[tuple[str, torch.Tensor]]):
        self.described = described
        self.tensors = tensors

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, dtype, tuple(shape)) for name, dtype, shape in self.described]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.tensors


class Client:
    """The engine, as vLLM's sender asks it: `offer` has it told of all phases at once, with the first."""

    def __init__(self, offer: Callable[[dict[str, Any]], None]):
        self.init_weight_transfer_engine = offer

    def start_weight_update(self) -> None:
        """Nothing more to tell."""

    def update_weights(self, update_info: Any) -> None:
        """Nothing more to tell."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Nothing more to tell."""


def send(
    address: str,
    size: int,
    described: Described,
    tensors: Iterator[tuple[str, torch.Tensor]],
    offer: Callable[[dict[str, Any]], None],
) -> None:
    """Send tensors to the GPUs of one engine.

    Args:
        address: of this machine, for the engine's.
        size: the processes of the engine and this one.
        described: the name, number format and shape of each tensor.
        tensors: by name, on this process's GPU.
        offer: tells the engine where it is to meet this process.
    """
    with socket.create_server((address, 0)) as free:  # vLLM opens the port itself
        port = free.getsockname()[1]
    init = NCCLTrainerInitInfo(address, port, size, rank=0)
    source = Source(described, tensors)
    engine = NCCLTrainerWeightTransferEngine.trainer_init(init, client=Client(offer), source=source)
    engine.send_weights()
    engine.shutdown()
