"""The interface between a run and the engines of its models: a class for each option of the group `engine`."""

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
    """The options of the engine."""
    device: str
    """`cpu` or `cuda`."""
    seed: int
    token: str
    """The token that requests need."""
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
    """A way to run models. Its clients have the interface of `prl.engines.client`."""

    adds_adapters: ClassVar[bool] = False
    """Whether it loads an adapter (LoRA) in peft's format, added to the weights that it began with, as a policy."""

    @classmethod
    @abstractmethod
    def policy(cls, spec: EngineSpec, serve: Serve) -> "PolicyPool":
        """Start the policy and return its client, before it is ready."""

    @classmethod
    @abstractmethod
    def frozen(cls, spec: EngineSpec, serve: Serve) -> Connect:
        """Start a frozen model; returns a function that makes its clients."""
