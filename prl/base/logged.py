"""The base of an env's algorithm, filters and curriculum: what they measure, and what they remember."""

import math
from typing import Any


class EnvPart:
    """Gives a component `log` and a state. It has no constructor that a subclass would have to call."""

    def state_dict(self) -> Any:
        """Return what the component remembers from one group to the next, as plain data for a checkpoint; None =
        nothing.

        Called at every step. `load_state_dict` gets it back when the run goes on, before the first rollout.
        """
        return None

    def load_state_dict(self, state: Any) -> None:
        """Take over what `state_dict` returned in an earlier part of the run."""

    def log(self, name: str, value: float) -> None:
        """Add a value to the metric `log/<env>/<name>`, the mean of a step's values. What is not finite is left out."""
        if math.isfinite(value):
            # Made here, not in a constructor: a subclass need not call one.
            vars(self).setdefault("_logged", {}).setdefault(name, []).append(float(value))

    def take_logged(self) -> dict[str, list[float]]:
        """The values since the last call, by name."""
        logged: dict[str, list[float]] = vars(self).pop("_logged", {})
        return logged
