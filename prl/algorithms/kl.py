"""The KL to a reference, for every algorithm whose sampled tokens feed the rl loss."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prl.algorithms.base import Algorithm
from prl.algorithms.reference import KLConfig, ReferenceLogprobs
from prl.config.model_reference import FrozenModelConfig
from prl.rollouts.rollout import Rollout

if TYPE_CHECKING:
    from prl.rollouts.messages import TrainingSample


@dataclass(kw_only=True)
class KLPenalty(Algorithm):
    """An algorithm with the option `kl`: a policy gradient, and beside it a pull towards a reference."""

    kl: KLConfig = field(default_factory=KLConfig)
    """KL to a reference, added to the policy gradient with weight `kl.coef`; 0 = none."""
    _kl_scorer: ReferenceLogprobs | None = field(default=None, init=False, repr=False)

    def trainer_references(self) -> set[str]:
        return super().trainer_references() | {self.kl.model} - {""}

    async def start(self) -> None:
        """Connect the model of `kl.reference`, then what `setup` declares. Raises what `connect` raises."""
        if isinstance(self.kl.reference, FrozenModelConfig):
            self._kl_scorer = await self.connect_scorer(self.kl, self.kl.reference)
        await super().start()

    async def _score(self, rollout: Rollout) -> None:
        await super()._score(rollout)
        if self._kl_scorer is not None and rollout.is_active:  # a hook may have given the rollout up
            await self._kl_scorer.compute(rollout)

    def _weigh(self, sample: "TrainingSample") -> None:
        super()._weigh(sample)
        self.kl.weigh(sample)  # after the defaults: the KL is of tokens with a weight in rl
