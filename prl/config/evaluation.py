"""The typed root of an evaluation's config: `python -m prl.eval`, and of `python -m prl.tools.chat`."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from omegaconf import MISSING

from prl.config.build import Seconds
from prl.config.schema import EnvConfig, RunConfig


@dataclass
class EvalModelConfig:
    """Settings of the targets' models; null = as the run that made the checkpoint, or the model's own."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None
    """Number format of the engine's weights."""
    max_model_len: Annotated[int, Ge(2)] | None = None
    """Longest sequence, prompt and completion together, tokens."""
    renderer: str | None = None
    """Renderer that `renderer=auto` picks."""
    trust_remote_code: bool | None = None
    """Run code that comes with the models."""


@dataclass
class EndpointConfig:
    """Targets that are URLs: servers that already run, and exchange token ids, as `python -m prl.serve` does."""

    name: str | None = None
    """The model's name there; null = the only model of the server."""
    tokenizer: str | None = None
    """The model's folder or hub name, for its tokenizer; null = the endpoint's answer."""
    api_key_var: str | None = None
    """Environment variable that holds the endpoint's key; null = no key is sent."""
    timeout_s: Seconds = 30.0
    """Deadline for the endpoint to answer, seconds."""


@dataclass
class EvaluationConfig:
    """An evaluation without training. Nodes that are `Any` name a class each, with its options."""

    run: RunConfig = field(default_factory=RunConfig)
    seed: Annotated[int, Ge(0), Le(2**32 - 1)] = 0
    """Seed of sampling."""
    targets: list[str] = field(default_factory=list)
    """Models to evaluate: arguments without `key=`. The others are compared with the first."""
    k: Annotated[int, Ge(1)] = 8
    """Samples of each task."""
    num_tasks: Annotated[int, Ge(1)] = 64
    """Held-out tasks of each env."""
    correct_at: float = 1.0
    """An episode is correct, for pass@k, if its reward is at least this."""
    model: EvalModelConfig = field(default_factory=EvalModelConfig)
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)
    renderer: Any = MISSING
    envs: dict[str, EnvConfig] = field(default_factory=dict)
    sampling: Any = MISSING
    engine: Any = MISSING
    launcher: Any = MISSING
    monitor: dict[str, Any] = field(default_factory=dict)
    """Monitors by name: each is shown every target's metrics, the first as step 0."""
