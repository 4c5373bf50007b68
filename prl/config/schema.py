"""Schemas of the nodes that belong to no single component, and the root of a run's config."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from prl.config.model_reference import FrozenModelConfig


@dataclass
class RunConfig:
    """Where a run lives."""

    name: str = MISSING
    """Directory name under `outputs/`."""
    dir: str = MISSING
    """Run directory, relative to where the command was typed."""


@dataclass
class ModelConfig:
    """The policy: its weights, its number format in the engine, and how its chat template is rendered."""

    path: str = MISSING
    """A local folder, or a model's name on the Hugging Face hub."""
    dtype: str = "auto"
    """Number format of the engine's weights: float32, bfloat16, float16; `auto` = float32 on a CPU, bfloat16 on a GPU.
    The trainer always keeps float32 master weights."""
    max_model_len: int = 4096
    """Longest sequence, prompt and completion together, tokens."""
    renderer: str | None = None
    """Renderer that `renderer=auto` picks for this model; null = by the tokenizer's name."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""


@dataclass
class RendererConfig:
    """How messages become tokens (the `renderers` package)."""

    name: str = "auto"
    """A renderer's name, e.g. qwen3; `auto` = `model.renderer`, else by the tokenizer's name."""
    args: dict[str, Any] = field(default_factory=dict)
    """That renderer's own settings, added as +renderer.args.thinking_retention=all."""


@dataclass
class TeacherConfig(FrozenModelConfig):
    """The frozen model that `algo=opd` scores with and `algo=sft` samples from, unless they name one of their own."""

    model: ModelConfig | None = None
    """A model for the launcher to host while the run lasts; null = `base_url` serves it already."""
    inference: Any = None
    """The hosting server's settings."""


@dataclass
class ServeConfig:
    """A frozen model served on its own: `python -m prl.serve`."""

    name: str = MISSING
    """Name it is served under."""
    model: ModelConfig = field(default_factory=ModelConfig)
    inference: Any = MISSING
    log: str = MISSING
    """File that the server's output goes to."""


@dataclass
class EnvConfig:
    """One environment: a verifiers taskset and its place in the run."""

    taskset: str = MISSING
    """An importable module, or the id of an installed verifiers taskset, that exports one `Taskset` in `__all__`."""
    args: dict[str, Any] = field(default_factory=dict)
    """The taskset's own config, for training tasks."""
    eval_args: dict[str, Any] | None = None
    """What differs from `args` for held-out evaluation tasks; null = this env is not evaluated."""
    weight: float = 1.0
    """Share of rollouts relative to the other envs."""
    group_size: int | None = None
    """Rollouts of one task; null = `orchestrator.group_size`."""
    timeout_s: float = 600.0
    """Deadline of one rollout, seconds."""
    group_timeout_s: float | None = None
    """Deadline of a whole group, seconds, the scoring of its rollouts included: what has not arrived by then has failed, and
    the group trains on the rest. Credit of the group as a whole has as long again. null = none."""
    algo: Any = None
    """An algorithm of this env's own; null = the run's."""


@dataclass
class TrainConfig:
    """A training run. Groups fill the nodes that are `Any` with the schema of the option chosen."""

    run: RunConfig = field(default_factory=RunConfig)
    seed: int = 0
    """Governs tasks, sampling and initialisation."""
    max_steps: int = 60
    """Training steps."""
    model: ModelConfig = field(default_factory=ModelConfig)
    renderer: RendererConfig = field(default_factory=RendererConfig)
    envs: dict[str, EnvConfig] = field(default_factory=dict)
    algo: Any = MISSING
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    loss: Any = MISSING
    filters: Any = MISSING
    buffer: Any = MISSING
    orchestrator: Any = MISSING
    trainer: Any = MISSING
    inference: Any = MISSING
    monitor: Any = MISSING

    def algo_of(self, env: str) -> tuple[str, Any]:
        """The algorithm that an env runs, as its config key and its node: an env's own replaces the run's."""
        own = self.envs[env].algo
        return ("algo", self.algo) if own is None else (f"envs.{env}.algo", own)

    def hosts(self, reference: FrozenModelConfig) -> bool:
        """Whether the launcher serves this frozen model for the run."""
        return self.teacher.model is not None and reference.base_url is None and reference.name == self.teacher.name
