"""Rollouts that degenerate into noise."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge, Le

from prl.orchestrator.filters.base import Filter
from prl.orchestrator.filters.tokens import sampled_ids, sampled_messages
from prl.wire.logprobs import is_measured

if TYPE_CHECKING:
    from prl.rollouts.rollout import Rollout


@dataclass(kw_only=True)
class Gibberish(Filter):
    """Matches rollouts that degenerate into noise, by the sampler's logprobs.

    Tokens without a measured logprob are skipped in both modes. A rollout of a frozen model has no logprobs and never
    matches.
    """

    mode_knobs: ClassVar[Mapping[str, Mapping[str, float]]] = {
        "token": {"token_id_threshold": 100_000, "logprob_offset": 2.0},
        "mean_logprob": {"threshold": -4.0},
    }

    mode: Literal["token", "mean_logprob"] = "token"
    """token: one rare and very unlikely token is enough; mean_logprob: the whole rollout is unlikely."""
    token_id_threshold: Annotated[int, Ge(0)] | None = None
    """token: ids above it are rare, since byte-pair vocabularies number tokens by frequency; null = 100000."""
    logprob_offset: Annotated[float, Ge(0)] | None = None
    """token: how far below a uniform draw's logprob, -ln(vocabulary), a rare token must lie, nats; null = 2.0."""
    threshold: Annotated[float, Le(0)] | None = None
    """mean_logprob: a rollout whose mean sampled logprob is below it matches, nats per token; null = -4.0."""

    def matches(self, rollout: "Rollout") -> bool:
        if not rollout.live:
            return False
        return self._has_noise(rollout) if self.mode == "token" else self._is_unlikely(rollout)

    def _has_noise(self, rollout: "Rollout") -> bool:
        rare, low = self.setting("token_id_threshold"), -math.log(self.vocab_size) - self.setting("logprob_offset")
        return any(
            logprob < low and token > rare and is_measured(logprob)
            for node in sampled_messages(rollout)
            for token, logprob in zip(sampled_ids(node), node.logprobs, strict=True)
        )

    def _is_unlikely(self, rollout: "Rollout") -> bool:
        logprobs = [value for node in sampled_messages(rollout) for value in node.logprobs if is_measured(value)]
        return bool(logprobs) and math.fsum(logprobs) / len(logprobs) < self.setting("threshold")
