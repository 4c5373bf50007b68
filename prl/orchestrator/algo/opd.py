"""On-policy distillation."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prl.config.model_reference import POLICY, as_reference, check_reference
from prl.errors import ConfigError
from prl.inference.sampling import SamplingConfig
from prl.orchestrator.algo.base import Algorithm
from prl.orchestrator.algo.reference_logprobs import ReferenceLogprobs

if TYPE_CHECKING:
    from prl.rollouts.rollout import Rollout


@dataclass
class OPDConfig:
    """The policy samples; a frozen teacher says how likely each token was."""

    _target_: str = "prl.orchestrator.algo.opd.OPDAlgorithm"
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """How rollouts are sampled."""
    teacher: Any = None
    """The frozen model to distil from: {name, base_url}."""
    max_concurrent: int = 32
    """Scoring requests in flight."""

    def __post_init__(self) -> None:
        self.teacher = as_reference(self.teacher)


class OPDAlgorithm(Algorithm):
    """Every sampled token is pulled by the reverse KL from the policy to the teacher; no advantage is assigned.

    The teacher's logprobs of the rollout's own tokens ship with them, and the trainer weighs log teacher - log policy like
    an advantage (`ref_kl`). `group_size` only fans out sampling. Source: on-policy distillation, Thinking Machines Lab
    (2025), after MiniLLM (arXiv 2306.08543) and GKD (arXiv 2306.13649).
    """

    action_loss_type = "ref_kl"

    @classmethod
    def check(cls, config: Any, where: str) -> None:
        super().check(config, where)
        check_concurrency(config, where)
        if config.teacher == POLICY:
            raise ConfigError(
                f"{where}.teacher=policy: the KL from the policy to itself is zero. Name a frozen model (name and base_url; "
                "teacher=local hosts one), or choose algo=opsd to distil from the policy shown a demonstration"
            )
        if config.teacher is None:
            raise ConfigError(
                f"{where}.teacher has no value: {cls.__name__} needs a frozen model, with name and base_url"
            )
        check_reference(config.teacher, f"{where}.teacher", hosted=True)  # its URL is looked at later

    async def setup(self) -> None:
        teacher = await self.connect(self.config.teacher)
        self.scorer = ReferenceLogprobs(teacher, self.config.max_concurrent)

    async def score_rollout(self, rollout: "Rollout") -> None:
        await self.scorer.score(rollout)


def check_concurrency(config: Any, where: str) -> None:
    if config.max_concurrent < 1:
        raise ConfigError(f"{where}.max_concurrent must be at least 1, got {config.max_concurrent}")
