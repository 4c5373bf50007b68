"""The trainer's side of weights that pass to the engines between two steps, tensor by tensor, in buckets.

All ranks gather a tensor, in the engines' number format; the first one packs and sends it. Which of sending and
training comes next the first rank decides, and tells the others.
"""

import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from prl.errors import PrlError
from prl.text import as_message, in_one_line
from prl.trainer.weights import layout_of, whole_tensors
from prl.wire.buckets import Place, TensorSpec, buckets, view_of
from prl.wire.events import BATCH, EXPORTING, Lane
from prl.wire.exchange import Answer, Layout, Loaded, Order
from prl.wire.meeting import meet
from prl.wire.peers import Peers, TransferFailed
from prl.wire.transfers import Transfers

POLL_S = 0.002
BEHIND_S = 60.0
"""By which the other ranks wait longer for the first one than that waits itself, whose error says more, seconds."""
Next = Literal["send", "train", "end"]
NEXT: list[Next] = ["send", "train", "end"]
"""What all ranks do next: as numbers, what the first rank tells the others."""


def specs_of(model: PreTrainedModel, dtype: torch.dtype) -> list[TensorSpec]:
    """What `bucketed` sends of a model, in its order."""
    return [
        TensorSpec(name, str(each.dtype).removeprefix("torch."), tuple(each.shape))  # type: ignore[arg-type]
        for name, each in layout_of(model, dtype)
    ]


def bucketed(
    model: PreTrainedModel, dtype: torch.dtype, cut: Sequence[list[Place]], memory: Sequence[torch.Tensor]
) -> "Iterator[torch.Tensor | None]":
    """The weights as packed buckets of bytes, gathered one tensor at a time; without memory for them, None for each.

    `cut` are the buckets of the model's `specs_of`, and `memory` the two buffers that they are packed into in turn.

    Raises:
        PrlError: A weight is not finite in `dtype`.
    """
    tensors = whole_tensors(model, dtype)
    for number, bucket in enumerate(cut):
        packed = memory[number % len(memory)][: bucket[-1].stop] if memory else None
        for place in bucket:
            name, tensor = next(tensors)
            assert name == place.spec.name
            if packed is not None:
                view_of(packed, place).copy_(tensor)
        if packed is not None:
            refuse_not_finite(packed, bucket)
        yield packed


def refuse_not_finite(packed: torch.Tensor, bucket: list[Place]) -> None:
    """Raise PrlError, naming the tensor, where a number in a packed bucket is NaN or infinite."""
    sums = torch.stack([view_of(packed, place).sum(dtype=torch.float32) for place in bucket])
    if sums.isfinite().all():
        return
    for place in bucket:  # finite tensors may have an infinite sum
        if bad := int((~view_of(packed, place).isfinite()).sum()):
            raise PrlError(f"{bad} numbers of {place.spec.name} are NaN or infinite in {place.spec.dtype}: not sent")


class Sender:
    """One rank's part in the transfers of a run.

    Between two steps it sends what it has wherever that is ordered, and trains on once the engines have its version, or
    the orchestrator does not mind. A transfer that fails leaves it as it was: it waits for the next order.
    """

    def __init__(
        self, transfers: Transfers, model: PreTrainedModel, dtype: torch.dtype, device: torch.device, lane: Lane
    ):
        self.transfers, self.model, self.dtype, self.device, self.lane = transfers, model, dtype, device, lane
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.peers: Peers | None = None
        self.version = self._first = 0
        """The version that the model is, and the one that the engines had from the beginning."""
        self._spent_s = 0.0
        self._cut: list[list[Place]] = []
        """The buckets of what is sent, which does not change."""
        self._ordered = 0
        """Number of the last order."""
        self._group: Any = None
        """Of all ranks, where there are several: what the first one tells the others passes there."""

    def begin(self, version: int, timeout_s: float) -> None:
        """The engines have `version` by other ways. All ranks call this; `timeout_s` is the longest of any `until`."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(timeout=timedelta(seconds=timeout_s + BEHIND_S), backend="gloo")
        self.version = self._first = version
        specs = specs_of(self.model, self.dtype)
        self._cut = list(buckets(specs, self.transfers.bucket_bytes))
        if self.rank == 0:
            device: Any = self.device.type
            self.transfers.write(Layout(device, self.transfers.bucket_bytes, specs))

    def until(self, ready: Callable[[], bool], timeout_s: float, what: str, *, last: bool = False) -> None:
        """Serve orders until `ready`, and the version that is here need not wait for one.

        Args:
            ready: whether this rank has what it waits for. Of several ranks it is the first one's that counts.
            timeout_s: deadline, seconds.
            what: for the message.
            last: no step follows; the other ranks end.

        Raises:
            PrlError: What was waited for, at the deadline.
        """
        if self.rank:
            while self._hear() == "send":
                self._stream(None, [])
            return
        deadline = time.monotonic() + timeout_s
        while True:
            self._serve()
            free = last or self._free()
            if free and ready():
                return self._say("end" if last else "train")
            if time.monotonic() > deadline:
                said = what if free else f"the engines did not take policy version {self.version}"
                raise PrlError(f"{said} within {timeout_s:g} s")
            time.sleep(POLL_S)

    def once_loaded(self, write: Callable[[int], None], timeout_s: float) -> "functools.partial[None]":
        """`write`, called once the engines have what is here: they need not wait for a disk."""
        return functools.partial(self._write, write, timeout_s)

    def _write(self, write: Callable[[int], None], timeout_s: float, step: int) -> None:
        self.until(lambda: True, timeout_s, "")
        write(step)

    def spent(self) -> float:
        """Seconds spent on transfers since this was asked last."""
        seconds, self._spent_s = self._spent_s, 0.0
        return seconds

    def _free(self) -> bool:
        """Whether the version that is here may be gone with the next step."""
        loaded = self.transfers.read(Loaded)
        have = self._first if loaded is None else loaded.version
        return have >= self.version or self.transfers.passes or self.transfers.ended

    def _say(self, what: Next) -> None:
        """Have the other ranks do the same."""
        if self._group is not None:
            dist.broadcast(torch.tensor(NEXT.index(what)), 0, group=self._group)

    def _hear(self) -> Next:
        """What the first rank says. Raises PrlError where it is gone, or says nothing in time."""
        said = torch.tensor(0)
        try:
            dist.broadcast(said, 0, group=self._group)
        except RuntimeError as error:
            raise PrlError(f"the trainer's first rank did not say what follows: {in_one_line(error)}") from error
        return NEXT[int(said)]

    def _serve(self) -> None:
        """Answer an order that is new, and send."""
        order = self.transfers.read(Order)
        if order is None or order.number == self._ordered:
            return
        self._ordered = order.number
        self.transfers.write(Answer(order.number, self.version))
        began = time.monotonic()
        self.lane.enter(EXPORTING, self.version)
        try:
            peers = self._join(order)
            memory = peers.buffers(self._cut)
            self._say("send")
            self._stream(peers, memory)
        except TransferFailed as error:
            self.transfers.call_off(order.store)
            self._leave()
            print(as_message(f"policy version {self.version} was not sent: {error}"), file=sys.stderr, flush=True)
        self.lane.enter(BATCH, self.version + 1)
        self._spent_s += time.monotonic() - began

    def _join(self, order: Order) -> Peers:
        """The peers of an order: those of before where they are the same."""
        if self.peers is None or self.peers.store != order.store:
            self._leave()
            self.peers = meet(order.store, 0, order.world_size, device=self.device, timeout_s=order.timeout_s)
        self.peers.timeout_s = order.timeout_s
        return self.peers

    def _leave(self) -> None:
        if self.peers is not None:
            self.peers.close()
            self.peers = None

    def _stream(self, peers: Peers | None, memory: Sequence[torch.Tensor]) -> None:
        """Gather everything, a collective, and send it to `peers`: one bucket is on its way while the next is packed.

        Raises TransferFailed after all ranks have done their part.
        """
        failed: TransferFailed | None = None
        under_way: list[Any] = []
        for packed in bucketed(self.model, self.dtype, self._cut, memory):
            if peers is None or packed is None or failed is not None:
                continue
            try:
                if under_way:
                    peers.wait(under_way.pop()[0])
                under_way.append((peers.broadcast(packed), packed))
            except TransferFailed as error:
                failed = error
        try:
            if peers is not None and failed is None and under_way:
                peers.wait(under_way.pop()[0])
        except TransferFailed as error:
            failed = error
        if dist.is_initialized():
            dist.barrier()  # a rank that shares nothing with the first might else miss that something was sent
        if failed is not None:
            raise failed
