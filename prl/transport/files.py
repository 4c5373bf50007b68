"""The transport made of files of a run directory. A file or folder appears whole or not at all.

batches/step_000001/rank_0.msgpack        orchestrator -> trainer
batches/end.json                          orchestrator -> trainer: the last step, where a run ends early
weights/step_000001/{model.safetensors, config.json, generation_config.json, metrics.json}    trainer -> orchestrator
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, TypeVar

import msgspec

from prl.base.errors import UNREADABLE, PrlError
from prl.base.files import naming, step_name, write_atomically, writing
from prl.rollouts.messages import StepBatch

T = TypeVar("T")


class FileTransport:
    """Carries batches from the orchestrator to the trainer ranks, and policy versions back: as files below `run_dir`,
    which every process of the run must be able to read and write. Other transports extend it.

    Either side makes an instance of its own, and closes it. Every call returns at once: a receiver gets None until the
    message is there as a whole, and asks for no message again that it has. Version n is the policy after step n, 0 the
    base model. A sender that raises has sent nothing.
    """

    needs_shared_folder: ClassVar[bool] = True
    """Whether weights reach engines and ranks by a folder that all machines of the run see."""

    def __init__(self, run_dir: Path):
        self.run_dir = Path(run_dir)
        self._end = self.run_dir / "batches" / "end.json"

    def batch_path(self, step: int, rank: int) -> Path:
        """The file that holds one rank's batch."""
        return self.run_dir / "batches" / step_name(step) / f"rank_{rank}.msgpack"

    def close(self) -> None:
        """End, on either side."""

    def weights_path(self, version: int) -> Path:
        """The folder on this machine with the weights of a published `version`; it may take the time to copy them."""
        return self.run_dir / "weights" / step_name(version)

    async def deliver(self, version: int) -> str:
        """Have the weights of a published `version` where the engines are; return the path that they load them from."""
        return str(self.weights_path(version).resolve())

    def send_batch(self, batch: StepBatch, rank: int) -> None:
        """Send one rank's share of a step."""
        write_atomically(self.batch_path(batch.step, rank), msgspec.msgpack.encode(batch))

    def receive_batch(self, step: int, rank: int) -> StepBatch | None:
        """The batch of `step` for `rank`, None while it has not arrived. Raises PrlError for one that is damaged."""
        path = self.batch_path(step, rank)
        return _read(path, "a batch", lambda data: msgspec.msgpack.decode(data, type=StepBatch))

    def discard_batch(self, step: int) -> None:
        """Free the room that the batches of `step` take, for all ranks; a step that has none is no error."""
        shutil.rmtree(self.run_dir / "batches" / step_name(step), ignore_errors=True)

    def send_end(self, last_step: int) -> None:
        """Tell the trainer that `last_step`, whose batch has been sent, is the last one."""
        write_atomically(self._end, msgspec.json.encode({"last_step": last_step}))

    def receive_end(self) -> int | None:
        """The last step of a run that ends early, None as long as more batches may follow."""
        return _read(self._end, "the last step", lambda data: int(msgspec.json.decode(data)["last_step"]))

    def publish(
        self, version: int, metrics: dict[str, float], write_weights: Callable[[Path], None] | None = None
    ) -> None:
        """Publish a policy version.

        Args:
            version: the training step that made it.
            metrics: the trainer's metrics of that step.
            write_weights: writes a Hugging Face model into the folder that it is given; None = the base model.
        """
        final = self.weights_path(version)
        with naming(final), writing(final) as folder:
            if write_weights is not None:
                write_weights(folder)
            (folder / "metrics.json").write_bytes(msgspec.json.encode(metrics))

    def receive_metrics(self, version: int) -> dict[str, float] | None:
        """The metrics published with `version`, None while it has not been published."""
        path = self.weights_path(version) / "metrics.json"
        return _read(path, "metrics", lambda data: dict(msgspec.json.decode(data)))

    def discard_weights(self, version: int) -> None:
        """Free the room that the weights of `version` take; a version that has none is no error."""
        shutil.rmtree(self.weights_path(version), ignore_errors=True)


def _read(path: Path, what: str, decode: Callable[[bytes], T]) -> T | None:
    """The message in a file, None where there is no file. Raises PrlError, naming it, where it does not hold `what`."""
    try:
        return decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, *UNREADABLE, LookupError, TypeError) as error:
        raise PrlError(f"{path} does not hold {what}: {error}") from error
