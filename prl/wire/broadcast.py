"""The transport whose weights pass from process to process, without a disk and without a whole copy of the model.

Batches and metrics are files, as are the weights that a run goes on from. After each step the trainer waits until the
engines have its weights, or the orchestrator lets it train on; a batch that is there already waits, too.
"""

from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Le

from prl.wire.files import FileTransport
from prl.wire.transfers import Transfers

MIB = 2**20


class BroadcastTransport(FileTransport):
    """Batches as files, weights from the trainer's first rank to the workers of all engines at once."""

    transfers: Transfers

    def __init__(self, run_dir: Path, *, bucket_mb: Annotated[int, Ge(1), Le(2**20)] = 64):
        super().__init__(run_dir)
        self.transfers = Transfers(self.run_dir / "weights" / "transfer", bucket_mb * MIB)
