"""Reference scoring: what another model, or the policy in another context, would have thought of a rollout's tokens."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prl.inference.client import ModelPool
    from prl.rollouts.rollout import Rollout
    from prl.wire import TrainingSample


class ReferenceLogprobs:
    """Fills `ref_logprobs` by prefill under one model, with at most `max_concurrent` requests in flight."""

    def __init__(self, pool: "ModelPool", max_concurrent: int):
        self.pool = pool
        self._turns = asyncio.Semaphore(max_concurrent)

    async def score(self, rollout: "Rollout", context: Sequence[int] = ()) -> None:
        """Score every sample of the rollout verbatim, behind the tokens of `context` if there are any.

        Without context the first token's logprob is 0.0. Raises EngineError where the model gives no usable answer.
        """
        try:
            async with asyncio.TaskGroup() as requests:  # the first that fails ends the others: the rollout is lost
                for sample in rollout.samples:
                    requests.create_task(self._score(sample, list(context)))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _score(self, sample: "TrainingSample", context: list[int]) -> None:
        async with self._turns:
            logprobs = await self.pool.score(context + sample.token_ids, cache_salt=self.pool.cache_salt)
        sample.ref_logprobs = logprobs[len(context) :]
