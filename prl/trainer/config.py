"""Configs of the trainer and of its rl loss. No torch here: these are imported while the config is composed."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class OptimConfig:
    """AdamW."""

    lr: float = 5e-4
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    """Decoupled weight decay; norms and biases are exempt."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm."""


@dataclass
class ScheduleConfig:
    """Learning rate over steps: linear warm-up, a plateau, then a decay over the last part of the run."""

    warmup_steps: int = 0
    decay: str = "linear"
    """constant, linear or cosine."""
    decay_fraction: float = 0.5
    """Share of the run, at its end, that the decay takes."""
    min_ratio: float = 0.1
    """Final learning rate as a share of the peak."""


@dataclass
class TrainerConfig:
    """Trains the policy on shipped micro-batches."""

    _target_: str = "prl.trainer.trainer.Trainer"
    device: str = "auto"
    """cpu, cuda, or auto."""
    num_processes: int = 1
    """Trainer ranks on this machine (torch distributed, gloo on CPU, nccl on GPU)."""
    seq_len: int = 512
    """Row length of packed micro-batches, tokens; longer samples are truncated and counted."""
    tokens_per_forward: int = 4096
    """Rows are stacked into one forward pass up to this many tokens."""
    share_prompts: bool = True
    """Run a prompt that several samples start with once, under one attention mask, where the model allows it. False =
    packed rows as they came."""
    head_chunk: int = 1024
    """Tokens whose logits exist at one time."""
    gradient_checkpointing: bool = False
    """Recompute activations in backward: less memory, more time."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    checkpoint_every: int | None = None
    """Steps between checkpoints (Hugging Face folders under `checkpoints/`); the last step always has one."""
    ready_timeout_s: float = 600.0
    """Deadline for the trainer to load the model, seconds."""
    batch_timeout_s: float = 3600.0
    """Deadline for the next batch to arrive, seconds."""
    finish_timeout_s: float = 1800.0
    """Deadline for the trainer to write its last checkpoint and end, seconds."""


@dataclass
class DefaultLossConfig:
    """DPPO-masked policy gradient with a squared-log-ratio regulariser."""

    _target_: str = "prl.trainer.loss.default_loss"
    dppo_mask_low: float = 0.2
    """Drop tokens with A <= 0 whose probability fell by more than this since sampling."""
    dppo_mask_high: float = 0.2
    """Drop tokens with A > 0 whose probability rose by more than this since sampling."""
    adv_tau: float = 1.0
    """Scale of the policy-gradient term; 0 leaves the regulariser alone."""
    kl_tau: float = 1e-3
    """Scale of the regulariser."""
    delta: float | None = None
    """Upper clamp of the importance ratio; null = none."""


@dataclass
class AIPOLossConfig:
    """Importance-weighted policy gradient with a one-sided clip (arXiv 2505.24034)."""

    _target_: str = "prl.trainer.loss.aipo_loss"
    delta: float = 8.0
    """Upper clamp of the importance ratio."""


@dataclass
class CustomLossConfig:
    """A function of your own, `fn(inputs: LossInputs, **kwargs) -> LossOutputs`, called once a sequence."""

    _target_: str = MISSING
    """Its dotted path."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Its keyword arguments, added as +loss.kwargs.name=value."""
