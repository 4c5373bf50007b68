"""On-policy distillation."""

import warnings
from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge

from prl.algorithms.base import Algorithm
from prl.algorithms.reference import IN_TRAINER, ReferenceOptions
from prl.base.errors import ConfigError
from prl.config.model_reference import POLICY, FrozenModelConfig, as_reference, check_reference
from prl.rollouts.rollout import Rollout


@dataclass(kw_only=True)
class OPDAlgorithm(ReferenceOptions, Algorithm):
    """Reverse KL from the policy to a frozen teacher on every sampled token; assigns no advantage.

    The teacher's logprobs of the rollout's own tokens ship with them, and the trainer weighs log teacher - log policy
    like an advantage (`ref_kl`); or with `divergence` its distributions, and the trainer takes the gradient of the
    divergence itself. `group_size` only fans out sampling. Source: on-policy distillation, Thinking Machines Lab
    (2025), after MiniLLM (arXiv 2306.08543) and GKD (arXiv 2306.13649).
    """

    action_loss_type: ClassVar[str] = "ref_kl"
    reads_reward: ClassVar[bool] = False

    teacher: FrozenModelConfig | str | None = None
    """Frozen model to distil from, required: {name, base_url}, or one in the trainer: `initial`, `ema`, `lagged`."""
    max_concurrent: Annotated[int, Ge(1)] = 32
    """Scoring requests in flight."""

    def __post_init__(self) -> None:
        # YAML gives a mapping or a word. From here on a mapping is a FrozenModelConfig.
        self.teacher = as_reference(self.teacher)

    def check(self, where: str) -> None:
        self.check_read(where, self.teacher)
        if self.teacher in IN_TRAINER:
            warnings.warn(
                f"{where}.teacher={self.teacher}: the policy begins as its teacher, so that nothing is learned unless "
                "another env's algorithm changes it",
                stacklevel=2,
            )
            return
        if self.teacher == POLICY:
            raise ConfigError(
                f"{where}.teacher=policy: the KL from the policy to itself is zero. Name a frozen model (name and "
                "base_url; teacher=local hosts one), or choose algo=opsd to distil from the policy shown a "
                "demonstration"
            )
        if self.teacher is None:
            raise ConfigError(
                f"{where}.teacher has no value: {type(self).__name__} needs a frozen model, with name and base_url"
            )
        # Its URL is checked with the run's hosted models.
        check_reference(self.teacher, f"{where}.teacher", hosted=True)

    async def setup(self) -> None:
        if isinstance(self.teacher, FrozenModelConfig):
            self.teacher_scorer = await self.connect_scorer(self, self.teacher, self.max_concurrent)

    def trainer_references(self) -> set[str]:
        return super().trainer_references() | {self.name_in_trainer(self.teacher)} - {""}

    async def score_rollout(self, rollout: Rollout) -> None:
        self.name_reference(rollout.samples, self.teacher)
        if isinstance(self.teacher, FrozenModelConfig):
            await self.teacher_scorer.compute(rollout)
