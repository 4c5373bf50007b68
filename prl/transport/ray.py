"""The transport of a run on a Ray cluster without a folder that all nodes see: calls of the actors that own processes.

Each process works in a folder of its node (`prl/launch/host.py`). A batch is written there by its rank's actor, and the
trainer publishes there as it does in a run directory.
"""

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
import ray.util

from prl.base.files import naming, step_name, writing
from prl.rollouts.messages import StepBatch
from prl.transport.events import ENGINE, TRAINER
from prl.transport.files import BATCHES, WEIGHTS, FileTransport

LOG = "log"
"""The path of the output of an actor's process."""
CHUNK = 16 * 2**20
"""Bytes of a file that one call carries."""
AHEAD = 4
"""Chunks that are asked for before they are needed."""


class RayTransport(FileTransport):
    """The orchestrator's side; a rank's side is a `FileTransport` in the folder of its node."""

    def __init__(self, run_dir: Path):
        super().__init__(run_dir)
        self._awaited: dict[str, Any] = {}
        """By path, what the first rank's actor answers once that file is there: asking again and again takes longer."""
        self._found: list[Any] = []

    @property
    def ranks(self) -> list[Any]:
        """The actors of the ranks; none before they are placed. They stay the same."""
        if not self._found:
            self._found = hosts(TRAINER)
        return self._found

    def close(self) -> None:
        self._found = []
        self._awaited = {}

    def send(self, path: str, data: bytes) -> None:
        super().send(path, data)
        ray.get([host.write.remote(path, data) for host in self.ranks])

    def receive(self, path: str) -> bytes | None:
        if not self.ranks:
            return None
        first = self.ranks[0]
        with contextlib.suppress(ray.exceptions.RayActorError):  # the launcher says that the rank is lost
            if path not in self._awaited:
                data = ray.get(first.content.remote(path))
                self._awaited[path] = first.awaited.remote(path) if data is None else ray.put(data)
            if ready([self._awaited[path]]):
                content: bytes = ray.get(self._awaited.pop(path))
                return content
        return None

    def send_batch(self, batch: StepBatch, rank: int) -> None:
        super().send_batch(batch, rank)  # the run directory has it too, for `orchestrator.keep_batches`
        file = self.batch_path(batch.step, rank)
        ray.get(self.ranks[rank].write.remote(str(file.relative_to(self.run_dir)), file.read_bytes()))

    def discard_batch(self, step: int) -> None:
        super().discard_batch(step)
        for host in self.ranks:
            host.remove.remote(f"{BATCHES}/{step_name(step)}")

    def weights_path(self, version: int) -> Path:
        path = super().weights_path(version)
        if not path.exists():
            copy_folder(self.ranks[0], f"{WEIGHTS}/{path.name}", path)
        return path

    def discard_weights(self, version: int) -> None:
        super().discard_weights(version)
        for host in [*self.ranks, *hosts(ENGINE)]:
            host.remove.remote(f"{WEIGHTS}/{step_name(version)}")


def hosts(kind: str) -> list[Any]:
    """The actors of this run whose processes have names that begin with `kind`, by their numbers."""
    names = [name for name in ray.util.list_named_actors() if name.startswith(kind)]
    return [ray.get_actor(name) for name in sorted(names, key=lambda name: (len(name), name))]


def ready(answers: list[Any]) -> bool:
    """Return whether all calls have been answered, or have failed."""
    return len(ray.wait(answers, num_returns=len(answers), timeout=0)[0]) == len(answers) if answers else True


def copy_folder(host: Any, folder: str, final: Path) -> None:
    """Copy a folder from the run directory of an actor's process; it appears whole or not at all.

    Raises FileNotFoundError where it is gone, also meanwhile.
    """
    copy_files(host, folder, ray.get(host.sizes.remote(folder)), final)


def copy_files(host: Any, folder: str, sizes: dict[str, int], final: Path) -> None:
    """Copy files of a folder, as `copy_folder` does. `sizes`: of each file in bytes, by its path in the folder."""
    if not sizes:
        raise FileNotFoundError(f"{folder} is gone")
    with naming(final), writing(final) as target:
        for path in sizes:
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            (target / path).touch()
        for path, piece in pieces(host, {f"{folder}/{path}": (0, size) for path, size in sizes.items()}):
            with (target / Path(path).relative_to(folder)).open("ab") as file:
                file.write(piece)


def pieces(host: Any, parts: Mapping[str, tuple[int, int]]) -> Iterator[tuple[str, memoryview]]:
    """Yield what files of an actor's process have from one place to another, by path; a few pieces are asked for
    ahead."""
    asked = deque[tuple[str, Any]]()
    for path, (start, end) in parts.items():
        for offset in range(start, end, CHUNK):
            asked.append((path, host.read.remote(path, offset, min(CHUNK, end - offset))))
            if len(asked) > AHEAD:
                yield arrived(asked)
    while asked:
        yield arrived(asked)


def arrived(asked: deque[tuple[str, Any]]) -> tuple[str, memoryview]:
    """The path and content of the piece that was asked for first."""
    path, answer = asked.popleft()
    return path, memoryview(ray.get(answer))
