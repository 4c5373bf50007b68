"""The verdict on a run, in sentences computed from its metrics; the thresholds stand at the top, and in `falls.py`."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pandas as pd

from prl.base.checkpoint_folders import steps_of
from prl.base.errors import SIGNAL_REMEDY
from prl.base.files import lines_of
from prl.base.metric_names import SAMPLED, held_out
from prl.base.text import in_one_line, safe
from prl.rollouts.record_lines import Record
from prl.tools import line_of
from prl.tools.report.examples import step_files
from prl.tools.report.falls import WINDOW, Course, explained, held_out_course, sampled_course, score
from prl.tools.report.runs import Run
from prl.tools.report.shares import Shares
from prl.tools.report.statistics import curve
from prl.tools.sweep.metric import source_of

NO_SIGNAL = 0.5
"""Share of the last batches that nothing is learnt from, from which on it is said."""
LOST = (("off_policy/dropped", 0.05, "were dropped as too old"), ("rollouts/errored", 0.01, "failed"))
"""Metrics of rollouts that were lost, the share of those finished from which on it is said, and how."""
PROMPT, PARTS = 60, 4
"""Most characters of a prompt, and rewards and metrics by name, that are said of a step."""
CHANGED = 6
"""Most changed keys that are named of a run that went on."""
STALE = 8
"""Mean staleness of the last steps from which on it is said."""
TRUNCATED = 0.1
"""Share of rollouts cut off by a length limit in the last steps, from which on it is said."""

Mood = Literal["plain", "good", "warn", "bad"]


@dataclass(frozen=True)
class Finding:
    """A sentence of the verdict."""

    text: str
    mood: Mood = "plain"
    compared: tuple[int, ...] = ()
    """Steps whose rollouts show what changed."""


def verdict(run: Run, times: Shares | None = None) -> list[Finding]:
    """The verdict, its headline first: how a run failed, else that its reward fell, else what it came to.

    `times` says who was at work while its steps were made; None where that is not known.
    """
    steps = run.metrics[run.metrics.index > 0]
    state, signal, judged = state_of(run), missing_signal(steps), judged_rewards(run)
    facts = [*judged.texts, times.bound if times else "", signal]
    text = "; ".join(filter(None, facts)) or ("no reward of its own" if len(steps) else "no training step was recorded")
    summary = Finding(f"{capitalised(text)}.", judged.mood)
    came_to = [summary] + [Finding(judged.why, judged.mood, judged.compared)] * bool(judged.why)
    # A run that ended for want of a signal says why by its fall.
    other_end = state.mood == "bad" and run.result.reward_without_signal is None
    fell = judged.mood == "bad" and not other_end
    findings = [*came_to, state] if fell or state.mood == "good" else [state, *came_to]
    findings += [*starts(run), *rewards(run, steps), *evaluations(run)]
    if times is not None:
        findings.append(Finding(f"{capitalised(times.sentence)}."))
    if signal and judged.mood != "bad":  # else it follows from the fall
        why = "a filter dropped them, or nothing of them trained. Where a group earns all the same"
        findings.append(Finding(f"{signal}: {why}, {SIGNAL_REMEDY}.", "warn"))
    return findings + [Finding(text, "warn") for text in warnings(steps)]


@dataclass(frozen=True)
class Judged:
    """The rewards that a run is judged by."""

    texts: list[str]
    """Of the held-out reward, if it was evaluated twice, else of the sampled one; of that too where it fell."""
    mood: Mood
    why: str = ""
    """What moved first where they fell."""
    compared: tuple[int, ...] = ()
    """The steps before and after they did."""


def judged_rewards(run: Run) -> Judged:
    """The courses of the rewards, held-out before sampled.

    A fall of sampled rewards alone is a warning while the held-out reward contradicts it: their tasks may be others.
    """
    metrics = comparable(run)
    values = sampled_rewards(run, curve(metrics, SAMPLED))
    sampled = None if source_of(run.config, SAMPLED) else sampled_course("sampled reward", values)
    held = held_out_course("held-out reward", metrics)
    # The mean over envs may stand still while one of them falls.
    of_envs = [] if held is None or held.fell else fallen_envs(metrics)
    courses = [one for one in (held, *of_envs, sampled) if one is not None]
    if held is not None and held.first_step == held.last_step:
        courses.reverse()  # before training alone
    fallen = [one for one in courses if one.fell]
    if not fallen:
        return Judged([one.text for one in courses[:1]], "plain")
    # Of every step more is known than of an evaluation, but rollouts of old policies show a fall later.
    fall = fallen[0] if fallen[0].ended < fallen[-1].began else fallen[-1]
    texts = [one.text for one in fallen]
    compared = (fall.began, fall.bad)
    why = explained(metrics, fall)
    # No metric moved before: the rollouts themselves may show what changed.
    if "compare the rollouts" in why:
        why += beside(run.dir, compared)
    forked = [resume.step for resume in run.resumes if resume.source is not None]
    kept = sorted(step for step in (*forked, *steps_of(run.dir)) if step <= fall.began)
    why += f" The last checkpoint before: step {kept[-1]}." if kept else " No checkpoint is from before."
    evaluated = any(one.evaluated for one in fallen)
    if held is None or evaluated or held.last_step < fall.bad or 2 * (held.best - held.last) > fall.best - fall.last:
        return Judged(texts, "bad", why, compared)
    return Judged([held.text, *texts], "warn", why, compared)


def comparable(run: Run) -> pd.DataFrame:
    """The metrics of a run; of a fork behind those of its source, if the rewards of both are of the same kind."""
    changed = {key.partition(".")[0] for resume in run.resumes for key in resume.changed}
    return run.metrics if changed & {"envs", "algo"} else run.whole


def fallen_envs(metrics: pd.DataFrame) -> list[Course]:
    """The held-out rewards of single envs that fell."""
    found = [held_out_course(f"held-out reward of {env}", columns) for env, _, columns in held_out_by_env(metrics)]
    return [one for one in found if one is not None and one.fell]


def beside(run_dir: Path, steps: tuple[int, int]) -> str:
    """Compare what the rollouts of two steps were asked, and earned by name; empty if one has none or several envs."""
    seen = [sight(lines_of(path, Record, [])) for step, path in step_files(run_dir).items() if step in steps]
    return f" Before: {seen[0]}. Then: {seen[1]}." if len(seen) == 2 and all(seen) else ""


def sight(records: list[Record]) -> str:
    """`"44+42=" "86", answer 0.61, correct 0.58`: a prompt, its reply, and means of rewards and metrics by name."""
    if len({record.env for record in records}) != 1:
        return ""
    shown = {message.role: message.content for message in reversed(records[0].messages)}
    example = [f'"{in_one_line(shown[role])[:PROMPT]}"' for role in ("user", "assistant") if role in shown]
    means = pd.DataFrame([record.rewards | record.metrics for record in records]).astype(float).mean().dropna()
    parts = [f"{name[:PROMPT]} {score(value)}" for name, value in means.items()]
    return safe(", ".join(filter(None, [" ".join(example), *parts[:PARTS]])))


def sampled_rewards(run: Run, rewards: pd.Series) -> pd.Series:
    """A reward of each step; then that of the batches without signal that ended the run, which made no steps."""
    lost = run.result.reward_without_signal
    if lost is None or not len(rewards):
        return rewards
    last = int(rewards.index[-1])
    return pd.concat([rewards, pd.Series(lost, index=range(last + 1, last + 1 + WINDOW))])


def summary(run: Run, times: Shares | None) -> list[str]:
    """The verdict for a terminal: the rewards, what moved where they fell, and who was at work."""
    judged = judged_rewards(run)
    return list(filter(None, ["; ".join(judged.texts), judged.why, times.sentence if times else ""]))


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


def starts(run: Run) -> list[Finding]:
    """Say where a run went on, with the keys that changed, and which run it forked."""
    findings = []
    for resume in run.resumes:
        how = f"Forked from {resume.checkpoint}" if resume.source else f"Resumed after step {resume.step}"
        texts = [
            f"{key}={now} (before {before})"
            for key, (before, now) in resume.changed.items()
            if "<absent>" not in (before, now) and key != "max_steps"
        ]
        more = f" and {len(texts) - CHANGED} more" if len(texts) > CHANGED else ""
        with_keys = f" with {', '.join(texts[:CHANGED])}{more}" if texts else ""
        findings.append(Finding(f"{how}{with_keys}."))
    return findings


def rewards(run: Run, steps: pd.DataFrame) -> list[Finding]:
    """The sampled reward of each env."""
    findings = []
    envs = [match[1] for key in steps if (match := re.fullmatch(r"reward/(.+)/mean", key))]
    named = [env for env in envs if env != "all"] or envs
    for env in named:
        source = source_of(run.config, f"reward/{env}/mean")
        name = f"{env}: reward of {source}" if source else f"{env}: sampled reward"
        values = curve(steps, f"reward/{env}/mean")
        of_env = values if len(named) > 1 else sampled_rewards(run, values)
        if one := sampled_course(name, of_env):
            findings.append(Finding(f"{one.text}.", "warn" if one.fell else "plain"))
    return findings


def evaluations(run: Run) -> list[Finding]:
    """The held-out reward of each env, with its best where that was not the last."""
    findings = []
    for env, metric, columns in held_out_by_env(run.metrics):
        if one := held_out_course(f"{env}: held-out reward ({metric})", columns):
            best = f", the best {score(one.best)} at {one.best_steps[0]}" * (
                not one.fell and score(one.best) != score(one.last)
            )
            findings.append(Finding(f"{one.text} at step {one.last_step}{best}.", "warn" if one.fell else "plain"))
    return findings


def held_out_by_env(metrics: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Yield each env, the name of its held-out reward, and the columns of this and of its standard error."""
    for key in held_out({str(key): None for key in metrics}):
        env, _, name = key.removeprefix("eval/").rpartition("/")
        yield env, name, metrics.filter(items=[key, f"eval/{env}/stderr"])


def missing_signal(steps: pd.DataFrame) -> str:
    """The share of the last batches that nothing was learnt from, where it is NO_SIGNAL or more; else empty."""
    batch, trained = curve(steps, "rollouts/batch"), curve(steps, "rollouts/trained")
    share = (1 - trained / batch.where(batch > 0)).dropna().iloc[-WINDOW:]
    missing = len(share) == WINDOW and share.mean() >= NO_SIGNAL
    return f"{percent(share.mean())} of each of the last batches had no signal" if missing else ""


def warnings(steps: pd.DataFrame) -> list[str]:
    """Return what is not as it should be, by the thresholds above."""
    texts = []
    made = steps.filter(regex="^(?!eval/)").dropna(how="all")  # more than an evaluation
    since = (made.index > max(curve(made, SAMPLED).index, default=0)).sum()
    if since and SAMPLED in made:
        texts.append(f"The last {since} steps have no finite reward.")
    cut_off = curve(steps, "truncated/all").iloc[-WINDOW:].mean()
    if cut_off >= TRUNCATED:
        texts.append(f"A length limit cut off {percent(cut_off)} of the last rollouts.")
    stale = curve(steps, "off_policy/mean").iloc[-WINDOW:].mean()
    if stale >= STALE:
        text = f"The last rollouts were {stale:.0f} policy versions old: a lower orchestrator.max_async_level"
        texts.append(f"{text} or trainer.optim.lr keeps them closer to the policy.")
    finished = curve(steps, "rollouts/arrived").sum()
    for metric, least, how in LOST:
        lost = curve(steps, metric).sum()
        if finished and lost and lost >= least * finished:
            texts.append(f"{lost:.0f} rollouts {how}, {percent(lost / finished)} of those finished.")
    return texts


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def duration(value: float) -> str:
    """Seconds as 42 s, 12 min or 3 h 5 min."""
    if value < 100:
        return f"{value:.0f} s"
    minutes = round(value / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
