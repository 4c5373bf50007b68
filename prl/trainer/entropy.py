"""Entropy bonuses that are steered towards a target."""

from collections.abc import Mapping
from dataclasses import dataclass

from prl.losses.options import PolicyOptions


@dataclass
class EntropyControl:
    """The coefficient of a loss with `entropy_target` (Skywork-OR1, arXiv 2505.22312).

    After a step with the mean entropy e, `coef` grows by `step` where e < target, else it shrinks by it, not below 0;
    in the next step it is applied where e was below the target.
    """

    target: float
    step: float
    coef: float
    below: bool = True

    @property
    def applied(self) -> float:
        """Return the coefficient of the next step."""
        return self.coef if self.below else 0.0

    def update(self, entropy: float) -> None:
        """Take in the entropy of a step, nats."""
        # The bonus only pushes up. Above the target it waits, and shrinks for its next use.
        self.below = entropy < self.target
        self.coef = max(0.0, self.coef + (self.step if self.below else -self.step))


def controls_of(losses: Mapping[str, PolicyOptions]) -> dict[str, EntropyControl]:
    """Return the control of each loss whose options have an `entropy_target`, by its name."""
    return {
        name: EntropyControl(options.entropy_target, options.entropy_step, options.entropy_coef)
        for name, options in losses.items()
        if options.entropy_target is not None
    }
