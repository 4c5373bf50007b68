"""Hard distillation."""

from dataclasses import dataclass, field
from typing import Any

from prl.config.model_reference import POLICY
from prl.errors import ConfigError
from prl.inference.sampling import SamplingConfig
from prl.orchestrator.algo.base import Algorithm


@dataclass
class SFTDistillConfig:
    """A frozen model samples; the policy learns to say the same."""

    _target_: str = "prl.orchestrator.algo.sft.SFTDistillAlgorithm"
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """How rollouts are sampled; `source` is the model to imitate."""


class SFTDistillAlgorithm(Algorithm):
    """Cross-entropy on every token that the frozen model sampled; no advantage is assigned.

    Source: sequence-level knowledge distillation (arXiv 1606.07947).
    """

    action_loss_type = "ce"

    @classmethod
    def check(cls, config: Any, where: str) -> None:
        super().check(config, where)
        if config.sampling.source == POLICY:
            raise ConfigError(
                f"{where}.sampling.source=policy: to imitate its own samples teaches the policy nothing. Name a frozen model "
                f"({where}.sampling.source with name and base_url; teacher=local hosts one)"
            )
