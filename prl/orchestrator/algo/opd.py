"""On-policy distillation, and the reference logprobs that it works with."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge

from prl.config.model_reference import POLICY, FrozenModelConfig, as_reference, check_reference
from prl.errors import ConfigError
from prl.orchestrator.algo.base import Algorithm
from prl.rollouts.rollout import Rollout

if TYPE_CHECKING:
    from prl.inference.client import ModelPool
    from prl.wire.messages import TrainingSample


class ReferenceLogprobs:
    """A rollout's own tokens under another model, or under the policy in another context.

    Fills `ref_logprobs` by prefill under one model, with at most `max_concurrent` requests in flight.
    """

    def __init__(self, pool: "ModelPool", max_concurrent: int):
        self.pool = pool
        self._slots = asyncio.Semaphore(max_concurrent)

    async def compute(self, rollout: Rollout, context: Sequence[int] = ()) -> None:
        """Fill in `ref_logprobs` of every sample, its tokens taken verbatim.

        Args:
            rollout: the rollout to score.
            context: tokens to put in front, `[context]`, whose own logprobs are cut off again. Without context the
                first token's logprob is 0.0.

        Raises:
            EngineError: the model gave no usable answer. The first failure cancels the rollout's other requests.
        """
        try:
            async with asyncio.TaskGroup() as requests:
                for sample in rollout.samples:
                    requests.create_task(self._score(sample, list(context)))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _score(self, sample: "TrainingSample", context: list[int]) -> None:
        async with self._slots:
            logprobs = await self.pool.prompt_logprobs(context + sample.token_ids)
        sample.ref_logprobs = logprobs[len(context) :]


@dataclass(kw_only=True)
class OPDAlgorithm(Algorithm):
    """Reverse KL from the policy to a frozen teacher on every sampled token; assigns no advantage.

    The teacher's logprobs of the rollout's own tokens ship with them, and the trainer weighs log teacher - log policy
    like an advantage (`ref_kl`). `group_size` only fans out sampling. Source: on-policy distillation, Thinking Machines
    Lab (2025), after MiniLLM (arXiv 2306.08543) and GKD (arXiv 2306.13649).
    """

    action_loss_type: ClassVar[str] = "ref_kl"
    reads_reward: ClassVar[bool] = False

    teacher: FrozenModelConfig | str | None = None
    """The frozen model to distil from: {name, base_url}. Required."""
    max_concurrent: Annotated[int, Ge(1)] = 32
    """Scoring requests in flight."""

    def __post_init__(self) -> None:
        self.teacher = as_reference(self.teacher)

    def check(self, where: str) -> None:
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
        check_reference(
            self.teacher, f"{where}.teacher", hosted=True
        )  # its URL is checked with the run's hosted models

    async def setup(self) -> None:
        assert isinstance(self.teacher, FrozenModelConfig)
        self.scorer = ReferenceLogprobs(await self.connect(self.teacher), self.max_concurrent)

    async def score_rollout(self, rollout: Rollout) -> None:
        await self.scorer.compute(rollout)
