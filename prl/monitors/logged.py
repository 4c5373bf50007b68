"""What algorithms, filters and curricula measure of themselves."""

import math


class Logs:
    """Gives a component `log`. It has no constructor that a subclass would have to call."""

    def log(self, name: str, value: float) -> None:
        """Add a value to the metric `log/<env>/<name>`, the mean of a step's values. What is not finite is left out."""
        if math.isfinite(value):
            vars(self).setdefault("_logged", {}).setdefault(name, []).append(float(value))

    def take_logged(self) -> dict[str, list[float]]:
        """The values since the last call, by name."""
        logged: dict[str, list[float]] = vars(self).pop("_logged", {})
        return logged
