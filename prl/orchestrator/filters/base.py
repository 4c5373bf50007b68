"""What a filter is."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prl.rollouts.rollout import Rollout


class Filter(ABC):
    """Says of a credited rollout whether it matches; `config.enforce` says whether a match is dropped.

    `vocab_size` is the number of tokens in the policy's vocabulary.
    """

    def __init__(self, config: Any, *, vocab_size: int):
        self.config = config
        self.vocab_size = vocab_size

    @classmethod
    def check(cls, config: Any, where: str) -> None:
        """Raise ConfigError for a config that cannot work; `where` is its key. Called before anything is started."""

    @abstractmethod
    def matches(self, rollout: "Rollout") -> bool:
        """True if the rollout is of the kind this filter looks for. Changes nothing about it."""
