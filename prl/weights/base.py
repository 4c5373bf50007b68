"""The interface of a way that policy versions take from the trainer to the engines."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from prl.transport.files import FileTransport

if TYPE_CHECKING:  # torch and an HTTP client, which composing a config does without
    import torch

    from prl.engines.client import PolicyPool


class Policy(Protocol):
    """The trainer's model as engines load it: under the names of its files, in their number format, adapters merged.

    A rank has a part of each tensor. To gather them is a collective: all ranks must do it, in the same order.
    """

    @property
    def described(self) -> list[tuple[str, "torch.dtype", list[int]]]:
        """The name, number format and shape of each tensor, which does not change while the trainer runs."""

    def __iter__(self) -> Iterator[tuple[str, "torch.Tensor"]]:
        """Gather one tensor after the other, with its name."""

    def write(self, folder: Path | None) -> None:
        """Write a folder that engines load; with None, only take part in the gathering."""


@dataclass(kw_only=True, eq=False)
class Weights(ABC):
    """Brings policy versions to the engines. The orchestrator and every rank of the trainer make an instance each.

    The constructor takes options alone. `attach` comes before everything else.
    """

    needs_shared_folder: ClassVar[bool] = False
    """All machines of the run must see its directory."""
    needs_ray: ClassVar[bool] = False
    """The launcher must be one that places processes on a Ray cluster."""
    writes_model: ClassVar[bool] = True
    """A published version is a folder with the model, which others than its engines may read."""
    transport: FileTransport = field(init=False, repr=False)

    @property
    def receiver(self) -> str:
        """The name of what takes them in, in a process of the engine: prl's own takes folders, and tensors by gloo."""
        return "prl"

    def attach(self, transport: FileTransport, *, rank: int = 0, workers: int = 1) -> None:
        """Take the way that messages go.

        Args:
            transport: to the other side.
            rank: in the trainer, this process's.
            workers: in the trainer, the processes that each engine computes with.
        """
        self.transport = transport

    # --- every rank of the trainer ---

    @abstractmethod
    def publish(self, version: int, tensors: Policy, folder: Path | None) -> None:
        """Make a new version ready. A collective.

        Args:
            version: the training step that made it.
            tensors: the weights, which stay as they are until a batch is there after `hold`.
            folder: on the first rank, that of the version: what is written here appears with it; None on others.
        """

    def hold(self, version: int) -> None:  # noqa: B027
        """Wait until the engines no longer need the trainer to have `version`, which it has published last."""

    def serve(self, version: int) -> None:  # noqa: B027
        """Look whether an engine that was started again needs `version`; called before a batch changes the weights."""

    def serve_to_the_end(self, version: int) -> None:  # noqa: B027
        """As `serve`, for the last version: until the run is over."""

    # --- the orchestrator ---

    @abstractmethod
    async def load(self, engine: "PolicyPool", version: int, timeout_s: float) -> None:
        """Have all servers of the policy load a published version, and those that are started again later.

        Raises DeadlinePassed or EngineError where one that lives has not loaded it after `timeout_s` seconds.
        """

    def end(self) -> None:  # noqa: B027
        """Tell the trainer that no engine needs weights any more."""
