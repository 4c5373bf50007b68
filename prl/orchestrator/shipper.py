"""Send batches to the ranks of the trainer."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from prl.base.errors import PrlError
from prl.rollouts.messages import MicroBatch, StepBatch
from prl.rollouts.packing import pack
from prl.rollouts.rollout import Rollout
from prl.transport.files import FileTransport


@dataclass(eq=False)
class Shipper:
    """Packs each batch into rows and sends every rank its part."""

    transport: FileTransport
    seq_len: int
    """Tokens in a packed row."""
    ranks: int
    """Ranks that a batch is split over."""
    updates: int
    """Optimiser steps that a batch is cut into."""
    sending: bool = field(default=False, init=False)
    """Some ranks have their parts of a batch and others do not. It stays so where sending failed."""

    def pack(self, step: int, rollouts: Sequence[Rollout]) -> tuple[list[list[MicroBatch]], int]:
        """Return the rows of each rank, and the number of samples that were cut to fit."""
        samples = [sample for rollout in rollouts for sample in rollout.samples]
        try:
            return pack(samples, self.seq_len, self.ranks, self.updates)
        except ValueError as error:  # samples hold what the user's algorithm wrote
            raise PrlError(f"step {step}: {error}") from error

    def send(self, step: int, rows: list[list[MicroBatch]], truncated: int, *, checkpoint: bool) -> None:
        """Send the batch of `step`: the rows of each rank, which of them `truncated` samples were cut for.

        With `checkpoint` the trainer writes one after the step.
        """
        # While a rank lacks its part, those that have theirs wait for it: no last checkpoint would come.
        self.sending = True
        for rank, micro_batches in enumerate(rows):
            self.transport.send_batch(StepBatch(step, micro_batches, truncated, checkpoint), rank)
        self.sending = False

    def end(self, last_step: int) -> None:
        """Tell the trainer that no batch follows that of `last_step`."""
        self.transport.send_end(last_step)
