"""The time of a step, as every bench and every page measures it."""

import math
from collections.abc import Sequence


def mean_step(ends: Sequence[float]) -> float:
    """Return (time of the last step - time of the first) / (n - 1), where `ends` are the times of n steps in order.

    Returns NaN for fewer than two steps. The first step is left out because it contains the warm-up. A median would
    mislead: batches that end in pairs make long and short steps take turns, and the median is either of the two.
    """
    return (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else math.nan
