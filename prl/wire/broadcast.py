"""The transport that needs no disk: messages and weights pass from process to process, without a copy of the model.

Batches, their end, versions with their metrics and what a transfer of weights takes pass over TCP, encrypted, between
the orchestrator, which listens, and each rank (`session.py`). The run directory has what outlasts the run, the weights
that it goes on from, and the files by which peers meet. After each step the trainer waits until the engines have its
weights, or the orchestrator lets it train on; a batch that is there already waits, too.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from annotated_types import Ge, Le

from prl.wire.exchange import Batch, End, Exchange, FromOrchestrator, FromRank, Published
from prl.wire.files import FileTransport
from prl.wire.messages import StepBatch
from prl.wire.transfers import Transfers

MIB = 2**20
POLL_S = 0.002


class BroadcastTransport(FileTransport):
    """Messages over sockets, weights from the trainer's first rank to the workers of all engines at once.

    On neither side of a run, where a replay makes it, it reads the batches that the run has kept.
    """

    transfers: Transfers

    def __init__(self, run_dir: Path, *, bucket_mb: Annotated[int, Ge(1), Le(2**20)] = 64):
        super().__init__(run_dir)
        self.transfers = Transfers(self.run_dir / "weights" / "transfer", bucket_mb * MIB)
        self.ranks, self.keeps = 0, False

    # --- its two sides ---

    def begin(self, host: str, ranks: int, *, keep_batches: bool = False) -> dict[str, Any]:
        from prl.wire.session import OrchestratorEnd

        self.transfers.begin()
        end = OrchestratorEnd(host, ranks)
        self.ranks, self.keeps, self.transfers.exchange = ranks, keep_batches, Exchange(end, FromRank)
        return dict(msgspec.to_builtins(end.invitation))

    def join(self, invitation: Mapping[str, Any], rank: int) -> None:
        from prl.wire.curve import Invitation
        from prl.wire.session import RankEnd

        end = RankEnd(msgspec.convert(invitation, Invitation), rank)
        self.transfers.exchange = Exchange(end, FromOrchestrator)
        while not end.answered:
            self.tend()
            time.sleep(POLL_S)

    def tend(self) -> None:
        if self.is_side:
            self.transfers.exchange.look()

    def close(self) -> None:
        if self.is_side:
            self.transfers.exchange.end.close()

    @property
    def is_side(self) -> bool:
        """Whether this is a side of a run."""
        return hasattr(self.transfers, "exchange")

    # --- messages ---

    def send_batch(self, batch: StepBatch, rank: int) -> None:
        if self.keeps:
            super().send_batch(batch, rank)
        self.transfers.exchange.post(Batch(batch), rank)

    def receive_batch(self, step: int, rank: int) -> StepBatch | None:
        return self.transfers.exchange.take_batch(step) if self.is_side else super().receive_batch(step, rank)

    def discard_batch(self, step: int) -> None:
        """It is kept nowhere."""

    def send_end(self, last_step: int) -> None:
        for rank in range(self.ranks):
            self.transfers.exchange.post(End(last_step), rank)

    def receive_end(self) -> int | None:
        said = self.transfers.exchange.read(End)
        return None if said is None else said.last_step

    def publish(
        self, version: int, metrics: dict[str, float], write_weights: Callable[[Path], None] | None = None
    ) -> None:
        if write_weights is not None:
            super().publish(version, metrics, write_weights)
        self.transfers.exchange.post(Published(version, msgspec.json.encode(metrics)))

    def receive_metrics(self, version: int) -> dict[str, float] | None:
        said = self.transfers.exchange.take_metrics(version)
        return None if said is None else dict(msgspec.json.decode(said))
