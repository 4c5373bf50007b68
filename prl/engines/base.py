"""The seam between a run and what runs its models: a class for each way, which an `engine` node names."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from prl.config.gpus import Gpus
from prl.config.model_reference import FrozenModelConfig
from prl.config.schema import ModelConfig

if TYPE_CHECKING:  # an HTTP client, which composing a config does without
    from prl.engines.client import PolicyPool
    from prl.engines.frozen import ReferencePool


@dataclass(frozen=True)
class EngineSpec:
    """A model to run."""

    process: str
    """Name of its process in messages and of its log."""
    served_name: str
    """The name that requests give the model."""
    model: ModelConfig
    """With a path and a number format that are resolved for the machine."""
    config: Any
    """The options of the engine: its `engine` node."""
    device: str
    """`cpu` or `cuda`."""
    seed: int
    token: str
    """What a request has to show."""
    log: Path
    frozen: bool = False
    """Whether it takes no new weights."""
    threads: int = 1
    """Threads that it computes with on the CPU."""
    gpus: Gpus = ()
    """Those that it sees."""


Serve = Callable[[EngineSpec], list[str]]
"""Starts the servers of a model, each where it belongs, and returns their URLs before they are ready."""
Connect = Callable[[FrozenModelConfig], "ReferencePool"]
"""Makes a client of a frozen model that is run, for a reference to it."""


class Engine(ABC):
    """A way to run models. What it makes is asked as `prl.engines.client` says."""

    adds_adapters: ClassVar[bool] = False
    """Whether it loads an adapter (LoRA) in peft's format, added to the weights that it began with, as a policy."""

    @classmethod
    @abstractmethod
    def policy(cls, spec: EngineSpec, serve: Serve) -> "PolicyPool":
        """Run the policy, of which the client is returned before it is ready."""

    @classmethod
    @abstractmethod
    def frozen(cls, spec: EngineSpec, serve: Serve) -> Connect:
        """Run a frozen model; returns what makes its clients."""
