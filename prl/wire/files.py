"""Files of a run directory, and the transport made of them. A file or folder appears whole or not at all.

batches/step_000001/rank_0.msgpack        orchestrator -> trainer
batches/end.json                          orchestrator -> trainer: the last step, where a run ends early
weights/step_000001/{model.safetensors, config.json, generation_config.json, metrics.json}    trainer -> orchestrator
"""

import contextlib
import errno
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from prl.errors import UNREADABLE, PrlError, mark_written
from prl.wire.messages import StepBatch
from prl.wire.transport import Transport

T = TypeVar("T")


def step_name(step: int) -> str:
    """Name of a step's folder; names sort as the steps do."""
    return f"step_{step:06d}"


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have what keeps `path` from being written raise an OSError that names it, whichever library writes it."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:  # a library's own error says what it is about
            mark_written(error, str(path))
        raise
    except Exception as error:
        if found := re.search(r"\(os error (\d+)\)", str(error)):  # as libraries written in Rust have it
            raise mark_written(OSError(int(found[1]), os.strerror(int(found[1]))), str(path)) from error
        raise


def write_atomically(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Write `path` so that a reader sees all of it or nothing; `durable`: also after a crash of the machine."""
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.{os.getpid()}")
    with naming(path):
        if folder and not os.path.isdir(folder):
            os.makedirs(folder, exist_ok=True)
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):  # where it could not even be made
                os.unlink(temporary)
            raise


def regular(path: Path) -> Path:
    """`path` itself, to be read. Raises OSError for what is no regular file: a reader of a FIFO waits for ever."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(number, os.strerror(number) if number == errno.EISDIR else "Not a regular file", str(path))
    return path


def is_within(folder: Path, name: str) -> bool:
    """Whether `name`, of a list of a folder's files, stays in that folder, with what it links to."""
    if {"..", "/"} & {*Path(name).parts} or "\0" in name:
        return False
    own = Path(os.path.realpath(folder))
    blobs = own.parent.parent / "blobs"  # the files of the hub's cache are links to there
    place = Path(os.path.realpath(own / name))
    return place.is_relative_to(own) or place.is_relative_to(blobs)


def content_of(path: Path) -> bytes:
    """What a file holds that may not be there yet. Raises PrlError where it cannot be read."""
    try:
        return regular(path).read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise PrlError(f"{path} cannot be read: {error.strerror or error}") from error


def remove(folder: str) -> None:
    """Remove a folder and what is in it, as far as possible; one that is not there is no error."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            for name in os.listdir(descriptor):
                os.unlink(name, dir_fd=descriptor)
        finally:
            os.close(descriptor)
        os.rmdir(folder)
    except FileNotFoundError:
        pass
    except OSError:  # there are folders in it, or it is none
        shutil.rmtree(folder, ignore_errors=True)


def announce(folder: Path, final: Path) -> None:
    """Make the finished `folder` visible under its final name."""
    shutil.rmtree(final, ignore_errors=True)
    os.replace(folder, final)


class FileTransport(Transport):
    """Messages as files below `run_dir`, which every process of the run must be able to read and write."""

    def __init__(self, run_dir: Path):
        super().__init__(run_dir)
        # As text: a receiver looks hundreds of times a second, and a Path takes longer to make than to look for.
        self._batches, self._weights = str(self.run_dir / "batches"), str(self.run_dir / "weights")
        self._end = f"{self._batches}/end.json"

    def batch_path(self, step: int, rank: int) -> Path:
        """The file that holds one rank's batch."""
        return Path(self._batch(step, rank))

    def _batch(self, step: int, rank: int) -> str:
        return f"{self._batches}/{step_name(step)}/rank_{rank}.msgpack"

    def send_batch(self, batch: StepBatch, rank: int) -> None:
        write_atomically(self.batch_path(batch.step, rank), msgspec.msgpack.encode(batch))

    def receive_batch(self, step: int, rank: int) -> StepBatch | None:
        return _read(self._batch(step, rank), "a batch", lambda data: msgspec.msgpack.decode(data, type=StepBatch))

    def discard_batch(self, step: int) -> None:
        remove(f"{self._batches}/{step_name(step)}")

    def send_end(self, last_step: int) -> None:
        write_atomically(Path(self._end), msgspec.json.encode({"last_step": last_step}))

    def receive_end(self) -> int | None:
        return _read(self._end, "the last step", lambda data: int(msgspec.json.decode(data)["last_step"]))

    def publish(
        self, version: int, metrics: dict[str, float], write_weights: Callable[[Path], None] | None = None
    ) -> None:
        folder = self.run_dir / "weights" / f".{step_name(version)}"
        try:
            with naming(self.weights_path(version)):
                folder.mkdir(parents=True, exist_ok=True)
                if write_weights is not None:
                    write_weights(folder)
                (folder / "metrics.json").write_bytes(msgspec.json.encode(metrics))
                announce(folder, self.weights_path(version))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def receive_metrics(self, version: int) -> dict[str, float] | None:
        path = f"{self._weights}/{step_name(version)}/metrics.json"
        return _read(path, "metrics", lambda data: dict(msgspec.json.decode(data)))

    def weights_path(self, version: int) -> Path:
        return Path(self._weights, step_name(version))

    def discard_weights(self, version: int) -> None:
        remove(f"{self._weights}/{step_name(version)}")


def _read(path: str, what: str, decode: Callable[[bytes], T]) -> T | None:
    """What a file holds, None where it is not there. Raises PrlError, naming it, where it does not hold `what`."""
    try:
        os.stat(path)
        return decode(regular(Path(path)).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, *UNREADABLE, LookupError, TypeError) as error:
        raise PrlError(f"{path} does not hold {what}: {error}") from error
