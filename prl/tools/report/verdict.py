"""What a run came to, in sentences computed from its metrics; the thresholds stand at the top.

"First" and "last" are means over `ENDS` steps at either end (of a short run, over a third of it).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import pandas as pd

from prl.monitors.metric_names import SAMPLED
from prl.tools.report.runs import Run
from prl.tools.report.shares import Shares

ENDS = 5
"""Steps over which the first and the last value of a metric are averaged."""
NO_SIGNAL = 0.5
"""Share of a batch that nothing is learnt from, from which on it is said."""
FELL_BACK = 0.1
"""Share of the rise in reward whose loss again is said."""
ENTROPY_LEFT = 0.1
"""Share of the first entropy at which it counts as collapsed."""
GAP_GREW, GAP_HIGH = 5.0, 0.02
"""A gap between trainer and sampler is said to rise from this factor on, once it is this high [nats/token]."""
TRUNCATED = 0.1
"""Share of rollouts cut off by a length limit in the last steps."""
STALE = 0.05
"""Dropped as too old, of the rollouts that finished."""
ERRORED = 0.01
"""Failed, of the rollouts that finished."""
EVERY_STEP = (SAMPLED, "loss/mean", "grad_norm")
"""Metrics that every step has, unless they are not finite."""

Mood = Literal["plain", "good", "warn", "bad"]


@dataclass(frozen=True)
class Finding:
    """A sentence of the verdict."""

    text: str
    mood: Mood = "plain"


@dataclass(frozen=True)
class Verdict:
    """The line to read first, and the others."""

    headline: str
    findings: list[Finding]
    mood: Mood = "plain"


def verdict(run: Run, times: Shares | None = None) -> Verdict:
    """The verdict. How a run ended is its headline where that is not as it should be.

    `times` says who was at work while its steps were made; None where that is not known.
    """
    steps = run.metrics[run.metrics.index > 0]
    state, rise = state_of(run), rewards(steps)
    signal = missing_signal(steps)
    findings = [*rise, *evaluations(run.metrics)]
    if times is not None:
        findings.append(Finding(f"{times.sentence[:1].upper()}{times.sentence[1:]} (`prl timeline`)."))
    if signal:
        findings.append(Finding(signal[1], "warn"))
    findings += [Finding(text, "warn") for text in warnings(steps)]
    ceased = without_value(run.metrics)
    text = "; ".join(filter(None, [*ceased, reward_line(steps), times.bound if times else None, signal and signal[0]]))
    headline = f"{text[:1].upper()}{text[1:]}." if text else "No training step was recorded."
    mood: Mood = "warn" if ceased else "plain"
    if state.mood == "good":
        return Verdict(headline, [state, *findings], mood)
    return Verdict(state.text, [Finding(headline, mood), *findings], state.mood)


def without_value(metrics: pd.DataFrame) -> list[str]:
    """`no value of loss/mean, grad_norm after step 12`: of `EVERY_STEP`, those without one at the last step.

    A value that is not finite is written as null. A metric that the run does not record is none of these.
    """
    steps = metrics[metrics.index > 0]
    ended: dict[str, list[str]] = {}
    for key in EVERY_STEP:
        if key in steps and len(steps) and pd.isna(steps[key].iloc[-1]):
            last = steps[key].last_valid_index()
            ended.setdefault("at any step" if last is None else f"after step {last}", []).append(key)
    return [f"no value of {', '.join(keys)} {when}" for when, keys in ended.items()]


def state_of(run: Run) -> Finding:
    """How the run ended, or that it has not."""
    asked, done = run.config.get("max_steps"), run.result.steps
    of = f"step {done} of {asked}" if asked is not None else f"step {done}"
    if run.status == "running":
        return Finding(f"Still running, at {of}.", "plain")
    if run.status == "completed":
        early = f", of {asked}: {run.result.ended_because}" if run.result.ended_because else ""
        return Finding(f"Completed {done} steps in {duration(run.result.seconds)}{early}.", "warn" if early else "good")
    error = (run.result.error or "").strip()
    if run.status == "stopped":
        return Finding(f"Stopped at {of}: {error or 'interrupted'}.", "warn")
    why = error.splitlines()[-1] if error else "its process is gone and has left no result"
    return Finding(f"{run.status.capitalize()} at {of}: {why}", "bad")


def reward_line(steps: pd.DataFrame) -> str:
    ends = first_last(column(steps, SAMPLED))
    return f"reward {score(ends[0])} to {score(ends[1])}" if ends else ""


def rewards(steps: pd.DataFrame) -> list[Finding]:
    findings = []
    envs = [match[1] for key in steps if (match := re.fullmatch(r"reward/(.+)/mean", key))]
    for env in [env for env in envs if env != "all"] or envs:
        series = column(steps, f"reward/{env}/mean")
        if not (ends := first_last(series)):
            continue
        smooth = series.rolling(min(ENDS, len(series))).mean()
        best, at = smooth.max(), int(smooth.idxmax())
        text, mood = f"{env}: sampled reward {score(ends[0])} to {score(ends[1])}", "plain"
        if best - ends[0] > 0 and best - ends[1] > FELL_BACK * (best - ends[0]) and len(series) >= 4 * ENDS:
            text, mood = f"{text}, after {score(best)} at step {at}", "warn"
        findings.append(Finding(f"{text}.", mood))  # type: ignore[arg-type]
    return findings


def evaluations(metrics: pd.DataFrame) -> list[Finding]:
    findings = []
    for key in metrics:
        match = re.fullmatch(r"eval/(.+)/(avg@\d+)", str(key))
        series = column(metrics, str(key))
        if match and len(series):
            last = f", {score(series.iloc[-1])} at {series.index[-1]}" if len(series) > 1 else ""
            first = f"{score(series.iloc[0])} at step {series.index[0]}"
            findings.append(Finding(f"{match[1]}: held-out reward ({match[2]}) {first}{last}."))
    return findings


def missing_signal(steps: pd.DataFrame) -> tuple[str, str] | None:
    """The share of each batch that nothing is learnt from, and since when it is NO_SIGNAL or more."""
    batch, trained = column(steps, "rollouts/batch"), column(steps, "rollouts/trained")
    share = (1 - trained / batch.where(batch > 0)).dropna()
    if len(share) < ENDS:
        return None
    smooth = share.rolling(ENDS, min_periods=1).mean()
    below = smooth.index[smooth < NO_SIGNAL]
    since = share[share.index > below[-1]] if len(below) else share
    if len(since) < ENDS:
        return None
    from_step = f"from step {since.index[0]} on" if len(below) else "from the start"
    text = f"{percent(since.mean())} of each batch had no signal {from_step}"
    return text, f"{text}: its rollouts were dropped by a filter, or none of their tokens trained."


def warnings(steps: pd.DataFrame) -> Iterator[str]:
    """What is not as it should be, by the thresholds above."""
    first, last = first_last(column(steps, "entropy/all/mean")) or (0.0, 0.0)
    if first > 0 and last <= ENTROPY_LEFT * first:
        yield f"Entropy fell to {percent(last / first)}: {first:.3g} to {last:.3g} nats per token."
    first, last = first_last(column(steps, "logprob_gap/mean")) or (0.0, 0.0)
    if last >= GAP_HIGH and last >= GAP_GREW * first:
        yield f"The gap between trainer and sampler rose: {first:.2g} to {last:.2g} nats per token."
    for key in steps:
        match = re.fullmatch(r"truncated/(?!all$)(.+)", str(key))
        if match and (ends := first_last(column(steps, str(key)))) and ends[1] >= TRUNCATED:
            yield f"{match[1]}: a length limit cut off {percent(ends[1])} of the last rollouts."
    arrived = total(steps, "rollouts/arrived")
    dropped, failed = total(steps, "off_policy/dropped"), total(steps, "rollouts/errored")
    if arrived and dropped >= STALE * arrived:
        yield f"{dropped:.0f} rollouts were dropped as too old, {percent(dropped / arrived)} of those finished."
    if failed and failed >= ERRORED * arrived:
        kinds = {str(key).rpartition("/")[2]: total(steps, key) for key in steps if str(key).startswith("errors/all/")}
        most = max(kinds, key=lambda kind: kinds[kind], default="")
        named = f", most by {most}" if kinds.get(most) else ""
        yield f"{failed:.0f} rollouts failed, {percent(failed / arrived)} of those finished{named}."
    if invalid := total(steps, "tokens/invalid_logprobs"):
        yield f"{invalid:.0f} tokens had no usable sampler logprob and did not train."


def first_last(series: pd.Series) -> tuple[float, float] | None:
    """The means of the first and of the last values; None without any."""
    count = min(ENDS, max(1, len(series) // 3))
    return (float(series.iloc[:count].mean()), float(series.iloc[-count:].mean())) if len(series) else None


def column(frame: pd.DataFrame, key: str) -> pd.Series:
    """A metric where it was recorded."""
    return frame[key].dropna() if key in frame else pd.Series(dtype=float)


def total(frame: pd.DataFrame, key: str) -> float:
    """The sum of a metric over the steps."""
    return float(column(frame, key).sum())


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
