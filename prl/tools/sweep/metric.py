"""The number of a run that a sweeper optimises."""

import difflib
import fnmatch
from pathlib import Path
from statistics import fmean

from prl.base.errors import PrlError
from prl.base.files import lines_of
from prl.base.metric_names import REWARDS
from prl.config.schema import OptimizedMetricConfig


def optimized(run_dir: Path, config: OptimizedMetricConfig) -> float:
    """The optimised metric of a finished run, from its `metrics.jsonl`.

    Of each of the last `config.last` steps that have a metric of that name, the mean over those that match; then the
    mean over the steps. Step 0, the model before training, does not count.

    Raises:
        PrlError: The run has no such metric, or it is not a finite number.
    """
    path = run_dir / "metrics.jsonl"
    problems = [] if path.is_file() else [f"{path} is not there; leave the monitor jsonl on for a sweep"]
    lines = [line for line in lines_of(path, dict[str, float | None], problems) if line.get("step")]  # without step 0
    if problems:
        raise PrlError(f"optimized_metric: {problems[0]}")
    patterns = REWARDS if config.key is None else (config.key,)
    steps: list[list[float | None]] = []
    for pattern in patterns:
        values = [[value for key, value in line.items() if fnmatch.fnmatchcase(key, pattern)] for line in lines]
        steps = steps or [matched for matched in values if matched]
    if not steps:
        near = difflib.get_close_matches(patterns[0], {key for line in lines for key in line}, n=3, cutoff=0.3)
        hint = f"; near it are {', '.join(near)}" if near else ""
        raise PrlError(f"optimized_metric.key={patterns[0]!r}: {run_dir} has no such metric{hint}")
    last = [[value for value in values if value is not None] for values in steps[-config.last :]]
    if last != steps[-config.last :]:  # null is how a number that is not finite is written
        raise PrlError(f"optimized_metric.key={patterns[0]!r}: {run_dir} has values of it that are not finite")
    return fmean(fmean(values) for values in last)
