"""Filters: their base class, and the two stages of the pipeline that apply them.

`pre_batch` filters a group before it takes a place in a batch; `post_batch` filters a batch before it is sent to the
trainer, which makes it smaller. Evaluation applies neither.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from prl.base.errors import ConfigError
from prl.base.logged import EnvPart
from prl.base.user_code import called
from prl.config.build import build
from prl.rollouts.rollout import Rollout, Stage

ModeOptions = Mapping[str, Mapping[str, float]]
"""The options that each mode of a filter reads, and their defaults."""
MAX_COMPLETION = 1 << 32
"""Above the tokens of any completion."""
SlotName = Literal["pre_batch", "post_batch"]
STAGES: dict[SlotName, Stage] = {"pre_batch": Stage.PRE_FILTERED, "post_batch": Stage.POST_FILTERED}


@dataclass(kw_only=True)
class Filter(EnvPart, ABC):
    """Recognises rollouts of one kind: `matches` is called for every rollout with advantages.

    Subclass it, with options as keyword-only dataclass fields or as arguments of an `__init__` that passes the rest on
    (`**options`) to `super().__init__`.
    """

    enforce: bool = False
    """Drop matching rollouts; false only records the match."""

    mode_options: ClassVar[ModeOptions] = {}
    """Options of each value of a field `mode`. They are null by default, so that one of another mode is refused."""

    where = "filter"  # not an option; `check` replaces it
    """Its config key."""

    def attach(self, *, vocab_size: int, longest: int = MAX_COMPLETION) -> None:
        """Hand over what is known of policy and env: tokens in the vocabulary, and in the longest completion.

        A filter whose settings can match nothing there warns.
        """
        self.vocab_size, self.longest = vocab_size, longest

    def warn_unmatchable(self, name: str, why: str) -> None:
        """Warn that no rollout can match because of the option `name`."""
        warnings.warn(f"{self.where}.{name}={getattr(self, name)} matches nothing in this run: {why}", stacklevel=2)

    def check(self, where: str) -> None:
        """Raise ConfigError for options that contradict each other; `where` is the filter's config key.

        Bounds of one option belong beside it, as `Annotated[float, Ge(0)]`. Call `super().check(where)` first.
        """
        self.where = where
        mode = getattr(self, "mode", "")
        for other, options in self.mode_options.items():
            # An option of the other mode would change nothing, and whoever set it would believe it did.
            for name in options.keys() - self.mode_options[mode].keys():
                if (value := getattr(self, name)) is not None:
                    raise ConfigError(
                        f"{where}.{name}={value}: {where}.mode={mode} does not read it; choose {where}.mode={other}, "
                        f"or leave {name} out"
                    )

    def setting(self, name: str) -> float:
        """The value of an option in `mode_options`: as set, or its default."""
        value: float | None = getattr(self, name)
        return (
            next(options[name] for options in self.mode_options.values() if name in options) if value is None else value
        )

    @abstractmethod
    def matches(self, rollout: Rollout) -> bool:
        """Return whether the rollout is of the kind this filter looks for. Must not change the rollout."""


Filters = Mapping[SlotName, Mapping[str, Filter]]
"""The filters of an env: those of each slot by name, in the order in which they are asked."""


def build_filters(nodes: Mapping[str, Any], where: str) -> dict[str, Filter]:
    """The filters of a stage's config, by name, checked; `where` is the config key.

    Raises ConfigError for a filter that is null, for the errors of `build`, and for two filters of one type.
    """
    filters: dict[str, Filter] = {}
    for name, node in nodes.items():
        if node is None:
            raise ConfigError(f"{where}.{name}=null: to leave the filter out write '~{where}.{name}'")
        made = build(node, Filter, f"{where}.{name}")
        for same, other in filters.items():
            if type(other) is type(made):
                raise ConfigError(
                    f"{where}.{name} and {where}.{same} are both {type(made).__module__}.{type(made).__qualname__}: a "
                    "filter type may stand only once in a slot"
                )
        filters[str(name)] = made
    return filters


def apply_filters(filters: Filters, slot: SlotName, rollouts: Iterable[Rollout]) -> None:
    """Record the first match of each active rollout in `matched`. If that filter enforces, the rollout leaves.

    At most one filter of a stage is recorded for a rollout. A monitoring filter placed before an enforced one therefore
    hides shared matches from it.

    Raises:
        PrlError: A filter failed; the message names it.
    """
    for rollout in [rollout for rollout in rollouts if rollout.is_active]:
        for name, filter in filters.get(slot, {}).items():
            with called(f"filters.{slot}.{name}", filter, "matches"):
                matches = filter.matches(rollout)
            if matches:
                rollout.matched[slot] = name
                if filter.enforce:
                    rollout.leave(STAGES[slot], f"filter {name}", source=name)
                break
