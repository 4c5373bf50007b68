"""References of `ref_kl`: the logprobs of one, and the option `kl` that pulls any rl algorithm towards one."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Le

from prl.config.model_reference import POLICY, FrozenModelConfig, as_reference
from prl.errors import ConfigError
from prl.rollouts.components import COMPONENTS

if TYPE_CHECKING:
    from prl.engines.client import ModelPool
    from prl.rollouts.messages import TrainingSample
    from prl.rollouts.rollout import Rollout

INITIAL = "initial"


@dataclass
class KLConfig:
    """KL of the policy to a reference, beside the policy gradient: rl tokens have weight `coef` in `ref_kl` as well.

    The loss term is `coef` times the score-function gradient with the k1 estimate as its reward, which the docstring
    of `prl.losses.ref_kl.ref_kl_loss` describes.
    """

    coef: Annotated[float, Ge(0), Le(1e6)] = 0.0
    """Weight of the rl tokens in `ref_kl`; 0 = off."""
    reference: Any = INITIAL
    """`initial`, the model that the run began with, which the trainer then keeps a frozen copy of: one more copy of the
    weights on each rank, no second engine. Or a frozen model {name, base_url}, which scores rollouts by prefill."""

    def __post_init__(self) -> None:
        self.reference = as_reference(self.reference)

    @property
    def in_trainer(self) -> bool:
        """Whether the trainer has to hold the reference."""
        return self.coef > 0 and self.reference == INITIAL

    def check(self, where: str, algorithm: str, component: str) -> None:
        """Raise ConfigError for an algorithm without rl tokens, and for a reference that is none or is not read.

        Args:
            where: the config key of these options.
            algorithm: the name of the algorithm's class.
            component: the loss component that its sampled tokens feed.
        """
        if self.coef and component != "rl":
            raise ConfigError(
                f"{where}.coef={self.coef:g}: {algorithm} feeds the {component} loss, and the KL is added to tokens of "
                f"the rl loss (algo=grpo, max_rl, reward, echo, custom): leave {where}.coef at 0"
            )
        if self.reference == INITIAL:
            return
        if not isinstance(self.reference, FrozenModelConfig):
            why = ", and the KL from the policy to itself is zero" if self.reference == POLICY else ""
            raise ConfigError(
                f"{where}.reference={self.reference!r}{why}: write {INITIAL}, or a frozen model with name and base_url"
            )
        if not self.coef:
            raise ConfigError(f"{where}.reference is given, but nothing reads it: {where}.coef is 0")

    def weigh(self, sample: "TrainingSample") -> None:
        """Write the sample's weights in `ref_kl`. Raises ValueError where the algorithm has written some itself."""
        if not self.coef:
            return
        if sample.ref_kl_weights is not None:
            raise ValueError("the algorithm writes ref_kl_weights itself: its kl.coef must be 0")
        sample.ref_kl_weights = [self.coef * member for member in sample.members(COMPONENTS["rl"])]
        sample.initial_reference = self.in_trainer


class ReferenceLogprobs:
    """A rollout's own tokens under another model, or under the policy in another context.

    Fills `ref_logprobs` by prefill under one model, with at most `max_concurrent` requests in flight.
    """

    def __init__(self, pool: "ModelPool", max_concurrent: int = 32):
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
