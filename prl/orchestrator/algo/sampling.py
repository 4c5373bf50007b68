"""Config of how rollouts are sampled."""

from dataclasses import dataclass


@dataclass
class SamplingConfig:
    """Which model generates the rollouts, and its sampling settings."""

    source: str = "policy"
    """`policy`: the model being trained."""
    temperature: float = 1.0
    """Logits are divided by it, in the engine and in the trainer; at least 0.01."""
    max_tokens: int | None = None
    """Longest completion of one turn, tokens; null = what `model.max_model_len` leaves."""
