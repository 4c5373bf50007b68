"""Rollouts that degenerate into noise."""

import math
from dataclasses import dataclass
from itertools import compress
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Le

from prl.filters.base import MAX_COMPLETION, Filter, ModeOptions
from prl.rollouts.logprobs import is_measured
from prl.rollouts.rollout import Rollout


@dataclass(kw_only=True)
class Gibberish(Filter):
    """Matches rollouts that degenerate into noise, by the sampler's logprobs.

    Tokens without a measured logprob are skipped in both modes. A rollout of a frozen model has no logprobs and never
    matches.
    """

    mode_options: ClassVar[ModeOptions] = {
        "token": {"token_id_threshold": 100_000, "logprob_offset": 2.0},
        "mean_logprob": {"threshold": -4.0},
    }

    mode: Literal["token", "mean_logprob"] = "token"
    """token: one rare and very unlikely token is enough; mean_logprob: the whole rollout is unlikely."""
    token_id_threshold: Annotated[int, Ge(0)] | None = None
    """token: ids above it are rare, since byte-pair vocabularies number tokens by frequency; null = 100000, or three
    quarters of a vocabulary of at most 100000."""
    logprob_offset: Annotated[float, Ge(0)] | None = None
    """token: a rare token matches if its logprob is lower than that of a uniform draw, -ln(vocabulary), by this, nats;
    null = 2.0."""
    threshold: Annotated[float, Le(0)] | None = None
    """mean_logprob: a rollout matches if its mean sampled logprob is below this, nats per token; null = -4.0."""

    def attach(self, *, vocab_size: int, longest: int = MAX_COMPLETION) -> None:
        super().attach(vocab_size=vocab_size, longest=longest)
        self.last_common, last = self.setting("token_id_threshold"), vocab_size - 1
        if self.last_common >= last and self.token_id_threshold is None:
            # The default is above a small vocabulary: without this the filter would match nothing there.
            self.last_common = 3 * vocab_size // 4
        elif self.last_common >= last:
            self.warn_unmatchable("token_id_threshold", f"the last token of the vocabulary has id {last}")

    def matches(self, rollout: Rollout) -> bool:
        if not rollout.live:
            return False
        if self.mode == "token":
            # The logprob of a uniform draw: below it a token was less likely than by chance.
            low = -math.log(self.vocab_size) - self.setting("logprob_offset")
            return any(
                token > self.last_common and trains and logprob < low and is_measured(logprob)
                for sample in rollout.samples
                for token, logprob, trains in zip(sample.token_ids, sample.logprobs, sample.mask, strict=True)
            )
        sampled = [
            logprob
            for sample in rollout.samples
            for logprob in compress(sample.logprobs, sample.mask)
            if is_measured(logprob)
        ]
        return bool(sampled) and math.fsum(sampled) / len(sampled) < self.setting("threshold")
