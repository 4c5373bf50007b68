"""The base class of filters."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from prl.errors import ConfigError

if TYPE_CHECKING:
    from prl.rollouts.rollout import Rollout


@dataclass(kw_only=True)
class Filter(ABC):
    """Recognises rollouts of one kind: `matches` is asked about every credited rollout.

    Subclass it, with knobs as keyword-only dataclass fields or as arguments of an `__init__` that passes the rest on
    (`**knobs`) to `super().__init__`.
    """

    enforce: bool = False
    """Drop what matches; false only records it."""

    mode_knobs: ClassVar[Mapping[str, Mapping[str, float]]] = {}
    """For a filter with a field `mode`: the knobs that each mode reads, and their defaults. The fields of such knobs
    are null by default, so that a knob set for another mode is noticed and refused."""

    def attach(self, *, vocab_size: int) -> None:
        """Hand over what is known of the policy: the number of tokens in its vocabulary."""
        self.vocab_size = vocab_size

    def check(self, where: str) -> None:
        """Raise ConfigError for knobs that contradict each other; `where` is the filter's config key.

        Bounds of one knob belong beside it, as `Annotated[float, Ge(0)]`. Call `super().check(where)` first.
        """
        if not self.mode_knobs:
            return
        mode: str = getattr(self, "mode")  # noqa: B009, the field of a subclass
        for other, knobs in self.mode_knobs.items():
            for name in knobs.keys() - self.mode_knobs[mode].keys():
                if (value := getattr(self, name)) is not None:
                    raise ConfigError(
                        f"{where}.{name}={value}: {where}.mode={mode} does not read it; choose {where}.mode={other}, "
                        f"or leave {name} out"
                    )

    def setting(self, name: str) -> float:
        """The value of a knob in `mode_knobs`: as set, or its default."""
        value: float | None = getattr(self, name)
        return next(knobs[name] for knobs in self.mode_knobs.values() if name in knobs) if value is None else value

    @abstractmethod
    def matches(self, rollout: "Rollout") -> bool:
        """Whether the rollout is of the kind this filter looks for. Must not change the rollout."""
