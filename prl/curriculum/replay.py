"""Options of replay: training again on groups of earlier batches."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le


@dataclass
class ReplayConfig:
    """The replay buffer: groups of earlier batches that train again with their old advantages, newest policy first.

    Only groups whose advantages are not all zero. They count in `replay/*` and in `off_policy/*`.
    """

    share: Annotated[float, Ge(0), Le(0.9)] = 0.0
    """Share of the env's part of a batch to take from the replay buffer, as far as it has groups; 0 = none."""
    max_age: Annotated[int, Ge(1)] = 4
    """Largest staleness of a replayed rollout, policy versions; `orchestrator.max_off_policy_steps` holds as well."""
    max_uses: Annotated[int, Ge(1)] = 1
    """Most replays of a group."""
