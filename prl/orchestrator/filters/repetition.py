"""Rollouts that repeat themselves."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Lt

from prl.orchestrator.filters.base import Filter
from prl.orchestrator.filters.tokens import sampled_branches, sampled_ids
from prl.wire.logprobs import is_measured

if TYPE_CHECKING:
    from verifiers.v1.graph import MessageNode

    from prl.rollouts.rollout import Rollout


@dataclass(kw_only=True)
class Repetition(Filter):
    """Matches rollouts of which one branch repeats itself.

    Only the sampled tokens of a branch count, in order; tokens that the env provides between turns are skipped and
    interrupt nothing. `prob` reads the sampler's logprobs: a token without a measured one ends a run, and a rollout of
    a frozen model, which has none, never matches. `ngram` reads token ids alone; the share is 1 - distinct / all
    (seq-rep-n, arXiv 1908.04319), and a branch shorter than `n` has no n-grams.
    """

    mode_knobs: ClassVar[Mapping[str, Mapping[str, float]]] = {
        "prob": {"window": 3000, "prob_threshold": 0.99},
        "ngram": {"n": 4, "threshold": 0.4},
    }

    mode: Literal["prob", "ngram"] = "prob"
    """prob: a long run of tokens that the model was sure of; ngram: the same phrases again and again."""
    window: Annotated[int, Ge(1)] | None = None
    """prob: this many sure tokens in a row match; null = 3000."""
    prob_threshold: Annotated[float, Gt(0), Lt(1)] | None = None
    """prob: a token is sure if its probability is above it; null = 0.99."""
    n: Annotated[int, Ge(1)] | None = None
    """ngram: tokens in a phrase; null = 4."""
    threshold: Annotated[float, Ge(0), Lt(1)] | None = None
    """ngram: a rollout matches if a larger share of its n-grams occurred before; null = 0.4."""

    def matches(self, rollout: "Rollout") -> bool:
        if self.mode == "ngram":
            return any(self._is_repetitive(messages) for messages in sampled_branches(rollout))
        return rollout.live and any(self._is_certain(messages) for messages in sampled_branches(rollout))

    def _is_certain(self, messages: "list[MessageNode]") -> bool:
        window, low = self.setting("window"), math.log(self.setting("prob_threshold"))
        run = 0
        for logprob in (value for node in messages for value in node.logprobs):
            run = run + 1 if logprob > low and is_measured(logprob) else 0
            if run >= window:
                return True
        return False

    def _is_repetitive(self, messages: "list[MessageNode]") -> bool:
        tokens, n = [token for node in messages for token in sampled_ids(node)], int(self.setting("n"))
        ngrams = list(zip(*(tokens[start:] for start in range(n)), strict=False))
        repeated = len(ngrams) - len(set(ngrams))
        return bool(ngrams) and repeated / len(ngrams) > self.setting("threshold")
