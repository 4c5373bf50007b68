"""Weights from process to process, by the engine's four phases of a weight transfer: init, start, update, finish.

No folder holds the weights, and no process but an engine's all of them at once. The trainer keeps a version until the
engines have it, gathers one tensor after the other, and its first rank sends each on. An engine that is started again
gets the version of then from the trainer, while that waits for its next batch.

Ranks gather together, so they must agree on what is sent before which batch. An engine's request for version n is
`weights/step_n/1/asked`, counted from 1; `weights/step_n/loaded` says how many of them a rank serves before it goes on;
further ones may follow until the batch of step n+1 has been sent. The first rank answers `weights/step_n/1/offer`:
where the engine is to meet it, and the names and shapes of what comes. `weights/step_n/1/lost` says that it will not.
"""

import asyncio
import contextlib
import functools
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec

from prl.base.errors import EngineError
from prl.base.files import step_name
from prl.base.text import as_message, in_one_line
from prl.config.build import Seconds
from prl.transport.files import WEIGHTS, FileTransport
from prl.weights.base import Policy, Weights

if TYPE_CHECKING:
    import torch

    from prl.engines.client import PolicyPool

POLL_S = 0.002
OVER = f"{WEIGHTS}/over"
"""The message that no engine needs weights any more."""
ADDRESS_VARIABLE = "PRL_ADDRESS"
"""Environment variable of the trainer: its machine's address, for engines on others. Without it all are on one."""


@dataclass(kw_only=True, eq=False)
class TransferWeights(Weights):
    """The trainer's first rank sends the weights to each engine, by the engine's weight transfer."""

    backend: Literal["gloo", "nccl"] = "gloo"
    """gloo: over TCP, from host memory to host memory. nccl: the engine's own, between GPUs."""
    timeout_s: Seconds = 60.0
    """Deadline for trainer and engine to get each other's next tensor by gloo, seconds. An engine that has died is
    started again; one that lives and is too slow ends the run. nccl has a deadline of its own."""

    writes_model: ClassVar[bool] = False
    rank: int = field(default=0, init=False, repr=False)
    workers: int = field(default=1, init=False, repr=False)
    tensors: Policy = field(init=False, repr=False)
    described: list[Any] = field(default_factory=list, init=False, repr=False)
    served: int = field(default=0, init=False, repr=False)
    """In the trainer, the requests for the version that it holds which it has served."""
    requests: Counter[int] = field(default_factory=Counter, init=False, repr=False)
    """In the orchestrator, the number of requests for each version."""
    loaded: int = field(default=0, init=False, repr=False)
    """In the orchestrator, the version that the engines have loaded last."""

    @property
    def receiver(self) -> str:
        return "prl" if self.backend == "gloo" else self.backend

    def attach(self, transport: FileTransport, *, rank: int = 0, workers: int = 1) -> None:
        super().attach(transport)
        self.rank = rank
        self.workers = workers

    # --- every rank of the trainer ---

    def publish(self, version: int, tensors: Policy, folder: Path | None) -> None:
        self.tensors = tensors
        self.described = tensors.described  # on every rank: merging adapters, to see their shapes, is a collective
        self.served = 0

    def hold(self, version: int) -> None:
        while True:
            # In the reverse order of their sending: who sees one of them sees what was sent before it.
            over = self.transport.receive(OVER)
            loaded = self.transport.receive(f"{folder_of(version)}/loaded")
            if loaded is not None and self.served >= int(loaded):
                return
            if not self._serve_next(version):
                if over is not None:
                    return
                time.sleep(POLL_S)

    def serve(self, version: int) -> None:
        while version and self._serve_next(version):
            pass

    def serve_to_the_end(self, version: int) -> None:
        over = None
        while over is None:
            over = self.transport.receive(OVER)
            self.serve(version)
            time.sleep(POLL_S)

    def _serve_next(self, version: int) -> bool:
        """Serve the next request for a version, if there is one. Returns whether there was."""
        request = f"{folder_of(version)}/{self.served + 1}"
        if self.transport.receive(f"{request}/asked") is None:
            return False
        self.served += 1
        tensors = iter(self.tensors)
        if self.rank == 0:
            send = self._send_by_gloo if self.backend == "gloo" else self._send_by_nccl
            try:
                send(request, tensors)
            except (RuntimeError, OSError) as error:
                # The run goes on: its supervisor sees whether the engine has died, and starts it again.
                text = f"policy version {version}: an engine has not got it: {in_one_line(error)}"
                print(as_message(text), file=sys.stderr, flush=True)
        for _ in tensors:  # also where an engine was lost: the other ranks gather what is left
            pass
        return True

    def _send_by_gloo(self, request: str, tensors: Iterator[tuple[str, "torch.Tensor"]]) -> None:
        from prl.transport import gloo

        listener = gloo.listening(os.environ.get(ADDRESS_VARIABLE, "127.0.0.1"))
        place = dict(zip(("master_address", "master_port"), listener.getsockname()[:2], strict=True))
        size = 1 + self.workers
        secret = secrets.token_hex(16)
        self._offer(
            request, place | {"secret": secret, "rank_offset": 1, "world_size": size, "timeout_s": self.timeout_s}
        )
        lost = functools.partial(self.transport.receive, f"{request}/lost")
        group = gloo.gather(listener, secret, size, self.timeout_s, lambda: lost() is not None)
        for _, tensor in tensors:
            gloo.broadcast(group, tensor.cpu())
        gloo.part(group)

    def _send_by_nccl(self, request: str, tensors: Iterator[tuple[str, "torch.Tensor"]]) -> None:
        """Send by the engine's own sender, which asks for the four phases: the server has them in one request."""
        from prl.engines.vllm import nccl

        address = os.environ.get(ADDRESS_VARIABLE, "127.0.0.1")
        nccl.send(address, 1 + self.workers, self.described, tensors, functools.partial(self._offer, request))

    def _offer(self, request: str, init: dict[str, Any]) -> None:
        """Answer a request: the engine is to begin with `init`."""
        update = {
            "names": [name for name, _, _ in self.described],
            "dtype_names": [str(dtype).removeprefix("torch.") for _, dtype, _ in self.described],
            "shapes": [shape for _, _, shape in self.described],
        }
        self.transport.send(f"{request}/offer", msgspec.json.encode({"init": init, "update": update}))

    # --- the orchestrator ---

    async def load(self, engine: "PolicyPool", version: int, timeout_s: float) -> None:
        await engine.receive_weights(version, functools.partial(self._offered, version), timeout_s)
        self.loaded = version
        self.transport.send(f"{folder_of(version)}/loaded", str(self.requests[version]).encode())

    @contextlib.asynccontextmanager
    async def _offered(self, version: int) -> AsyncIterator[dict[str, Any]]:
        """Ask the trainer to send a version to one engine, which the block is to tell what is yielded."""
        while self.loaded >= version and self.transport.sent > version:  # the trainer may have begun to change it
            if self.transport.receive_metrics(version + 1) is not None:
                raise EngineError(f"policy version {version} is gone: the trainer has the next one")
            await asyncio.sleep(POLL_S)
        self.requests[version] += 1
        request = f"{folder_of(version)}/{self.requests[version]}"
        self.transport.send(f"{request}/asked", b"")
        try:
            while (offer := self.transport.receive(f"{request}/offer")) is None:  # noqa: ASYNC110  it is looked for
                await asyncio.sleep(POLL_S)
            yield msgspec.json.decode(offer)
        except BaseException:
            self.transport.send(f"{request}/lost", b"")  # else the trainer would wait for the engine until its deadline
            raise

    def end(self) -> None:
        self.transport.send(OVER, b"")


def folder_of(version: int) -> str:
    """The folder of a version's messages."""
    return f"{WEIGHTS}/{step_name(version)}"
