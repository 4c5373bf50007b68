"""Hard distillation: imitation of replies, token by token."""

from dataclasses import dataclass
from typing import ClassVar

from prl.algorithms.base import Algorithm
from prl.base.errors import ConfigError
from prl.config.model_reference import POLICY


@dataclass(kw_only=True)
class SFTDistillAlgorithm(Algorithm):
    """Cross-entropy on every token of replies that the policy did not sample; assigns no advantage.

    `sampling.source` says whose: a frozen model's, of any tokenizer, or `demonstrations`, those of the tasks.

    Source: sequence-level knowledge distillation (arXiv 1606.07947).
    """

    action_loss_type: ClassVar[str] = "ce"
    reads_reward: ClassVar[bool] = False

    def check(self, where: str) -> None:
        if self.sampling.source == POLICY:
            raise ConfigError(
                f"{where}.sampling.source=policy: imitating its own samples teaches the policy nothing. Name a frozen "
                f"model ({where}.sampling.source with name and base_url; teacher=local hosts one), or "
                f"{where}.sampling.source=demonstrations"
            )
