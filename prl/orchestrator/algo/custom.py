"""Credit by a function, or by a class, of the user's own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from prl.config.instantiate import FunctionConfig, locate_call
from prl.config.model_reference import as_reference
from prl.errors import ConfigError
from prl.inference.sampling import SamplingConfig
from prl.orchestrator.algo.base import Algorithm

if TYPE_CHECKING:
    from prl.rollouts.rollout import Rollout


@dataclass
class CustomConfig:
    """Credit by a function over the group."""

    _target_: str = "prl.orchestrator.algo.custom.CustomAlgorithm"
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """How rollouts are sampled."""
    fn: FunctionConfig = field(default_factory=FunctionConfig)
    """`fn(group, **kwargs)`: one number for each rollout, or one list for each, as long as its samples' token ids."""


class CustomAlgorithm(Algorithm):
    """Credit of the sampled tokens: whatever a function of the user's makes of the group."""

    @classmethod
    def check(cls, config: Any, where: str) -> None:
        super().check(config, where)
        if config.fn._target_ is None:
            raise ConfigError(f"{where}.fn._target_ has no value: give the dotted path of your function")
        locate_call(config.fn, f"{where}.fn")

    async def setup(self) -> None:
        self.fn = locate_call(self.config.fn, "fn")

    def score_group(self, group: list["Rollout"]) -> None:
        name, credits = self.config.fn._target_, self.fn(group)
        ordered = isinstance(credits, Sequence) or getattr(credits, "ndim", 0) > 0  # an array's rows
        if not ordered or len(credits) != len(group):
            got = f"{len(credits)} values" if ordered else f"a {type(credits).__name__}"
            raise ValueError(
                f"{name} must return a list with one entry for each of the {len(group)} rollouts, got {got}"
            )
        for rollout, credit in zip(group, credits, strict=True):
            rollout.assign_advantages(credit)


@dataclass
class CustomClassConfig:
    """Config of an algorithm class that has no schema of its own."""

    _target_: str = MISSING
    """Its dotted path: a subclass of `prl.orchestrator.algo.base.Algorithm`."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """How rollouts are sampled."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """The class's own settings, added as +algo.kwargs.name=value; it finds them in `self.config.kwargs`. One with a
    `base_url` and otherwise only a frozen model's keys is a frozen model, for `connect`."""

    def __post_init__(self) -> None:
        for key, value in self.kwargs.items():
            if isinstance(value, Mapping) and "base_url" in value:
                self.kwargs[key] = as_reference(value)
