"""Rollouts that go round in circles."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prl.config.validate import one_of
from prl.errors import ConfigError
from prl.orchestrator.filters.base import Filter
from prl.orchestrator.filters.tokens import measured, sampled_branches, sampled_ids

if TYPE_CHECKING:
    from verifiers.v1.graph import MessageNode

    from prl.rollouts.rollout import Rollout


@dataclass
class RepetitionConfig:
    """Find rollouts that go round in circles."""

    _target_: str = "prl.orchestrator.filters.repetition.Repetition"
    enforce: bool = False
    """Drop matches, not just record them."""
    mode: str = "prob"
    """prob: a long run of tokens that the model was sure of; ngram: the same phrases again and again."""
    window: int = 3000
    """prob: so many tokens in a row, or more, match."""
    prob_threshold: float = 0.99
    """prob: a token is sure if its probability is above it."""
    n: int = 4
    """ngram: tokens in a phrase."""
    threshold: float = 0.4
    """ngram: a rollout matches if a larger share of its n-grams stood there before."""


class Repetition(Filter):
    """Matches if one branch of the rollout repeats itself.

    What counts are the sampled tokens of a branch in order; those that the env provided between turns are skipped, and
    interrupt nothing. `prob` reads the sampler's logprobs: a token without a usable one ends a run, and a rollout of a
    frozen model, which has none, never matches. `ngram` reads token ids alone; the share is 1 - distinct / all
    (seq-rep-n, arXiv 1908.04319), and a branch shorter than `n` has none.
    """

    @classmethod
    def check(cls, config: RepetitionConfig, where: str) -> None:
        one_of(f"{where}.mode", config.mode, ("prob", "ngram"))
        for key in ("window", "n"):
            if not getattr(config, key) >= 1:
                raise ConfigError(f"{where}.{key} must be at least 1, got {getattr(config, key)}")
        if not 0 < config.prob_threshold < 1:
            raise ConfigError(f"{where}.prob_threshold must be above 0 and below 1, got {config.prob_threshold}")
        if not 0 <= config.threshold < 1:
            raise ConfigError(f"{where}.threshold must be from 0 to below 1, got {config.threshold}")

    def matches(self, rollout: "Rollout") -> bool:
        if self.config.mode == "ngram":
            return any(self._is_repetitive(messages) for messages in sampled_branches(rollout))
        return rollout.live and any(self._is_certain(messages) for messages in sampled_branches(rollout))

    def _is_certain(self, messages: list["MessageNode"]) -> bool:
        window, low = self.config.window, math.log(self.config.prob_threshold)
        run = 0
        for logprob in (value for node in messages for value in node.logprobs):
            run = run + 1 if logprob > low and measured(logprob) else 0
            if run >= window:
                return True
        return False

    def _is_repetitive(self, messages: list["MessageNode"]) -> bool:
        tokens, n = [token for node in messages for token in sampled_ids(node)], self.config.n
        ngrams = list(zip(*(tokens[start:] for start in range(n)), strict=False))
        repeated = len(ngrams) - len(set(ngrams))
        return bool(ngrams) and repeated / len(ngrams) > self.config.threshold
