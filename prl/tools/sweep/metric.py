"""The number of a run that a sweeper optimises, and a summary compares runs by."""

import difflib
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean
from typing import Any

from prl.base.errors import ConfigError, PrlError
from prl.base.files import lines_of
from prl.base.metric_names import HELD_OUT, REWARDS, SAMPLED
from prl.config.model_reference import DEMONSTRATIONS, POLICY
from prl.config.schema import OptimizedMetricConfig

Line = dict[str, float | None]
"""The metrics of a step; None is how a number that is not finite is written."""


def optimized(run_dir: Path, options: OptimizedMetricConfig, config: Mapping[str, Any]) -> float:
    """The objective of a finished run, from its `metrics.jsonl` and its `config`.

    Raises:
        PrlError: The run has no such metric, it is not a finite number, or it is not the policy's own reward.
    """
    return objective(trained_steps(run_dir), options, config)


def trained_steps(run_dir: Path) -> list[Line]:
    """The lines of a run's `metrics.jsonl` without that of step 0, the model before training. Raises PrlError."""
    path = run_dir / "metrics.jsonl"
    problems = [] if path.is_file() else [f"{path} is not there; leave the monitor jsonl on for a sweep"]
    lines = [line for line in lines_of(path, Line, problems) if line.get("step")]
    if problems:
        raise PrlError(f"optimized_metric: {problems[0]}")
    return lines


def objective(lines: Sequence[Line], options: OptimizedMetricConfig, config: Mapping[str, Any]) -> float:
    """The mean over the last `options.last` steps that have the metric; of a step, over all metrics that match.

    Raises:
        PrlError: No step has the metric, it is not a finite number, or it is not the policy's own reward.
    """
    recorded = dict.fromkeys(key for line in lines for key in line)
    patterns = REWARDS if options.key is None else (options.key,)
    matched = [[key for key in recorded if fnmatchcase(key, pattern)] for pattern in patterns]
    keys = next(filter(None, matched), [])
    if not keys:
        near = difflib.get_close_matches(patterns[0], recorded, n=3, cutoff=0.3)
        hint = f"; near it are {', '.join(near)}" if near else ""
        raise PrlError(f"optimized_metric.key={patterns[0]!r}: the run has no such metric{hint}")
    own = [key for key in keys if not source_of(config, key)]
    if not own:
        raise PrlError(no_own_reward(source_of(config, keys[0])))
    steps = [[line[key] for key in own if key in line] for line in lines]
    last = [values for values in steps if values][-options.last :]
    # One that is not finite is written as null, which no mean may pass over.
    finite = [[value for value in values if value is not None] for values in last]
    if finite != last:
        raise PrlError(f"optimized_metric.key={own[0]!r}: the run has values of it that are not finite")
    return fmean(fmean(values) for values in finite)


def source_of(config: Mapping[str, Any], metric: str) -> str:
    """Return whose rollouts a metric of training rewards is about, where the policy did not sample them all.

    Returns:
        `demonstrations`, or `a frozen model`; empty for rewards of the policy and for every other metric.
    """
    match = re.match(r"(?:reward|metric)/([^/]+)/", metric)
    envs = _entry(config, "envs")
    trained = [name for name in envs if _entry(envs, name, "weight") != 0] if isinstance(envs, Mapping) else []
    for name in trained if match else ():
        source = _entry(envs, name, "algo", "sampling", "source") or _entry(config, "algo", "sampling", "source")
        if match and match[1] in ("all", "*", name) and source not in (None, POLICY):
            return DEMONSTRATIONS if source == DEMONSTRATIONS else "a frozen model"
    return ""


def no_own_reward(source: str) -> str:
    """A sentence that says why a run has no objective."""
    return (
        f"optimized_metric: the run's rewards in training are those of {source}, not the policy's: evaluate the run "
        "(orchestrator.eval.every=5), or name another metric as optimized_metric.key"
    )


def check_objective(options: OptimizedMetricConfig, config: Mapping[str, Any]) -> None:
    """Raise ConfigError for the config of a run that will have no reward of the policy's own to be optimised."""
    evaluates = _entry(config, "orchestrator", "eval", "every") is not None
    source = source_of(config, options.key or (HELD_OUT if evaluates else SAMPLED))
    if source:
        raise ConfigError(no_own_reward(source))


def _entry(config: Any, *keys: str) -> Any:
    """The value in nested mappings; None where a key is missing."""
    for key in keys:
        config = config.get(key) if isinstance(config, Mapping) else None
    return config
