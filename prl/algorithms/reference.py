"""References of `ref_kl`: the logprobs of one, and the option `kl` that pulls any rl algorithm towards one."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from prl.base.errors import ConfigError
from prl.config.model_reference import POLICY, FrozenModelConfig, as_reference
from prl.rollouts.components import COMPONENTS

if TYPE_CHECKING:
    from prl.engines.client import ModelPool
    from prl.rollouts.messages import TrainingSample
    from prl.rollouts.rollout import Rollout

INITIAL = "initial"
IN_TRAINER = (INITIAL, "ema", "lagged")
"""References that the trainer has: the model that the run began with, a running mean of the policy, an older policy."""


@dataclass(kw_only=True)
class ReferenceOptions:
    """Options of the comparison with a reference, and of how one in the trainer follows the policy."""

    divergence: Literal["reverse_kl", "forward_kl", "jsd"] | None = None
    """Divergence of the next-token distributions of policy and reference, as a loss; null = the policy gradient of the
    reverse KL by the sampled token. With a reference in the trainer (`initial`, `ema`, `lagged`) it is over the
    vocabulary, else over the reference's `top_k` tokens and the rest as one token, which is a lower bound."""
    beta: Annotated[float, Gt(0), Lt(1)] = 0.5
    """Share of the reference in the mixture of `jsd`."""
    top_k: Annotated[int, Ge(1)] = 32
    """For a divergence from a reference in an engine: its top-k most likely tokens."""
    decay: Annotated[float, Ge(0), Lt(1)] = 0.999
    """For `ema`: after each step its weights are decay times themselves plus 1 - decay times the policy's."""
    every: Annotated[int, Ge(1)] = 16
    """For `lagged`: steps between copies of the policy."""
    align: Literal["text"] | None = None
    """`text`: compare with a frozen model of another tokenizer, over the shortest spans of text at which both
    tokenizers have a boundary; null = refuse another tokenizer."""

    def name_in_trainer(self, reference: Any) -> str:
        """Return the trainer's name of a reference; "" for one that it does not have."""
        names = dict(zip(IN_TRAINER, (INITIAL, f"ema:{self.decay}", f"lagged:{self.every}"), strict=True))
        return names.get(reference, "") if isinstance(reference, str) else ""

    def scorer(self, pool: "ModelPool", max_concurrent: int = 32) -> "ReferenceLogprobs":
        """Return the scorer of rollouts by a reference that an engine serves."""
        return ReferenceLogprobs(pool, max_concurrent, self.top_k if self.divergence else 0)

    def name_reference(self, samples: "Iterable[TrainingSample]", reference: Any, prefix: Sequence[int] = ()) -> None:
        """Write down on samples how they are compared, with `prefix` before them for a reference in the trainer."""
        from prl.rollouts.messages import Reference

        model = self.name_in_trainer(reference)
        for sample in samples:
            sample.reference = Reference(model, self.divergence or "", self.beta, tuple(prefix) if model else ())

    def check_read(self, where: str, reference: Any) -> None:
        """Raise ConfigError for an option that nothing reads; `where` is the config key of these options."""
        engine = self.divergence is not None and reference not in IN_TRAINER
        reads = {
            "beta": (self.divergence == "jsd", "divergence=jsd"),
            "top_k": (engine, "a divergence from a reference that an engine serves; one in the trainer has them all"),
            "decay": (reference == "ema", "the reference ema"),
            "every": (reference == "lagged", "the reference lagged"),
            "align": (
                isinstance(reference, FrozenModelConfig) and self.divergence is None,
                "a frozen model {name, base_url}, and divergence=null, which is over one vocabulary",
            ),
        }
        for key, (is_read, reader) in reads.items():
            value = getattr(self, key)
            # Defaults stand in every composed config. A value that differs is one that somebody meant.
            if not is_read and value != getattr(ReferenceOptions, key):
                raise ConfigError(f"{where}.{key}={value}: it is read with {reader}")


@dataclass
class KLConfig(ReferenceOptions):
    """KL of the policy to a reference, beside the policy gradient: rl tokens have weight `coef` in `ref_kl` as well.

    The loss term is `coef` times the divergence, or without one the score-function gradient with the k1 estimate as its
    reward, which the docstring of `prl.losses.ref_kl.ref_kl_loss` describes.
    """

    coef: Annotated[float, Ge(0), Le(1e6)] = 0.0
    """Weight of the rl tokens in `ref_kl`; 0 = off."""
    reference: FrozenModelConfig | str = INITIAL
    """A model in the trainer, which takes a copy of the weights on each rank: `initial` (the run's first weights),
    `ema` (a running mean of the policy, see `decay`) or `lagged` (the policy of up to `every` steps ago). Or a frozen
    model {name, base_url}, which scores rollouts by prefill."""

    def __post_init__(self) -> None:
        self.reference = as_reference(self.reference)

    @property
    def model(self) -> str:
        """Return the name of the reference that the trainer has to hold; "" for none."""
        return self.name_in_trainer(self.reference) if self.coef > 0 else ""

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
        if not isinstance(self.reference, FrozenModelConfig) and self.reference not in IN_TRAINER:
            why = ", and the KL from the policy to itself is zero" if self.reference == POLICY else ""
            raise ConfigError(
                f"{where}.reference={self.reference!r}{why}: write {', '.join(IN_TRAINER)}, or a frozen model "
                "with name and base_url"
            )
        self.check_read(where, self.reference)
        for key in ("reference", "divergence", "align"):
            if not self.coef and getattr(self, key) != getattr(KLConfig, key):
                raise ConfigError(f"{where}.{key} is given, but nothing reads it: {where}.coef is 0")

    def weigh(self, sample: "TrainingSample") -> None:
        """Write the sample's weights in `ref_kl`. Raises ValueError where the algorithm has written some itself."""
        if not self.coef:
            return
        if sample.ref_kl_weights is not None:
            raise ValueError("the algorithm writes ref_kl_weights itself: its kl.coef must be 0")
        sample.ref_kl_weights = [self.coef * member for member in sample.members(COMPONENTS["rl"])]
        self.name_reference([sample], self.reference)


class ReferenceLogprobs:
    """A rollout's own tokens under another model, or under the policy in another context.

    Fills `ref_logprobs` by prefill under one model, with at most `max_concurrent` requests in flight; with `top_k` also
    `top_ids` and `top_logprobs`.
    """

    def __init__(self, pool: "ModelPool", max_concurrent: int = 32, top_k: int = 0):
        self.pool = pool
        self.top_k = top_k
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
                for index in range(len(rollout.samples)):
                    requests.create_task(self._score(rollout, index, list(context)))
        except BaseExceptionGroup as group:
            # One error, not a group of them: `finalize_rollout` catches an EngineError.
            raise group.exceptions[0] from None

    async def _score(self, rollout: "Rollout", index: int, context: list[int]) -> None:
        sample = rollout.samples[index]
        async with self._slots:
            if not self.top_k:
                logprobs = await self.pool.prompt_logprobs(sample.input.behind(context))
            else:
                scored = await self.pool.top_logprobs(sample.input.behind(context), self.top_k)
                logprobs = scored.own
                sample.top_ids, sample.top_logprobs = scored.ids[len(context) :], scored.logprobs[len(context) :]
        sample.ref_logprobs = logprobs[len(context) :]
