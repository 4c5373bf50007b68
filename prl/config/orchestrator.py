"""Options of the orchestrator."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt

from prl.base.errors import ConfigError
from prl.config.build import Seconds
from prl.config.schema import as_run


@dataclass(kw_only=True)
class EvalConfig:
    """Periodic evaluation on held-out tasks; never filtered, never trained on."""

    every: Annotated[int, Ge(1)] | None = 20
    """Steps between evaluations; also before the first step and after the last. null = no evaluation."""
    num_tasks: Annotated[int, Ge(1)] = 64
    """Held-out tasks of each env."""
    k: Annotated[int, Ge(1)] = 1
    """Samples of each task; the metric is their mean, `eval/<env>/avg@k`."""
    mode: Literal["pause", "beside"] = "pause"
    """pause: no rollout starts while an evaluation runs. beside: training goes on, and servers of the run answer its
    requests first. Weights change meanwhile: `eval/<env>/version_{min,max}` are the versions that answered. The first
    and the last version are evaluated alone."""
    sampling: dict[str, Any] = field(default_factory=as_run)
    """Sampling settings of the evaluation; null = those of training."""
    keep_best: bool = False
    """Keep the version with the highest held-out reward as `checkpoints/best`."""


@dataclass(kw_only=True)
class StopConfig:
    """When a run ends before `max_steps`. Batches that were shipped are trained on, and the last version is evaluated.

    The held-out reward is `eval/<env>/avg@<k>`, its mean over envs.
    """

    target: float | None = None
    """Early stopping: held-out reward at which the run ends; null = none."""
    patience: Annotated[int, Ge(1)] | None = None
    """Early stopping: end the run after so many evaluations in a row without a new highest held-out reward;
    null = never."""
    time_budget_s: Annotated[float, Gt(0)] | None = None
    """Seconds of training, without the start of the servers, until the run ends; null = no limit."""


@dataclass(kw_only=True)
class OrchestratorConfig:
    """Turns tasks into batches and keeps generation and training in step."""

    _target_: str = "prl.orchestrator.orchestrator.Orchestrator"
    _partial_: bool = True
    batch_size: Annotated[int, Ge(1)] | None = 256
    """Rollouts in a step's batch. Exactly one of this and `token_batch_size`."""
    token_batch_size: Annotated[int, Ge(1)] | None = None
    """Tokens in a step's batch: groups are added until it is reached. null = `batch_size` counts."""
    group_size: Annotated[int, Ge(1)] = 4
    """Rollouts of one task."""
    mix: Literal["weights", "arrival"] = "weights"
    """Mix of envs in a batch. weights: an env has at most its share by weight plus 0.15 of the batch, as long as groups
    of other envs are in flight. arrival: the groups that finish first."""
    max_async_level: Annotated[int, Ge(0)] = 1
    """k: steps that sampling runs ahead of training; 0 = synchronous and on-policy. Rollouts that start from policy
    version v are for steps up to v+1+k."""
    strict_async_level: bool = False
    """The rollouts of step n start from exactly version n-1-k, where k is `max_async_level` (version 0 in
    the first steps). The staleness limit is then k."""
    max_off_policy_steps: Annotated[int, Ge(0)] = 8
    """Staleness limit: most policy versions between a rollout's start and its training; staler rollouts never train. If
    the limit is above `max_async_level`, a full batch trains at once, and slow rollouts train later. If it is equal, a
    step waits for the rollouts that the next step could not train on. A limit below is refused; `max_async_level=0` and
    `strict_async_level` set it to `max_async_level`."""
    oversampling_factor: Annotated[float, Ge(1)] = 1.0
    """Rollouts in flight, as a multiple of those that a batch needs. Above 1 a full batch does not wait for slow
    rollouts; if `max_off_policy_steps` is `max_async_level`, rollouts too stale for the next step are dropped."""
    batch_timeout_s: Seconds = 1800.0
    """Deadline for a batch to fill, seconds."""
    policy_timeout_s: Seconds = 1800.0
    """Deadline for the trainer to deliver a policy version, seconds."""
    max_error_share: Annotated[float, Ge(0), Lt(1)] = 0.5
    """Share of an env's last 256 rollouts that may fail before the run ends with the reason."""
    batcher: dict[str, Any] = field(
        default_factory=lambda: {"_target_": "prl.orchestrator.batcher.Batcher", "_partial_": True}
    )
    """Holds finished groups until a batch is cut: which groups a step trains on."""
    keep_batches: bool = False
    """Keep the batches for the trainer under `batches/`, one msgpack file a step and rank."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    stop: StopConfig = field(default_factory=StopConfig)

    @property
    def exact_age(self) -> bool:
        """Return whether all rollouts of a step are `max_async_level` versions old."""
        return self.strict_async_level or not self.max_async_level

    @property
    def age_limit(self) -> int:
        """`max_off_policy_steps` as it is applied: `max_async_level` where that is exact."""
        return self.max_async_level if self.exact_age else self.max_off_policy_steps

    @property
    def on_evaluations(self) -> list[str]:
        """The options that are set and look at evaluations."""
        stops = [f"stop.{name}" for name in ("target", "patience") if getattr(self.stop, name) is not None]
        return stops + ["eval.keep_best"] * self.eval.keep_best

    def check(self, where: str) -> None:
        """Raise ConfigError for options that contradict each other."""
        sizes = {"batch_size": self.batch_size, "token_batch_size": self.token_batch_size}
        if sum(size is not None for size in sizes.values()) != 1:
            raise ConfigError(
                f"set exactly one of {where}.batch_size and {where}.token_batch_size (the other null); got {sizes}"
            )
        if self.on_evaluations and self.eval.every is None:
            raise ConfigError(
                f"{where}.{self.on_evaluations[0]} looks at evaluations: set {where}.eval.every, which is null"
            )
        if self.on_evaluations and self.eval.mode == "beside":
            raise ConfigError(
                f"{where}.{self.on_evaluations[0]} judges one version, and with {where}.eval.mode=beside several may "
                f"answer an evaluation: leave one of the two out"
            )
        if self.max_async_level > self.max_off_policy_steps:
            raise ConfigError(
                f"{where}.max_off_policy_steps={self.max_off_policy_steps} is below {where}.max_async_level="
                f"{self.max_async_level}: rollouts of a full pipeline would be too old to train. Set "
                f"{where}.max_off_policy_steps={self.max_async_level} or more"
            )
