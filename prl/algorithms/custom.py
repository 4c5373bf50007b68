"""Advantages by a function of the user."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from prl.algorithms.kl import KLPenalty
from prl.algorithms.length_penalty import LengthPenalty
from prl.base.errors import ConfigError
from prl.config.build import name_of
from prl.rollouts.rollout import Rollout


class ShapedRollout:
    """A rollout as the function sees it: `reward` is the shaped one, all else is the rollout's own."""

    def __init__(self, rollout: Rollout, reward: float):
        self._rollout = rollout
        self.reward = reward

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rollout, name)


@dataclass(kw_only=True)
class CustomAlgorithm(LengthPenalty, KLPenalty):
    """Advantages of the sampled tokens by a function over the group.

    A whole class of your own needs no function: subclass `Algorithm` and name the class with `_target_`.
    """

    fn: Callable[[list[Any]], Sequence[float | Sequence[float]]]
    """`fn(group)`, a list of rollouts, returns one advantage for each rollout, or one list for each, as long as the
    `token_ids` of its samples together. With a `length_penalty`, `rollout.reward` is the shaped reward. Further keys
    are its keyword arguments."""

    def check(self, where: str) -> None:
        # A class is callable as well, but would return an object in place of advantages.
        if not callable(self.fn) or inspect.isclass(getattr(self.fn, "func", self.fn)):
            raise ConfigError(f"{where}.fn={self.fn!r}: name a function, {where}.fn._target_=my_package.my_credit")

    def score_group(self, group: list[Rollout]) -> None:
        shown: list[Any] = group
        if self.length_penalty is not None:
            shown = [ShapedRollout(*pair) for pair in zip(group, self.shaped_rewards(group), strict=True)]
        credits = self.fn(shown)
        ordered = isinstance(credits, Sequence) or getattr(credits, "ndim", 0) > 0  # an array's rows
        if not ordered or len(credits) != len(group):
            got = f"{len(credits)} values" if ordered else f"a {type(credits).__name__}"
            raise ValueError(
                f"{name_of(self.fn)} must return a list with one entry for each of the {len(group)} rollouts, got {got}"
            )
        for rollout, credit in zip(group, credits, strict=True):
            rollout.assign_advantages(credit)
