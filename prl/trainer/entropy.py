"""Entropy bonuses that are steered towards a target."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from prl.losses.compute import weighted_tokens
from prl.losses.interface import LossFunction, Metrics, per_token
from prl.rollouts.components import COMPONENTS
from prl.trainer.batch import Stack


@dataclass
class EntropyControl:
    """The coefficient c of a loss with `entropy_target` (Skywork-OR1, arXiv 2505.22312).

    After a step with the mean entropy e of its tokens, c grows by `step` where e < target, else it shrinks by it, not
    below 0; in the next step c is applied where e was below the target.
    """

    target: float
    step: float
    coef: float
    below: bool = True

    @property
    def applied(self) -> float:
        """The coefficient of the next step."""
        return self.coef if self.below else 0.0

    def update(self, entropy: float) -> None:
        """Take in the entropy of a step."""
        self.below = entropy < self.target
        self.coef = max(0.0, self.coef + (self.step if self.below else -self.step))


def take_controls(losses: Mapping[str, LossFunction]) -> tuple[dict[str, LossFunction], dict[str, EntropyControl]]:
    """The losses without the options of their controls, and the control of each that has a target, by name."""
    rest: dict[str, LossFunction] = {}
    controls: dict[str, EntropyControl] = {}
    for name, loss in losses.items():
        options: dict[str, Any] = dict(getattr(loss, "keywords", {}))
        target, step = options.pop("entropy_target", None), options.pop("entropy_step", 0.0)
        rest[name] = functools.partial(loss.func, **options) if isinstance(loss, functools.partial) else loss
        if target is not None:
            controls[name] = EntropyControl(target, step, options.get("entropy_coef", 0.0))
    return rest, controls


def entropy_metrics(controls: Mapping[str, EntropyControl], stack: Stack, entropy: torch.Tensor) -> Metrics:
    """`entropy_rl/<env, all>` of each control: entropy over the rl tokens of its loss, as (sum, count)."""
    metrics: Metrics = {}
    for name in controls:
        own = per_token([loss == name for loss in stack.losses], stack.sequence_lengths, entropy.device).bool()
        own = own & weighted_tokens(COMPONENTS["rl"], stack.mask, stack.streams.get("rl_weights"))
        metrics[f"entropy_rl/{name or 'all'}"] = (entropy[own].double().sum(), own.sum())
    return metrics
