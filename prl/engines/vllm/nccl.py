"""Sending by vLLM's own NCCL, between GPUs.

Written for the version of vLLM in `worker.py`. Imported where it is used: it imports vLLM.
"""

import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
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
        tensors: by name, on this process's GPU or in host memory.
        offer: tells the engine where it is to meet this process.
    """
    with socket.create_server((address, 0)) as free:  # vLLM opens the port itself
        port = free.getsockname()[1]
    init = NCCLTrainerInitInfo(address, port, size, rank=0)
    # The engine is told of all four phases at once, with the first.
    client: Any = SimpleNamespace(
        init_weight_transfer_engine=offer,
        start_weight_update=lambda: None,
        update_weights=lambda update_info: None,
        finish_weight_update=lambda: None,
    )
    source = Source(described, ((name, tensor.cuda()) for name, tensor in tensors))
    engine = NCCLTrainerWeightTransferEngine.trainer_init(init, client=client, source=source)
    engine.send_weights()
    engine.shutdown()
