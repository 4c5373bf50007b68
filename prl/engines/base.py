"""The interface between a run and the engines of its models: a class for each option of the group `engine`.

A class of `Engine` has everything that a run asks of an engine: its options (`Config`), what they are refused for,
the process of a server and the reason of its end, the memory that it takes, and its clients. No other package knows an
engine by name.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge, Le

from prl.base.errors import ConfigError
from prl.config.build import Seconds, class_of
from prl.config.environment import model_environment
from prl.config.gpus import Gpus, visible_devices
from prl.config.hardware import Machine
from prl.config.model_folder import sees_at
from prl.config.model_reference import FrozenModelConfig
from prl.config.model_shape import NUMBER_BYTES, ModelShape
from prl.config.schema import EngineConfig, ModelConfig

if TYPE_CHECKING:  # an HTTP client, which composing a config does without
    from prl.engines.client import PolicyPool
    from prl.engines.frozen import ReferencePool
    from prl.rollouts.pictures import PictureStore


@dataclass
class ServerConfig(EngineConfig):
    """The options of every engine that is a server, asked over HTTP."""

    in_process: ClassVar[bool] = False
    host: str = "127.0.0.1"
    """Address the servers bind to. Any but loopback opens them to the network; requests still need the run's token."""
    port: Annotated[int, Ge(1), Le(65535)] | None = None
    """TCP port of the first server; further servers take the next ones. null = free ports."""
    servers: Annotated[int, Ge(1), Le(1024)] = 1
    """Servers to start, each with a whole model (data parallel) and GPUs of its own."""
    urls: list[str] = field(default_factory=list)
    """Base URLs of prl servers that already run, with this run's token in PRL_TOKEN; empty = start `servers`."""
    startup_timeout_s: Seconds = 600.0
    """Deadline for the servers to answer, seconds."""
    restarts: Annotated[int, Ge(0)] = 1
    """Number of restarts of each server that dies during a run; one more death ends the run. The server loads the
    newest weights, and its open requests are sent again. Servers of `urls` are not restarted."""


@dataclass
class InProcessConfig(EngineConfig):
    """The options of an engine in the process of the run: a launcher starts none, and no HTTP client reaches it."""

    in_process: ClassVar[bool] = True
    servers: ClassVar[int] = 0
    urls: ClassVar[Sequence[str]] = ()
    port: ClassVar[None] = None
    startup_timeout_s: ClassVar[float] = 600.0


@dataclass(frozen=True)
class Adapters:
    """The room for adapters beside a model."""

    count: int
    """Those that are there at once."""
    rank: int
    """Largest rank of one."""


@dataclass(frozen=True)
class EngineSpec:
    """A model to run."""

    process: str
    """Name of its process in messages and of its log."""
    served_name: str
    """The name that requests give the model."""
    model: ModelConfig
    """The model, its path and number format resolved for the machine."""
    config: Any
    """The options of the engine."""
    device: str
    """`cpu` or `cuda`."""
    seed: int
    token: str
    """The token that requests have to show."""
    log: Path
    """The file for the output of its process."""
    frozen: bool = False
    """It takes no new weights."""
    threads: int = 1
    """Threads that it computes with on the CPU."""
    gpus: Gpus = ()
    """The GPUs that it sees; none on a CPU, or where the launcher chooses."""
    evaluation_yields: bool = False
    """Requests have priorities, so that those of an evaluation beside training come last."""
    adapters: Adapters | None = None
    """It serves adapters (LoRA) beside the model, each to the requests that name it."""
    weight_transfer: str = "prl"
    """The name of what takes new weights in, in each process of a server (`Weights.receiver`)."""
    pictures: "PictureStore | None" = None
    """The store of the pictures that its clients are shown; None = none are."""

    @property
    def sees(self) -> bool:
        """Return whether the model has a vision tower."""
        return sees_at(self.model.path)

    @property
    def server(self) -> "type[ServerEngine]":
        """The class of the engine, which is one of servers."""
        return class_of(self.config, ServerEngine, "engine")


@dataclass(frozen=True)
class EngineMemory:
    """The memory of an engine on each of its devices."""

    parts: dict[str, float]
    """Bytes by part."""
    cache_tokens: int | None = None
    """Tokens that its KV cache has room for; None where it has no cache of a fixed size."""


Serve = Callable[[], list[str]]
"""Starts the servers of a model, each where it belongs, and returns their URLs before they are ready."""
Connect = Callable[[FrozenModelConfig], "ReferencePool"]
"""Makes a client of a frozen model that is run, for a reference to it."""


class Engine(ABC):
    """A way to run models. Its clients have the interface of `prl.engines.client`."""

    Config: ClassVar[type[EngineConfig]]
    """The dataclass of its options."""
    adds_adapters: ClassVar[bool] = False
    """It loads an adapter (LoRA) in peft's format, added to the weights that it began with, as a policy."""
    largest_adapter: ClassVar[int] = 0
    """Largest rank of the adapters that it serves beside the model (`EngineSpec.adapters`); 0 = it serves none."""
    receives_weights: ClassVar[bool] = False
    """Its client has `receive_weights`: its servers take a policy's tensors from the trainer, without files."""
    has_priorities: ClassVar[bool] = False
    """Its servers can be asked to answer requests by their priority (`EngineSpec.evaluation_yields`)."""

    def __init__(self, **options: Any):
        """Take options, which are the fields of `Config`."""
        self.config = self.Config(**options)

    @classmethod  # noqa: B027
    def check(cls, config: Any, prefix: str, machine: Machine) -> None:
        """Raise ConfigError for options that do not go together. Their types and bounds were looked at.

        Args:
            config: The options.
            prefix: The beginning of the engine's keys, "" or "teacher.".
            machine: The machine that it computes on.
        """

    @classmethod
    def fault_of(cls, model_type: str, device: str) -> str | None:
        """Return what the engine does wrong with a kind of model, as the end of a refusal; None if nothing.

        Args:
            model_type: The kind of model, by transformers' name.
            device: `cpu` or `cuda`.
        """
        return None

    @classmethod
    def lacks(cls, device: str, *, pictures: bool = False) -> str | None:
        """Return what is missing on this machine, and how to get it; None if nothing.

        Args:
            device: The device that it would compute on, `cpu` or `cuda`.
            pictures: Its model sees pictures.
        """
        return None

    @classmethod
    def memory(
        cls, config: Any, shape: ModelShape, dtype: str, *, gpu_bytes: float | None, updated: bool
    ) -> EngineMemory:
        """Predict the memory that it holds on each of its devices.

        Args:
            config: The options.
            shape: The sizes of the model.
            dtype: The number format of its weights there.
            gpu_bytes: The memory of each GPU, bytes; None where it runs on a CPU.
            updated: It takes the weights of a policy that is trained.
        """
        # An update lies beside the weights until it has been copied into them.
        weights = float(shape.parameters * NUMBER_BYTES[dtype])
        return EngineMemory({"weights": weights, "update": weights} if updated else {"weights": weights})

    @classmethod
    def with_tools(cls, config: Any, renderer: str | None) -> Any:
        """Return the options with which replies have tool calls. Raises ConfigError where that cannot be.

        Args:
            config: The options.
            renderer: The renderer of the model's family; None = not known.
        """
        raise ConfigError(f"tools=true: {cls.__name__} reads no tool calls: choose engine=default")

    @classmethod
    @abstractmethod
    def policy(cls, spec: EngineSpec, serve: Serve) -> "PolicyPool":
        """Start the policy and return its client, before it is ready.

        Args:
            spec: The model, with the engine's options.
            serve: Starts its servers, where it has some.
        """

    @classmethod
    @abstractmethod
    def frozen(cls, spec: EngineSpec, serve: Serve) -> Connect:
        """Start a frozen model; returns a function that makes its clients. `spec` and `serve` are as for `policy`."""


class ServerEngine(Engine):
    """An engine whose servers a launcher starts, or that run already, asked over HTTP (`prl.engines.protocol`)."""

    Config = ServerConfig

    @classmethod
    @abstractmethod
    def command(cls, spec: EngineSpec, port: int) -> list[str]:
        """Return the command line of a server that listens on `port`."""

    @classmethod
    def environment(cls, spec: EngineSpec) -> dict[str, str]:
        """Return the environment variables of a server."""
        from prl.engines.protocol import (  # msgspec, which composing a config does without
            FROZEN_VARIABLE,
            TOKEN_VARIABLE,
        )

        return model_environment(spec.model, spec.threads) | {
            TOKEN_VARIABLE: spec.token,
            FROZEN_VARIABLE: "1" if spec.frozen else "",
            **visible_devices(spec.gpus),
        }

    @classmethod
    def explain(cls, lines: Sequence[str]) -> str:
        """Return the reason that the last lines of a server's log give for its end; empty where they give none."""
        return ""

    @classmethod
    def policy(cls, spec: EngineSpec, serve: Serve) -> "PolicyPool":
        from prl.engines.client import InferencePool

        # A server that somebody else has started is not restarted: nobody waits for it to come back.
        restarted = spec.config.restarts and not spec.config.urls
        restart_s = spec.config.startup_timeout_s if restarted else 0.0
        # Servers that outlive the run may be asked by another one at the same time.
        shared = bool(spec.config.urls)
        return InferencePool(
            serve(), spec.served_name, spec.token, shared=shared, restart_s=restart_s, pictures=spec.pictures
        )

    @classmethod
    def frozen(cls, spec: EngineSpec, serve: Serve) -> Connect:
        from prl.engines.frozen import FrozenPool

        # Started here, once: each reference to the model gets a client of the same servers.
        urls = [f"{url}/v1" for url in serve()]
        return lambda reference: FrozenPool(
            replace(reference, base_url=urls, api_key_var=None), spec.token, spec.pictures
        )
