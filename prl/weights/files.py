"""Weights as files of the run directory, which all processes see."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from prl.weights.base import Policy, Weights

if TYPE_CHECKING:
    from prl.engines.client import PolicyPool


@dataclass(kw_only=True, eq=False)
class FileWeights(Weights):
    """The trainer writes a folder for each version, and every engine reads it."""

    needs_shared_folder: ClassVar[bool] = True

    def publish(self, version: int, tensors: Policy, folder: Path | None) -> None:
        tensors.write(folder)

    async def load(self, engine: "PolicyPool", version: int, timeout_s: float) -> None:
        path = self.transport.weights_path(version).resolve()
        await engine.update_weights(version, str(path), timeout_s)
