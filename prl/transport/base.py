"""The interface between orchestrator and trainer: batches one way, policy versions and metrics the other."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prl.rollouts.messages import StepBatch


class Transport(ABC):
    """Carries batches from the orchestrator to the trainer ranks, and policy versions back.

    Either side makes an instance of its own with `run_dir`, and closes it. Every call returns at once: a receiver gets
    None until the message is there as a whole, and asks for no message again that it has. Version n is the policy after
    step n, 0 the base model. A sender that raises has sent nothing.
    """

    def __init__(self, run_dir: Path):
        self.run_dir = Path(run_dir)

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

    async def deliver(self, version: int) -> str:
        """Have the weights of a published `version` where the engines are; return the path that they load them from."""
        return str(self.weights_path(version).resolve())

    @abstractmethod
    def weights_path(self, version: int) -> Path:
        """The folder on this machine with the weights of a published `version`; it may take the time to copy them."""

    @abstractmethod
    def discard_weights(self, version: int) -> None:
        """Free the room that the weights of `version` take; a version that has none is no error."""
