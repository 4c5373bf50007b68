"""Falls of a reward: the best of a run against its end, and what moved before it fell.

A run has one beginning and one end, on its page, in the terminal and in the README: a reward begins at its first
recorded value, and ends at the mean of its last `WINDOW` steps; a held-out reward at its last evaluation.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pandas as pd

from prl.base.metric_names import held_out
from prl.tools.report.statistics import curve

WINDOW = 5
"""Steps that sampled rewards are averaged over."""
SURE = 2.5
"""Standard errors of the difference that a fall exceeds, beyond those by which the best of so many means is lucky."""
LEAST_SHARE = 0.1
"""Share of the range of a run's reward, and of its best up to 1, that a fall is at least."""
HISTORY, NEAR, FEWEST = 30, 10, 5
"""Steps of a signal's history, and the fewest; steps between it and the start of the rollouts whose reward fell."""
UNKNOWN = 1 / 16
"""Standard error of an evaluation that recorded none: of 64 tasks with rewards of 0 and 1 the largest."""
FACTOR = 1.5
"""Ratio by which a signal leaves its history at least."""


@dataclass(frozen=True)
class Signal:
    """A metric that may say why a reward fell."""

    name: str
    metric: str
    least: float
    """Values below count as this one: they are healthy, and their ratios mean nothing."""
    remedy: str
    both_ways: bool = False
    """It harms when it falls, too."""


LOWER = "lower trainer.optim.lr"
ERRORED, TRUNCATED = "errored", "truncated"
"""The share of rollouts that failed and of those that were cut off, which `explained` works out."""
AT_ONCE = (ERRORED, TRUNCATED)
"""These lower the reward of their own step; what else moves with the reward may follow from it."""
SIGNALS = (
    Signal("failing rollouts", ERRORED, 0.05, "read the errors of the failed rollouts"),
    Signal("learning rate", "lr", 1e-12, f"{LOWER}, or another trainer.schedule"),
    Signal("truncated share", TRUNCATED, 0.05, "raise sampling.max_tokens, or read why replies do not end"),
    Signal("staleness", "off_policy/mean", 1.0, "lower orchestrator.max_async_level"),
    Signal("gap to the sampler", "logprob_gap/mean", 0.01, f"{LOWER} or orchestrator.max_async_level"),
    Signal("KL to the reference", "ref_kl", 0.01, f"raise algo.kl.coef, or {LOWER}"),
    Signal("gradient norm", "grad_norm", 0.001, f"{LOWER} or trainer.max_grad_norm"),
    Signal("entropy", "entropy/all/mean", 0.01, f"{LOWER}, or raise loss.entropy_coef if it fell", both_ways=True),
    Signal("length", "length/all/mean", 1.0, "read what the grader rewards in the replies", both_ways=True),
)


@dataclass(frozen=True)
class Course:
    """A reward over a run."""

    name: str
    first: float
    first_step: int
    best: float
    best_steps: tuple[int, int]
    """The first and the last of the steps with the highest mean."""
    last: float
    last_step: int
    fell: bool
    """It ends below its best by more than noise."""
    bad: int
    """The step of its largest fall, to the mean of some steps, from that of those before."""
    began: int
    """The last step before it went down."""
    ended: int
    """The step by which it was down."""
    evaluated: bool
    """Evaluations have it, not every step."""

    @property
    def text(self) -> str:
        """`held-out reward fell from 0.50 (step 0, its best) to 0.01`, or its beginning and end, or its one value."""
        if self.first_step == self.last_step:
            return f"{self.name} {score(self.last)}"
        if not self.fell:
            return f"{self.name} {score(self.first)} to {score(self.last)}"
        begin, end, (first, last) = score(self.first), score(self.last), self.best_steps
        best, steps = score(self.best), f"step {last}" if first == last else f"steps {first} to {last}"
        if last == self.first_step:
            return f"{self.name} fell from {best} ({steps}, its best) to {end}"
        if self.first < self.best and begin != best:
            return f"{self.name} rose from {begin} to {best} ({steps}, its best) and fell to {end}"
        return f"{self.name} fell from {begin} (its best mean {best}, {steps}) to {end}"


def sampled_course(name: str, values: pd.Series) -> Course | None:
    """The course of a reward that every step has: longer means find smaller falls, the shortest says when."""
    wider = [window for window in (2 * WINDOW, 4 * WINDOW, 8 * WINDOW) if 3 * window <= len(values)]
    found = [course(name, values, window) for window in (WINDOW, *wider)]
    return next((one for one in (*found, collapse(name, values)) if one is not None and one.fell), found[0])


def collapse(name: str, values: pd.Series) -> Course | None:
    """The course from the first step to the mean of the last ones: means hide a fall of the first few steps."""
    values = values[np.isfinite(values)]
    if len(values) <= WINDOW:
        return None
    first, last = values.iloc[0], values.iloc[-WINDOW:].mean()
    ends = pd.Series([first, last], [values.index[0], values.index[-1]])
    found = course(name, ends, 1, pd.Series(np.maximum(UNKNOWN, spread(values)), ends.index))
    bad, began, ended = decline(values, values.index[0], first, last, 1)
    return found and replace(found, bad=bad, began=began, ended=ended, evaluated=False)


def course(name: str, values: pd.Series, window: int, errors: pd.Series | None = None) -> Course | None:
    """The course of a reward; None where it was never recorded.

    Args:
        name: of the reward, in sentences.
        values: step -> reward.
        window: steps that make a mean.
        errors: step -> standard error of the reward, where more is known than its spread over the steps.
    """
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    whole = min(window, len(values))
    means = values.rolling(whole).mean().dropna()
    typical = np.minimum(means, values.rolling(whole).median().dropna())
    # A single lucky step does not make the best: where it lifts the mean above the median, that counts against it.
    place, last = int((2 * typical - means).to_numpy().argmax()), values.iloc[-min(window, WINDOW) :].mean()
    known = [] if errors is None else [errors[means.index[place]], errors[means.index[-1]]]
    # Noise that lasts for several steps does not average out: means apart from each other have it.
    of_means = spread(values.rolling(WINDOW).mean().dropna().iloc[::-WINDOW])
    of_one = spread(values, sparse=not known)
    error = np.nanmax([*known, of_one / math.sqrt(window), of_means / math.sqrt(window / WINDOW), -1.0])
    # The best of n means lies some sqrt(2 log n) standard errors too high, by luck alone.
    chances = SURE * math.sqrt(2) + math.sqrt(2 * math.log(max(2.0, len(values) / window)))
    best = typical.iloc[place]
    # Beyond the noise, and large enough to matter in the range of this reward.
    limit = best - max(error * chances, LEAST_SHARE * max(best - typical.min(), min(abs(best), 1.0)), 1e-9)
    bad, began, ended = decline(values, values.index[place], means.iloc[place], last, window)
    return Course(
        name=name,
        first=float(values.iloc[0]),
        first_step=int(values.index[0]),
        best=float(means.iloc[place]),
        best_steps=(int(values.index[place]), int(means.index[place])),
        last=float(last),
        last_step=int(means.index[-1]),
        fell=bool(error >= 0 and means.iloc[-1] < limit and last < best),
        bad=bad,
        began=began,
        ended=ended,
        evaluated=window == 1,
    )


def decline(values: pd.Series, since: int, best: float, last: float, window: int) -> tuple[int, int, int]:
    """Find where a reward went down after `since`: the step of its largest fall, the last before all of it, its end."""
    steps, short = values.index, min(window, len(values), WINDOW)
    before = values.rolling(short, min_periods=min(short, 2)).mean().shift(1)
    after = values[::-1].rolling(short, min_periods=1).mean()[::-1]
    drops, third = (before - after)[steps > since].dropna(), (best - last) / 3
    bad = drops.idxmax() if len(drops) else steps[-1]
    # From a third of the way down to two thirds: noise crosses a line at either end often.
    begins = max(steps[(before >= best - third) & (steps <= bad)], default=bad)
    ends = min(steps[(after <= last + third) & (steps >= begins)], default=steps[-1])
    slow = 0 if window == 1 else ends - begins  # the second third; the first and the last took as long
    began = max(steps[steps < begins - slow], default=steps[0])
    return int(bad), int(began), int(min(steps[steps >= ends + slow], default=steps[-1]))


def spread(values: pd.Series, *, sparse: bool = False) -> float:
    """The standard deviation around a slow course, by the median of second differences: jumps and trends do not count.

    NaN for too few values, and the larger the fewer there are. Where the mean of their squares is many times that, as
    of `sparse` rewards that are 0 in most steps, it counts.
    """
    # A second difference of noise has six times its variance.
    second = np.abs(np.diff(values.to_numpy(), 2)) / math.sqrt(6)
    if len(second) < 8:
        return math.nan
    # 1.4826 makes the deviation of normal noise of its median; of few values that is too small.
    found, jumps = 1.4826 * np.median(second) * (1 + 5 / len(second)), math.sqrt(np.mean(second**2))
    return float(jumps if sparse and jumps > 3 * found else found)


def held_out_course(name: str, metrics: pd.DataFrame) -> Course | None:
    """The course of the mean over all held-out rewards in `metrics`."""
    values, errors = held_out_mean(metrics)
    return course(name, values, 1, errors)


def held_out_mean(metrics: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """The mean of the held-out rewards by step, and its standard error.

    An env whose evaluations stop or begin later keeps its nearest value: the mean would jump without any change.
    """
    rewards = metrics[list(held_out({str(key): None for key in metrics}))].dropna(how="all").ffill().bfill()
    errors = [curve(metrics, f"{str(key).rpartition('/')[0]}/stderr").reindex(rewards.index) for key in rewards]
    squares = sum((error.fillna(UNKNOWN) ** 2 for error in errors), pd.Series(0.0, rewards.index))
    return rewards.mean(axis=1), squares**0.5 / max(1, len(errors))


class Move(NamedTuple):
    """A signal that left its range, and stayed outside."""

    step: int
    signal: Signal
    text: str
    """Name, step, the median before and the farthest value until the reward fell."""


def explained(metrics: pd.DataFrame, fall: Course) -> str:
    """Say what moved before a reward fell, in sentences with the values, and what to do about it."""
    failed = curve(metrics, "rollouts/errored") / curve(metrics, "rollouts/arrived").replace(0, np.nan)
    shares = {ERRORED: failed, TRUNCATED: curve(metrics, "truncated/all")}
    steps = metrics.assign(**{name: worst(metrics, name, of_step) for name, of_step in shares.items()})
    steps, span = steps[steps.index > 0].dropna(axis=1, how="all"), f"steps {fall.began} and {fall.ended}"
    sudden = not fall.evaluated and fall.ended - fall.began <= WINDOW
    when = f"at step {fall.bad}" if sudden else f"between {'the evaluations of ' * fall.evaluated}{span}"
    found = sorted((one for signal in SIGNALS for one in move(steps, signal, fall)), key=lambda one: one.step)
    # An evaluation comes after the update of its step.
    before = [one for one in found if one.signal.metric in AT_ONCE or one.step < fall.bad + fall.evaluated]
    if before:
        moves = ", then ".join(one.text for one in before[:3])
        return f"The reward fell {when}. First moved: {moves}. Try: {before[0].signal.remedy}."
    if fall.began - fall.first_step < FEWEST:
        return f"The reward fell in the first steps, by step {fall.ended}. Try: {LOWER}."
    names = ", ".join(signal.name for signal in SIGNALS if signal.metric in steps)
    beside = "; with it moved " * bool(found) + ", ".join(one.text for one in found)
    known = f"none of {names} was seen to move before" if names else "no signal was recorded"
    changed = f": {changed_part(metrics, fall)}" if names and sudden else ""
    return f"The reward fell {when}; {known}{beside}. Try: compare the rollouts of {span}{changed}."


def changed_part(metrics: pd.DataFrame, fall: Course) -> str:
    """The part of the env that changed: an evaluation has the same grader, and the same tasks each time."""
    held, _ = held_out_mean(metrics)
    before, after = held[held.index < fall.began], held[held.index >= fall.began]
    if not len(before) or not len(after):
        return "the tasks or the grader changed"
    place = min(after.index.searchsorted(fall.bad), len(after) - 1)
    now, step = after.iloc[place], after.index[place]
    part = "grader" if 2 * (before.iloc[-1] - now) > fall.best - fall.last else "tasks or their answers"
    held_out = f"the held-out reward, of tasks that stay the same, was {score(now)} at step {step}"
    return f"likely the {part} changed: {held_out}"


def worst(metrics: pd.DataFrame, share: str, of_steps: pd.Series) -> pd.Series:
    """A share of the rollouts of each step, or of those of the last evaluation if that is larger."""
    shares = metrics.filter(regex=f"^eval/.+/{share}$").ffill()
    shares[share] = of_steps
    return shares.max(axis=1)


def move(steps: pd.DataFrame, signal: Signal, fall: Course) -> list[Move]:
    """Return where a signal left its range, not later than the reward fell; empty where it did not.

    It has left where, in two steps in a row, it is farther outside of the range of its history than that is wide, and
    by `FACTOR` at least. Ratios count. What drifts has a range as wide as it needs.
    """
    raw = curve(steps, signal.metric).abs()
    values = np.log(raw.clip(lower=signal.least))
    stale = curve(steps, "off_policy/max").loc[: fall.bad].max()  # so many steps ago its rollouts began
    start = max([fall.began - NEAR - int(np.nan_to_num(stale)), *values.index[:FEWEST]])
    before, near = values[values.index <= start].iloc[-HISTORY:], values[values.index > start]
    if len(before) < FEWEST:
        return []
    margin = max(before.max() - before.min(), math.log(FACTOR))
    outside = (near > before.max() + margin) | (signal.both_ways & (near < before.min() - margin))
    left = near.index[outside & outside.shift(-1, fill_value=True)]
    if not len(left) or left[0] > fall.bad:
        return []
    farthest = (near.loc[left[0] : fall.bad] - before.median()).abs().idxmax()
    values = f"step {left[0]} on: {raw[before.index].median():.3g} to {raw[farthest]:.3g}"
    return [Move(int(left[0]), signal, f"{signal.name} ({values})")]


def score(value: float) -> str:
    """A reward: two decimals, and three digits where it is large."""
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.3g}"
