"""Config of how rollouts are sampled."""

from dataclasses import dataclass
from typing import Any

from prl.config.model_reference import POLICY, as_reference


@dataclass
class SamplingConfig:
    """Which model generates the rollouts, and its sampling settings."""

    source: Any = POLICY
    """`policy`, the model being trained, or a frozen model: {name, base_url}."""
    temperature: float = 1.0
    """Logits are divided by it, in the engine and in the trainer; at least 0.01."""
    max_tokens: int | None = None
    """Longest completion of one turn, tokens; null = what `model.max_model_len` leaves."""

    def __post_init__(self) -> None:
        self.source = as_reference(self.source)
