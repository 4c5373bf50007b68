"""prl's transfer engine for vLLM's weight-transfer interface: a worker receives the policy from the trainer.

Workers load this module as that of their extension, and so have the engine under its name. vLLM's own NCCL engine does
the same on GPUs alone, through a TCP store that asks nobody who it is and whose values are unpickled; here a CPU runs
the code that a GPU runs. Written for the version of vLLM in `_vllm_internals.py`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from prl.inference import _vllm_internals
from prl.inference.server import TRANSFER
from prl.wire.buckets import TensorSpec, buckets, view_of
from prl.wire.meeting import meet
from prl.wire.peers import Peers, TransferFailed

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker

Tensors = Iterator[tuple[str, torch.Tensor]]


@dataclass
class Meeting(WeightTransferInitInfo):
    """Where a worker meets the trainer and all other workers."""

    store: str
    world_size: int
    rank_offset: int
    """Peers before the workers of this server."""
    timeout_s: float


@dataclass
class Update(WeightTransferUpdateInfo):
    """What is going to be sent, in its order: name, number format and shape of each tensor."""

    tensors: list[tuple[str, str, list[int]]]
    bucket_bytes: int
    timeout_s: float


class TransferEngine(WeightTransferEngine[Meeting, Update]):
    """Receives buckets of tensors, and hands tensor after tensor to `load`."""

    init_info_cls, update_info_cls = Meeting, Update
    supports_draft_weight_update = False
    peers: Peers | None = None
    load: Callable[[Tensors], None]
    """Loads them into the model of this worker."""
    keeps = False
    """Whether `load` keeps tensors beyond the next one: then each is a copy."""

    def init_transfer_engine(self, init_info: Meeting) -> None:
        self.shutdown()
        config = self.parallel_config
        rank = init_info.rank_offset + config.data_parallel_index * config.world_size + config.rank
        self.peers = meet(
            init_info.store, rank, init_info.world_size, device=self.device, timeout_s=init_info.timeout_s
        )

    def start_weight_update(self) -> None:
        """Nothing: `load` does all of it."""

    def finish_weight_update(self) -> None:
        """Nothing, likewise."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":  # where there is nothing to wait for, and torch raises
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Update) -> None:
        self.load(self.received(update_info))

    def received(self, update: Update) -> Tensors:
        """The tensors as they come."""
        assert self.peers is not None
        self.peers.timeout_s = update.timeout_s
        specs = [TensorSpec(name, cast("Any", dtype), tuple(shape)) for name, dtype, shape in update.tensors]
        cut, coming = list(buckets(specs, update.bucket_bytes)), []
        memory = self.peers.buffers(cut)
        for number, bucket in enumerate(cut):
            packed = memory[number % 2][: bucket[-1].stop]
            coming.append((bucket, packed, self.peers.broadcast(packed)))
            if len(coming) > 1:
                yield from self._of(*coming.pop(0))
        for last in coming:
            yield from self._of(*last)

    def _of(self, bucket: Any, packed: torch.Tensor, work: Any) -> Tensors:
        assert self.peers is not None
        self.peers.wait(work)
        for place in bucket:
            tensor = view_of(packed, place)
            yield place.spec.name, tensor.clone() if self.keeps else tensor
        self.peers.let_go(work)

    def shutdown(self) -> None:
        if self.peers is not None:
            self.peers.close()
            self.peers = None


class PolicyWorker(_vllm_internals.PolicyWorker):
    """Worker extension: loads new policy weights, from files or from the trainer."""

    def join_transfer(self, meeting: dict[str, Any]) -> str | None:
        """Meet the peers, unless this worker has; what kept it from that, None where nothing did."""
        worker = cast("Worker", self)
        engine = cast(TransferEngine, worker.weight_transfer_engine)
        if engine.peers is not None and engine.peers.store == meeting["store"]:
            return None
        try:
            worker.init_weight_transfer_engine(meeting)
        except TransferFailed as error:
            return str(error)
        return None

    def receive_policy(self, update: dict[str, Any]) -> str | None:
        """Load what the trainer sends; what kept it from coming, None where nothing did.

        Unless it returns None, the weights are neither the old nor the new ones.
        """
        worker = cast("Worker", self)
        engine = cast(TransferEngine, worker.weight_transfer_engine)
        engine.load, engine.keeps = self.load_tensors, self.packed_layers is None
        try:
            worker.start_weight_update()
            worker.update_weights(update)
            worker.finish_weight_update()
        except TransferFailed as error:
            engine.shutdown()
            return str(error)
        return None

    def load_tensors(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load tensors in Hugging Face names."""
        worker = cast("Worker", self)
        self.load_from(tensors, lambda: worker.reload_weights(weights_iterator=tensors))


WeightTransferEngineFactory.register_engine(TRANSFER, TransferEngine)
