"""Rollouts that fell into noise."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prl.config.validate import one_of
from prl.errors import ConfigError
from prl.orchestrator.filters.base import Filter
from prl.orchestrator.filters.tokens import measured, sampled_ids, sampled_messages

if TYPE_CHECKING:
    from prl.rollouts.rollout import Rollout


@dataclass
class GibberishConfig:
    """Find rollouts that fell into noise."""

    _target_: str = "prl.orchestrator.filters.gibberish.Gibberish"
    enforce: bool = False
    """Drop matches, not just record them."""
    mode: str = "token"
    """token: one rare token that was hardly possible is enough; mean_logprob: all of the rollout is hardly likely."""
    token_id_threshold: int = 100_000
    """token: ids above it are rare, since byte-pair vocabularies number tokens by how frequent they are."""
    logprob_offset: float = 2.0
    """token: how far below a uniform draw's logprob, -ln(vocabulary), a rare token must lie, nats."""
    threshold: float = -4.0
    """mean_logprob: a rollout whose mean sampled logprob is below it matches, nats a token."""


class Gibberish(Filter):
    """Matches by the sampler's logprobs; a rollout of a frozen model has none, and never does.

    Tokens without a usable logprob are passed over in both modes.
    """

    @classmethod
    def check(cls, config: GibberishConfig, where: str) -> None:
        one_of(f"{where}.mode", config.mode, ("token", "mean_logprob"))
        for key in ("token_id_threshold", "logprob_offset"):
            if not 0 <= getattr(config, key) < math.inf:
                raise ConfigError(f"{where}.{key} must be at least 0, got {getattr(config, key)}")
        if not config.threshold <= 0:
            raise ConfigError(f"{where}.threshold must be at most 0, got {config.threshold}")

    def matches(self, rollout: "Rollout") -> bool:
        if not rollout.live:
            return False
        return self._has_noise(rollout) if self.config.mode == "token" else self._is_unlikely(rollout)

    def _has_noise(self, rollout: "Rollout") -> bool:
        rare, low = self.config.token_id_threshold, -math.log(self.vocab_size) - self.config.logprob_offset
        return any(
            logprob < low and token > rare and measured(logprob)
            for node in sampled_messages(rollout)
            for token, logprob in zip(sampled_ids(node), node.logprobs, strict=True)
        )

    def _is_unlikely(self, rollout: "Rollout") -> bool:
        logprobs = [value for node in sampled_messages(rollout) for value in node.logprobs if measured(value)]
        return bool(logprobs) and math.fsum(logprobs) / len(logprobs) < self.config.threshold
