"""The number of a run that a sweeper optimises."""

import difflib
import fnmatch
import json
import math
from pathlib import Path

from prl.config.sweeps import OptimizedMetricConfig
from prl.errors import UNREADABLE, PrlError
from prl.monitors.metric_names import REWARDS


def optimized(run_dir: Path, config: OptimizedMetricConfig) -> float:
    """The optimised metric of a finished run, from its `metrics.jsonl`.

    Of each of the last `config.last` steps that have a metric of that name, the mean over those that match; then the
    mean over the steps. Step 0, the model before training, does not count.

    Raises:
        PrlError: The run has no such metric, or it is not a finite number.
    """
    path = run_dir / "metrics.jsonl"
    try:
        lines = [line for line in map(json.loads, path.read_bytes().splitlines()) if line["step"] > 0]
    except FileNotFoundError:
        raise PrlError(f"optimized_metric: {path} is not there; leave the monitor jsonl on for a sweep") from None
    except (OSError, *UNREADABLE, KeyError, TypeError) as error:
        raise PrlError(f"optimized_metric: {path} is damaged, a line of it cannot be read: {error}") from error
    patterns = REWARDS if config.key is None else (config.key,)
    steps: list[list[float]] = []
    for pattern in patterns:
        values = [[value for key, value in line.items() if fnmatch.fnmatchcase(key, pattern)] for line in lines]
        steps = steps or [matched for matched in values if matched]
    if not steps:
        near = difflib.get_close_matches(patterns[0], {key for line in lines for key in line}, n=3, cutoff=0.3)
        hint = f"; near it are {', '.join(near)}" if near else ""
        raise PrlError(f"optimized_metric.key={patterns[0]!r}: {run_dir} has no such metric{hint}")
    last = steps[-config.last :]
    if not all(value is not None and math.isfinite(value) for values in last for value in values):
        raise PrlError(f"optimized_metric.key={patterns[0]!r}: {run_dir} has values of it that are not finite")
    return sum(sum(values) / len(values) for values in last) / len(last)
