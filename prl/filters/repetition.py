"""Rollouts that repeat themselves."""

import math
from dataclasses import dataclass
from itertools import compress, groupby
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Lt

from prl.filters.base import MAX_COMPLETION, Filter, ModeOptions
from prl.rollouts.logprobs import is_measured
from prl.rollouts.rollout import Rollout


@dataclass(kw_only=True)
class Repetition(Filter):
    """Matches rollouts of which one branch repeats itself.

    Only the sampled tokens of a branch count, in order; tokens that the env provides between turns are skipped and
    interrupt nothing. `prob` reads the sampler's logprobs: a token without a measured one ends a run, and a rollout of
    a frozen model, which has none, never matches. `ngram` reads token ids alone; the share is 1 - distinct / all
    (seq-rep-n, arXiv 1908.04319), and a branch shorter than `n` has no n-grams.
    """

    mode_options: ClassVar[ModeOptions] = {
        "prob": {"window": 3000, "prob_threshold": 0.99},
        "ngram": {"n": 4, "threshold": 0.4},
    }

    mode: Literal["prob", "ngram"] = "prob"
    """prob: a long run of very likely tokens; ngram: repeated phrases."""
    window: Annotated[int, Ge(1)] | None = None
    """prob: this many likely tokens in a row match; null = half of the longest completion, at most 3000."""
    prob_threshold: Annotated[float, Gt(0), Lt(1)] | None = None
    """prob: a token is likely if its probability is above this; null = 0.99."""
    n: Annotated[int, Ge(1)] | None = None
    """ngram: tokens in a phrase; null = 4."""
    threshold: Annotated[float, Ge(0), Lt(1)] | None = None
    """ngram: a rollout matches if a larger share of its n-grams occurred before; null = 0.4."""

    longest = MAX_COMPLETION

    def attach(self, *, vocab_size: int, longest: int = MAX_COMPLETION) -> None:
        super().attach(vocab_size=vocab_size, longest=longest)
        for name in ("window", "n"):
            if (getattr(self, name) or 0) > longest:
                self.warn_unmatchable(name, f"the longest completion has {longest} tokens")

    def matches(self, rollout: Rollout) -> bool:
        sampled = [[node for node in branch.nodes if node.sampled] for branch in rollout.sample_branches]
        if self.mode == "ngram":
            return any(
                self._is_repetitive([token for node in nodes for token in compress(node.token_ids, node.mask)])
                for nodes in sampled
            )
        return rollout.live and any(
            self._is_certain([logprob for node in nodes for logprob in node.logprobs]) for nodes in sampled
        )

    def _is_certain(self, logprobs: list[float]) -> bool:
        # A window longer than any completion would never match.
        window = self.window or min(self.setting("window"), max(1, self.longest // 2))
        if len(logprobs) < window:
            return False
        low = math.log(self.setting("prob_threshold"))
        # A token without a measured logprob ends a run: nobody knows that it was likely.
        runs = groupby(logprob > low and is_measured(logprob) for logprob in logprobs)
        return any(len(list(run)) >= window for sure, run in runs if sure)

    def _is_repetitive(self, tokens: list[int]) -> bool:
        n = int(self.setting("n"))
        ngrams = list(zip(*(tokens[start:] for start in range(n)), strict=False))
        repeated = len(ngrams) - len(set(ngrams))
        return bool(ngrams) and repeated / len(ngrams) > self.setting("threshold")
