"""The verdict on a run, in sentences computed from its metrics; the thresholds stand at the top.

"First" and "last" are means over `ENDS` steps at either end (of a short run, over a third of it).
"""

import re
from dataclasses import dataclass
from typing import Literal

import pandas as pd

from prl.base.metric_names import SAMPLED
from prl.tools import line_of
from prl.tools.report.runs import Run
from prl.tools.report.shares import Shares
from prl.tools.report.statistics import curve

ENDS = 5
"""Steps over which the first and the last value of a metric are averaged."""
NO_SIGNAL = 0.5
"""Share of the last batches that nothing is learnt from, from which on it is said."""
LOST = (("off_policy/dropped", 0.05, "were dropped as too old"), ("rollouts/errored", 0.01, "failed"))
"""Metrics of rollouts that were lost, the share of those finished from which on it is said, and how."""
TRUNCATED = 0.1
"""Share of rollouts cut off by a length limit in the last steps, from which on it is said."""

Mood = Literal["plain", "good", "warn", "bad"]


@dataclass(frozen=True)
class Finding:
    """A sentence of the verdict."""

    text: str
    mood: Mood = "plain"


def verdict(run: Run, times: Shares | None = None) -> list[Finding]:
    """The verdict, its headline first: how a run ended where that is not as it should be, else what it came to.

    `times` says who was at work while its steps were made; None where that is not known.
    """
    steps = run.metrics[run.metrics.index > 0]
    state, signal = state_of(run), missing_signal(steps)
    ends = first_last(curve(steps, SAMPLED))
    reward = f"reward {score(ends[0])} to {score(ends[1])}" if ends else ""
    facts = [reward, times.bound if times else "", signal]
    text = "; ".join(filter(None, facts)) or "no training step was recorded"
    summary = Finding(f"{capitalised(text)}.")
    findings = [summary, state] if state.mood == "good" else [state, summary]
    findings += [*rewards(steps), *evaluations(run.metrics)]
    if times is not None:
        findings.append(Finding(f"{capitalised(times.sentence)}."))
    if signal:
        why = "its rollouts were dropped by a filter, or none of their tokens trained"
        findings.append(Finding(f"{signal}: {why}.", "warn"))
    return findings + [Finding(text, "warn") for text in warnings(steps)]


def capitalised(text: str) -> str:
    """A sentence's beginning."""
    return text[:1].upper() + text[1:]


def state_of(run: Run) -> Finding:
    """Return how the run ended, or that it has not."""
    asked, done = run.config.get("max_steps"), run.result.steps
    of = f"step {done} of {asked}" if asked is not None else f"step {done}"
    if run.status == "running":
        return Finding(f"Still running, at {of}.", "plain")
    if run.status == "completed":
        early = f", of {asked}: {run.result.ended_because}" if run.result.ended_because else ""
        return Finding(f"Completed {done} steps in {duration(run.result.seconds)}{early}.", "warn" if early else "good")
    error = line_of(run.result.error)
    if run.status == "stopped":
        return Finding(f"Stopped at {of}: {error or 'interrupted'}.", "warn")
    why = error or "its process is gone and has left no result"
    return Finding(f"{run.status.capitalize()} at {of}: {why}", "bad")


def rewards(steps: pd.DataFrame) -> list[Finding]:
    """The reward of each env, first and last."""
    findings = []
    envs = [match[1] for key in steps if (match := re.fullmatch(r"reward/(.+)/mean", key))]
    for env in [env for env in envs if env != "all"] or envs:
        if ends := first_last(curve(steps, f"reward/{env}/mean")):
            findings.append(Finding(f"{env}: sampled reward {score(ends[0])} to {score(ends[1])}."))
    return findings


def evaluations(metrics: pd.DataFrame) -> list[Finding]:
    """The held-out reward of each env, first and last."""
    findings = []
    for key in metrics:
        match = re.fullmatch(r"eval/(.+)/(avg@\d+)", str(key))
        series = curve(metrics, str(key))
        if match and len(series):
            last = f", {score(series.iloc[-1])} at {series.index[-1]}" if len(series) > 1 else ""
            first = f"{score(series.iloc[0])} at step {series.index[0]}"
            findings.append(Finding(f"{match[1]}: held-out reward ({match[2]}) {first}{last}."))
    return findings


def missing_signal(steps: pd.DataFrame) -> str:
    """The share of the last batches that nothing was learnt from, where it is NO_SIGNAL or more; else empty."""
    batch, trained = curve(steps, "rollouts/batch"), curve(steps, "rollouts/trained")
    share = (1 - trained / batch.where(batch > 0)).dropna().iloc[-ENDS:]
    missing = len(share) == ENDS and share.mean() >= NO_SIGNAL
    return f"{percent(share.mean())} of each of the last batches had no signal" if missing else ""


def warnings(steps: pd.DataFrame) -> list[str]:
    """Return what is not as it should be, by the thresholds above."""
    texts = []
    cut_off = first_last(curve(steps, "truncated/all"))
    if cut_off and cut_off[1] >= TRUNCATED:
        texts.append(f"A length limit cut off {percent(cut_off[1])} of the last rollouts.")
    finished = curve(steps, "rollouts/arrived").sum()
    for metric, least, how in LOST:
        lost = curve(steps, metric).sum()
        if finished and lost and lost >= least * finished:
            texts.append(f"{lost:.0f} rollouts {how}, {percent(lost / finished)} of those finished.")
    return texts


def first_last(series: pd.Series) -> tuple[float, float] | None:
    """The means of the first and of the last values; None without any."""
    count = min(ENDS, max(1, len(series) // 3))
    return (float(series.iloc[:count].mean()), float(series.iloc[-count:].mean())) if len(series) else None


def score(value: float) -> str:
    """A reward: two decimals, and three digits where it is large."""
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.3g}"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def duration(value: float) -> str:
    """Seconds as 42 s, 12 min or 3 h 5 min."""
    if value < 100:
        return f"{value:.0f} s"
    minutes = round(value / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
