"""The transport of a run on a Ray cluster without a folder that all nodes see: calls of the actors that own processes.

Each process works in a folder of its node (`prl/launch/host.py`). A batch is written there by its rank's actor, and the
trainer publishes there as it does in a run directory. New weights go from the node of the first rank to each node that
has an engine, which loads them from a file in memory.
"""

import asyncio
import contextlib
import shutil
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import ray
import ray.exceptions
import ray.util

from prl.base.files import naming, step_name, writing
from prl.rollouts.messages import StepBatch
from prl.transport.events import ENGINE, TRAINER
from prl.transport.files import FileTransport

WEIGHTS, BATCHES = "weights", "batches"
"""Folders of a run that are carried by calls of their own."""
LOG = "log"
"""The path of the output of an actor's process."""
CHUNK = 16 * 2**20
"""Bytes of a file that one call carries."""
AHEAD = 4
"""Chunks that are asked for before they are needed."""


class RayTransport(FileTransport):
    """The orchestrator's side; a rank's side is a `FileTransport` in the folder of its node."""

    needs_shared_folder: ClassVar[bool] = False

    def __init__(self, run_dir: Path):
        super().__init__(run_dir)
        self._metrics: dict[int, Any] = {}
        """By version, what the first rank's actor answers once that is published."""
        self._found: list[Any] = []
        self._nodes: dict[Any, str] = {}
        """Ids of their nodes, by actor."""

    @property
    def ranks(self) -> list[Any]:
        """The actors of the ranks; none before they are placed. They stay the same."""
        if not self._found:
            self._found = hosts(TRAINER)
        return self._found

    def close(self) -> None:
        self._found = []
        self._metrics = {}
        self._nodes = {}

    def send_batch(self, batch: StepBatch, rank: int) -> None:
        super().send_batch(batch, rank)  # the run directory has it too, for `orchestrator.keep_batches`
        self._pass_on(self.batch_path(batch.step, rank), self.ranks[rank])

    def discard_batch(self, step: int) -> None:
        super().discard_batch(step)
        for host in self.ranks:
            host.remove.remote(f"{BATCHES}/{step_name(step)}")

    def send_end(self, last_step: int) -> None:
        super().send_end(last_step)
        for host in self.ranks:
            self._pass_on(self._end, host)

    def _pass_on(self, file: Path, host: Any) -> None:
        ray.get(host.write.remote(str(file.relative_to(self.run_dir)), file.read_bytes()))

    def receive_metrics(self, version: int) -> dict[str, float] | None:
        if not self.ranks:
            return None
        first, name = self.ranks[0], step_name(version)
        with contextlib.suppress(ray.exceptions.RayActorError):  # the launcher says that the rank is lost
            if version not in self._metrics:
                data = ray.get(first.published_now.remote(name))
                self._metrics[version] = first.published.remote(name) if data is None else ray.put(data)
            if ready([self._metrics[version]]):
                return dict(msgspec.json.decode(ray.get(self._metrics.pop(version))))
        return None

    async def deliver(self, version: int) -> str:
        name = step_name(version)
        await asyncio.to_thread(distribute, name, self.ranks[0], self._nodes)
        return name  # in the folder where an engine's actor has started it

    def weights_path(self, version: int) -> Path:
        path = super().weights_path(version)
        if not path.exists():
            copy_folder(self.ranks[0], f"{WEIGHTS}/{path.name}", path)
        return path

    def discard_weights(self, version: int) -> None:
        shutil.rmtree(super().weights_path(version), ignore_errors=True)
        for host in [*self.ranks[:1], *hosts(ENGINE)]:
            host.remove.remote(f"{WEIGHTS}/{step_name(version)}")


def hosts(kind: str) -> list[Any]:
    """The actors of this run whose processes have names that begin with `kind`, by their numbers."""
    names = [name for name in ray.util.list_named_actors() if name.startswith(kind)]
    return [ray.get_actor(name) for name in sorted(names, key=lambda name: (len(name), name))]


def ready(answers: list[Any]) -> bool:
    """Return whether all calls have been answered, or have failed."""
    return len(ray.wait(answers, num_returns=len(answers), timeout=0)[0]) == len(answers) if answers else True


def distribute(version: str, source: Any, nodes: dict[Any, str]) -> None:
    """Have each engine's actor get the weights of a version: from its own node, where that has them, else over the net.

    An actor that is lost is left out: its engine gets them when it is started again. `nodes` has the ids of the nodes
    of actors that are known; others are added.
    """
    holders: dict[str, tuple[Any, Any]] = {}
    copies = []
    for host in [source, *hosts(ENGINE)]:
        with contextlib.suppress(ray.exceptions.RayActorError):
            if host not in nodes:
                nodes[host] = ray.get(host.node.remote()).id
            holder, arrived = holders.get(nodes[host], (source, None))
            if host != source:
                arrived = host.fetch.remote(version, holder, arrived)
                copies.append(arrived)
            holders.setdefault(nodes[host], (host, arrived))
    for copy in copies:
        with contextlib.suppress(ray.exceptions.RayActorError):
            ray.get(copy)


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
