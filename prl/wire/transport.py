"""The interface between orchestrator and trainer: batches one way, policy versions and metrics the other."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prl.wire.messages import StepBatch


class Transport(ABC):
    """Carries batches from the orchestrator to the trainer ranks, and policy versions back.

    Either side makes an instance of its own with `run_dir`: the orchestrator begins, a rank joins, and both close it.
    Every call but `join` returns at once: a receiver gets None until the message is there as a whole, and asks for no
    message again that it has. Version n is the policy after step n, 0 the base model. A sender that raises has sent
    nothing.
    """

    def __init__(self, run_dir: Path):
        self.run_dir = Path(run_dir)

    def begin(self, host: str, ranks: int, *, keep_batches: bool = False) -> Mapping[str, Any]:
        """Begin, as the orchestrator, before the trainer is started. Raises PrlError where that cannot be done.

        Args:
            host: address of this machine that all ranks reach.
            ranks: how many there are.
            keep_batches: whether what is sent is to stay in the run directory, for a replay.

        Returns:
            What each rank needs to join, as JSON has it. It is secret.
        """
        return {}

    def join(self, invitation: Mapping[str, Any], rank: int) -> None:  # noqa: B027
        """Begin as a rank, with what `begin` has returned, while the orchestrator tends its side.

        Raises PrlError where that cannot be done, or the orchestrator is not reached.
        """

    def tend(self) -> None:  # noqa: B027
        """Keep connections going, as the orchestrator: called some times a second, but for an engine's restart.

        Raises PrlError for what has come that is damaged.
        """

    def close(self) -> None:  # noqa: B027
        """End, on either side."""

    @abstractmethod
    def send_batch(self, batch: "StepBatch", rank: int) -> None:
        """Send one rank's share of a step."""

    @abstractmethod
    def receive_batch(self, step: int, rank: int) -> "StepBatch | None":
        """The batch of `step` for `rank`, None while it has not arrived. Raises PrlError for one that is damaged."""

    @abstractmethod
    def discard_batch(self, step: int) -> None:
        """Free the room that the batches of `step` take, for all ranks; a step that has none is no error."""

    @abstractmethod
    def send_end(self, last_step: int) -> None:
        """Tell the trainer that `last_step`, whose batch has been sent, is the last one."""

    @abstractmethod
    def receive_end(self) -> int | None:
        """The last step of a run that ends early, None as long as more batches may follow."""

    @abstractmethod
    def publish(
        self, version: int, metrics: dict[str, float], write_weights: Callable[[Path], None] | None = None
    ) -> None:
        """Publish a policy version.

        Args:
            version: the training step that made it.
            metrics: the trainer's metrics of that step.
            write_weights: writes a Hugging Face model into the folder that it is given; None = the base model.
        """

    @abstractmethod
    def receive_metrics(self, version: int) -> dict[str, float] | None:
        """The metrics published with `version`, None while it has not been published."""

    @abstractmethod
    def weights_path(self, version: int) -> Path:
        """The folder from which an engine loads the weights of a published `version`."""

    @abstractmethod
    def discard_weights(self, version: int) -> None:
        """Free the room that the weights of `version` take; a version that has none is no error."""
