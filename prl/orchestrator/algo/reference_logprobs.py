"""Reference logprobs: a rollout's own tokens under another model, or under the policy in another context."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prl.inference.client import ModelPool
    from prl.rollouts.rollout import Rollout
    from prl.wire.messages import TrainingSample


class ReferenceLogprobs:
    """Fills `ref_logprobs` by prefill under one model, with at most `max_concurrent` requests in flight."""

    def __init__(self, pool: "ModelPool", max_concurrent: int):
        self.pool = pool
        self._slots = asyncio.Semaphore(max_concurrent)

    async def compute(self, rollout: "Rollout", context: Sequence[int] = ()) -> None:
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
