"""The rollouts of a run's page: some steps of the run, their rollouts as rows, and of example groups the tokens.

Only the files of the chosen steps are read; what is left out is named. All text of models and tools passes `safe`,
which writes out what would turn the direction of writing or hide.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from prl.monitors.text import safe
from prl.rollouts.record import Record, read_records
from prl.rollouts.rollout import Stage
from prl.tools.report.html import encoded
from prl.tools.report.tokens import Tokens
from prl.tools.rollouts.render import called

ROLLOUTS = 10_000
"""Rows of the table of rollouts."""
STEPS = 40
"""Steps whose files are read, spread over the run."""
NAME = 200
"""Characters of a name or of a reason."""
TEXT_BYTES = 3_000_000
"""Messages on the page, as they stand in it. Example groups come first."""
LONG = 12_000
"""Characters of a message; of longer ones both ends are shown."""
GROUPS, MEMBERS = 4, 8
"""Example groups of a step, and rollouts shown of each."""
KINDS = ("mixed", "best", "worst")


@dataclass
class Rollouts:
    """What the script of the page gets, and what was left out, in sentences."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    """One a rollout; those of example groups have `sequences`."""
    examples: list[dict[str, Any]] = field(default_factory=list)
    """One a step: `step` and its `groups`, each with its kind, its title and its rollouts' places in `rows`."""
    left_out: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What could not be read, and where."""
    has_tokens: bool = False


def read_rollouts(run_dir: Path) -> Rollouts:
    """The rollouts that the page shows."""
    files, found = step_files(run_dir), Rollouts()
    if not files:
        return found
    tokens = Tokens(run_dir)
    shown = example_steps(list(files), tokens.steps)
    chosen = sorted({*shown, *spread(list(files), STEPS)}, key=lambda step: (step not in shown, step))
    records: list[Record] = []
    read = 0
    while read < len(chosen) and len(records) < ROLLOUTS:
        of_step, problems = read_records([files[chosen[read]]])
        found.problems += problems
        records += of_step
        read += 1
    if len(records) > ROLLOUTS:
        found.left_out.append(f"the last rollouts of step {chosen[read - 1]}")
        records = records[:ROLLOUTS]
    if read < len(files):
        found.left_out.append(f"{len(files) - read} of {len(files)} steps")
    places = {id(record): place for place, record in enumerate(records)}
    found.rows = [row_of(record) for record in records]
    for step in sorted(shown):
        groups = list(example_groups([record for record in records if record.step == step], tokens))
        if groups:
            entries = [entry_of(kind, group, places) for kind, group in groups]
            found.examples.append({"step": step, "groups": entries})
        for _, group in groups:
            for record in group[:MEMBERS]:
                found.rows[places[id(record)]]["sequences"] = tokens.of(record)
    found.left_out += tokens.left_out
    found.problems += tokens.problems
    found.has_tokens = any(row.get("sequences") for row in found.rows)
    add_messages(found, records)
    return found


def spread(items: list[int], count: int) -> list[int]:
    """At most so many of the items, evenly, the first and the last among them."""
    if len(items) <= count:
        return items
    return [items[round(place * (len(items) - 1) / (count - 1))] for place in range(count)]


def example_steps(steps: list[int], with_tokens: Iterable[int]) -> set[int]:
    """The first, a middle and the last step; in the middle one with tokens where there is any near."""
    half = (steps[0] + steps[-1]) / 2
    exported = set(with_tokens) & set(steps)
    middle = min(exported - {steps[0], steps[-1]} or steps, key=lambda step: abs(step - half))
    return {steps[0], middle, steps[-1]} | ({max(exported)} if exported else set())


def step_files(run_dir: Path) -> dict[int, Path]:
    """Step -> its file of training rollouts, in order."""
    paths = sorted((run_dir / "rollouts").glob("step_*.jsonl"))
    return {int(path.stem.removeprefix("step_")): path for path in paths if path.stem[5:].isdecimal()}


def example_groups(records: list[Record], tokens: Tokens) -> Iterator[tuple[str, list[Record]]]:
    """Example groups of a step: of each env the most mixed, the best and the worst, and one with a failure."""
    groups = [list(group) for _, group in groupby(sorted(records, key=group_key), key=group_key)]
    by_env: dict[str, list[list[Record]]] = {}
    for group in groups:
        by_env.setdefault(group[0].env, []).append(group)
    seen: set[int] = set()
    for kind in KINDS:
        for env_groups in by_env.values():
            rest = [group for group in env_groups if id(group) not in seen]
            if rest and len(seen) < GROUPS * min(2, len(by_env)):
                best = max(rest, key=lambda group: (merit(kind, group), any(map(tokens.has, group))))
                if kind == "mixed" and len(best) > 1 and merit(kind, best) == 0:
                    continue
                seen.add(id(best))
                yield kind if len(best) > 1 or kind != "mixed" else "single", best
    for group in groups:
        if id(group) not in seen and any(record.stage is Stage.FAILED for record in group):
            yield "failed", group
            break


def group_key(record: Record) -> tuple[str, int, str]:
    return record.env, record.group, str(record.task)


def merit(kind: str, group: list[Record]) -> float:
    rewards = [record.reward for record in group if record.reward is not None and record.stage is not Stage.FAILED]
    if not rewards:
        return float("-inf")
    mean = sum(reward / len(rewards) for reward in rewards)  # neither sums nor squares: an env may reward 1e308
    deviation = math.dist(rewards, [mean] * len(rewards)) / len(rewards) ** 0.5
    return {"mixed": round(deviation, 6), "best": mean, "worst": -mean}[kind]


def entry_of(kind: str, group: list[Record], places: dict[int, int]) -> dict[str, Any]:
    first = group[0]
    return {
        "kind": kind,
        "env": safe(first.env),
        "title": safe(f"{first.env}, task {str(first.task)[:NAME]}, group {first.group}"),
        "rollouts": [places[id(record)] for record in group[:MEMBERS]],
        "more": max(0, len(group) - MEMBERS),
    }


def row_of(record: Record) -> dict[str, Any]:
    """What the table shows; floats in four digits. Fields without anything are left out."""
    outcome = record.outcome
    row = {
        "step": record.step,
        "env": safe(record.env)[:NAME],
        "agent": safe(record.agent) if record.agent != "agent" else None,
        "task": safe(str(record.task))[:NAME],
        "group": record.group,
        "rollout": record.rollout,
        "reward": rounded(record.reward),
        "advantage": rounded(record.advantage),
        "tokens": record.completion_tokens,
        "outcome": (outcome.stage + (f" ({outcome.source})" if outcome.source else "")) if outcome else "evaluated",
        "reason": safe(outcome.reason)[:NAME] if outcome and outcome.reason else None,
        "parts": {safe(name): rounded(value) for name, value in record.rewards.items()},
        "metrics": {safe(name): rounded(value) for name, value in record.metrics.items()},
        "versions": None if record.start_version is None else [record.start_version, record.end_version],
        "pool": record.difficulty_pool,
        "stop": record.stop,
        "matched": {slot: safe(name) for slot, name in record.matched.items()},
    }
    return {name: value for name, value in row.items() if value not in (None, {})}


def rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def add_messages(found: Rollouts, records: list[Record]) -> None:
    """Give rows their messages while there is room, those of examples first."""
    examples = [place for step in found.examples for group in step["groups"] for place in group["rollouts"]]
    room, without = TEXT_BYTES, 0
    for place in dict.fromkeys([*examples, *range(len(records))]):
        shown = [message_of(message) for message in records[place].messages]
        size = len(encoded(shown))
        if size > room:
            without += 1
            continue
        room -= size
        found.rows[place]["messages"] = shown
    if without:
        found.left_out.append(f"the messages of {without:,} rollouts (prl rollouts has them)")


def message_of(message: Any) -> dict[str, Any]:
    calls = [safe(called(call)) for call in message.tool_calls]
    shown = {
        "role": safe(message.role),
        "text": ends_of(safe(message.content)),
        "reasoning": ends_of(safe(message.reasoning)) if message.reasoning else None,
        "calls": [ends_of(call) for call in calls],
        "name": safe(message.name) if message.name else None,
        "after": None if message.after is msgspec.UNSET else (message.after or 0) + 1,
        "shown": None if message.sampled else True,
    }
    return {name: value for name, value in shown.items() if value not in (None, [])}


def ends_of(text: str) -> str:
    if len(text) <= LONG:
        return text
    return f"{text[: LONG // 2]}\n[… {len(text) - LONG:,} characters left out …]\n{text[-LONG // 2 :]}"
