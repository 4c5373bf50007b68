"""Config of the orchestrator."""

from dataclasses import dataclass, field


@dataclass
class EvalConfig:
    """Periodic evaluation on held-out tasks; never filtered, never trained on."""

    every: int | None = 20
    """Steps between evaluations; also before the first step and after the last. null = no evaluation."""
    num_tasks: int = 64
    """Held-out tasks of each env."""
    k: int = 1
    """Samples of each task; the metric is their mean, `eval/<env>/avg@k`."""
    temperature: float | None = None
    """Sampling temperature; null = the one the env trains with."""


@dataclass
class OrchestratorConfig:
    """Turns tasks into batches and keeps generation and training in step."""

    _target_: str = "prl.orchestrator.orchestrator.Orchestrator"
    batch_size: int | None = 256
    """Rollouts in a step's batch. Exactly one of this and `token_batch_size`."""
    token_batch_size: int | None = None
    """Tokens in a step's batch: groups are added until it is reached."""
    group_size: int = 8
    """Rollouts of one task."""
    max_async_level: int = 1
    """k: a rollout of step n starts from a policy version of at least n-1-k. 0 = synchronous and on-policy."""
    strict_async_level: bool = False
    """Start the rollouts of step n from exactly version n-1-k (version 0 in the first steps)."""
    max_off_policy_steps: int = 8
    """Policy updates that a rollout may span or wait for before its group is dropped."""
    batch_timeout_s: float = 1800.0
    """Deadline for a batch to fill, seconds."""
    policy_timeout_s: float = 1800.0
    """Deadline for the trainer to deliver a policy version, seconds."""
    max_error_share: float = 0.5
    """Share of an env's last 256 rollouts that may fail before the run ends with the reason."""
    keep_batches: bool = False
    """Keep what was shipped to the trainer under `batches/`."""
    eval: EvalConfig = field(default_factory=EvalConfig)
