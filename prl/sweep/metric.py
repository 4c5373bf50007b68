"""The number of a run that a sweeper optimises."""

import difflib
import fnmatch
import json
import math
from pathlib import Path

from prl.config.sweeps import OptimizedMetricConfig
from prl.errors import UNREADABLE, PrlError
from prl.wire.metric_names import REWARDS


def optimized(run_dir: Path, config: OptimizedMetricConfig) -> float:
    """The optimised metric of a finished run, from its `metrics.jsonl`.

    Of each of the last `config.last` steps that have a metric of that name, the mean over those that match; then the
    mean over the steps. Step 0, the model before training, does not count.

    Raises:
        PrlError: The run has no such metric, or it is not a finite number.
    """
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        raise PrlError(f"optimized_metric: {path} is not there; leave the monitor jsonl on for a sweep")
    try:
        lines = [line for line in map(json.loads, path.read_bytes().splitlines()) if line["step"] > 0]
    except (OSError, *UNREADABLE, KeyError, TypeError) as error:
        raise PrlError(f"optimized_metric: {path} is damaged, a line of it cannot be read: {error}") from error
    patterns = REWARDS if config.key is None else (config.key,)
    found: list[list[float]] = []
    for pattern in patterns:
        matched = [[value for key, value in line.items() if fnmatch.fnmatchcase(key, pattern)] for line in lines]
        found = found or [values for values in matched if values]
    if not found:
        near = difflib.get_close_matches(patterns[0], {key for line in lines for key in line}, n=3, cutoff=0.3)
        raise PrlError(
            f"optimized_metric.key={patterns[0]!r}: {run_dir} has no such metric"
            + (f"; near it are {', '.join(near)}" if near else "")
        )
    last = [value for values in found[-config.last :] for value in values]
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in last):
        raise PrlError(f"optimized_metric.key={patterns[0]!r}: {run_dir} has values of it that are not finite")
    steps = found[-config.last :]
    return sum(sum(values) / len(values) for values in steps) / len(steps)
