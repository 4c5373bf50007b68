"""Hard distillation."""

from dataclasses import dataclass
from typing import ClassVar

from prl.config.model_reference import POLICY
from prl.errors import ConfigError
from prl.orchestrator.algo.base import Algorithm


@dataclass(kw_only=True)
class SFTDistillAlgorithm(Algorithm):
    """Cross-entropy on every token that a frozen model (`sampling.source`) sampled; assigns no advantage.

    Source: sequence-level knowledge distillation (arXiv 1606.07947).
    """

    action_loss_type: ClassVar[str] = "ce"
    reads_reward: ClassVar[bool] = False

    def check(self, where: str) -> None:
        if self.sampling.source == POLICY:
            raise ConfigError(
                f"{where}.sampling.source=policy: imitating its own samples teaches the policy nothing. Name a frozen "
                f"model ({where}.sampling.source with name and base_url; teacher=local hosts one)"
            )
