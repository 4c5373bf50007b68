"""The transport made of files of a run directory. A file or folder appears whole or not at all.

batches/step_000001/rank_0.msgpack        orchestrator -> trainer
batches/end.json                          orchestrator -> trainer: the last step, where a run ends early
weights/step_000001/metrics.json          trainer -> orchestrator, beside what engines load the version from
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from prl.base.errors import UNREADABLE, PrlError
from prl.base.files import naming, step_name, write_atomically, writing
from prl.rollouts.messages import StepBatch

T = TypeVar("T")
WEIGHTS, BATCHES = "weights", "batches"
END = f"{BATCHES}/end.json"


class FileTransport:
    """Carries batches from the orchestrator to the trainer ranks, and policy versions back: as files below `run_dir`,
    which every process of the run must be able to read and write. Other transports extend it.

    Either side makes an instance of its own, and closes it. Every call returns at once: a receiver gets None until the
    message is there as a whole, and asks for no message again that it has. Version n is the policy after step n, 0 the
    base model. A sender that raises has sent nothing. Messages arrive in the order in which they were sent: a receiver
    that has one finds those from before.
    """

    def __init__(self, run_dir: Path):
        self.run_dir = Path(run_dir)
        self.sent = 0
        """The step of the last batch that was sent, to some rank at least."""

    def close(self) -> None:
        """End, on either side."""

    def send(self, path: str, data: bytes) -> None:
        """Send a message to all that are on the other side: every rank, or the orchestrator.

        Args:
            path: its name, a file below `run_dir`.
            data: its content.
        """
        write_atomically(self.run_dir / path, data)

    def receive(self, path: str) -> bytes | None:
        """Return the content of a message, of the first rank's to the orchestrator; None while it has not arrived."""
        try:
            return (self.run_dir / path).read_bytes()
        except FileNotFoundError:
            return None

    def batch_path(self, step: int, rank: int) -> Path:
        """The file that holds one rank's batch."""
        return self.run_dir / BATCHES / step_name(step) / f"rank_{rank}.msgpack"

    def send_batch(self, batch: StepBatch, rank: int) -> None:
        """Send one rank's share of a step."""
        # Before it arrives: from then on the trainer may change its weights.
        self.sent = batch.step
        write_atomically(self.batch_path(batch.step, rank), msgspec.msgpack.encode(batch))

    def receive_batch(self, step: int, rank: int) -> StepBatch | None:
        """The batch of `step` for `rank`, None while it has not arrived. Raises PrlError for one that is damaged."""
        path = f"{BATCHES}/{step_name(step)}/rank_{rank}.msgpack"
        return self._read(path, "a batch", lambda data: msgspec.msgpack.decode(data, type=StepBatch))

    def discard_batch(self, step: int) -> None:
        """Free the room that the batches of `step` take, for all ranks; a step that has none is no error."""
        shutil.rmtree(self.run_dir / BATCHES / step_name(step), ignore_errors=True)

    def send_end(self, last_step: int) -> None:
        """Tell the trainer that `last_step`, whose batch has been sent, is the last one."""
        self.send(END, msgspec.json.encode({"last_step": last_step}))

    def receive_end(self) -> int | None:
        """The last step of a run that ends early, None as long as more batches may follow."""
        return self._read(END, "the last step", lambda data: int(msgspec.json.decode(data)["last_step"]))

    def publish(self, version: int, metrics: dict[str, float], write: Callable[[Path], None] | None = None) -> None:
        """Publish a policy version.

        Args:
            version: the training step that made it.
            metrics: the trainer's metrics of that step.
            write: writes into the folder that it is given what engines load the version from; None = nothing, as of the
                base model.
        """
        final = self.run_dir / WEIGHTS / step_name(version)
        with naming(final), writing(final) as folder:
            if write is not None:
                write(folder)
            (folder / "metrics.json").write_bytes(msgspec.json.encode(metrics))

    def receive_metrics(self, version: int) -> dict[str, float] | None:
        """The metrics published with `version`, None while it has not been published."""
        path = f"{WEIGHTS}/{step_name(version)}/metrics.json"
        return self._read(path, "metrics", lambda data: dict(msgspec.json.decode(data)))

    def weights_path(self, version: int) -> Path:
        """The folder on this machine of a published `version`; it may take the time to copy it."""
        return self.run_dir / WEIGHTS / step_name(version)

    def discard_weights(self, version: int) -> None:
        """Free the room that a published `version` takes; one that has none is no error."""
        shutil.rmtree(self.run_dir / WEIGHTS / step_name(version), ignore_errors=True)

    def _read(self, path: str, what: str, decode: Callable[[bytes], T]) -> T | None:
        """A message, None while there is none. Raises PrlError, naming its file, where it does not hold `what`."""
        try:
            data = self.receive(path)
            return None if data is None else decode(data)
        except (OSError, *UNREADABLE, LookupError, TypeError) as error:
            raise PrlError(f"{self.run_dir / path} does not hold {what}: {error}") from error
