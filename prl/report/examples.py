"""The rollouts of a run's page: some steps of the run, their rollouts as rows, and of example groups the tokens.

Only the files of the chosen steps are read, and no more than so many bytes of each; what is left out is said. All text
of models and tools passes `safe`, which writes out what would turn the direction of writing or hide.
"""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from prl.errors import UNREADABLE
from prl.report.html import encoded
from prl.report.tokens import Tokens, damage
from prl.rollouts.record import Record, read_record
from prl.rollouts.rollout import Stage
from prl.text import safe
from prl.viewer.render import called
from prl.wire.files import regular

ROLLOUTS = 10_000
"""Rows of the table of rollouts."""
STEPS = 40
"""Steps whose files are read, spread over the run."""
EXAMPLE_BYTES, FILE_BYTES = 16_000_000, 2_000_000
"""Read of the rollouts of a step with example groups, and of any other; what is behind is left out."""
ROW_BYTES = 3_500_000
"""The rows, without messages and tokens; beyond it, those outside example groups lose their metrics."""
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
    files = _files(run_dir)
    found = Rollouts()
    if not files:
        return found
    tokens = Tokens(run_dir)
    shown = example_steps(list(files), tokens.steps)
    chosen = shown | set(spread(list(files), STEPS))
    room, read, cut_steps = ROLLOUTS, 0, 0
    records: list[Record] = []
    for step in sorted(chosen, key=lambda step: (step not in shown, step)):
        if not room:
            break
        here, cut = _records(files[step], EXAMPLE_BYTES if step in shown else FILE_BYTES, found.problems)
        read += 1
        cut_steps += cut or len(here) > room
        records += here[:room]
        room -= len(here[:room])
    if cut_steps:
        found.left_out.append(f"the last rollouts of {cut_steps} of the steps here")
    if read < len(files):
        found.left_out.append(f"{len(files) - read} of {len(files)} steps")
    places = {id(record): place for place, record in enumerate(records)}
    found.rows = [_row(record) for record in records]
    slim = len(encoded(found.rows)) > ROW_BYTES
    for step in sorted(shown):
        groups = list(_groups([record for record in records if record.step == step], tokens))
        entries = [_group(kind, group, places) for kind, group in groups]
        if entries:
            found.examples.append({"step": step, "groups": entries})
        for _, group in groups:
            for record in group[:MEMBERS]:
                found.rows[places[id(record)]]["sequences"] = tokens.of(record)
    if slim:
        found.left_out.append("metrics and reasons of rollouts outside example groups")
        chosen_rows = {
            place for example in found.examples for group in example["groups"] for place in group["rollouts"]
        }
        for place, row in enumerate(found.rows):
            if place not in chosen_rows:
                for name in ("metrics", "parts", "reason"):
                    row.pop(name, None)
    found.left_out += tokens.left_out
    found.problems += tokens.problems
    found.has_tokens = any(row.get("sequences") for row in found.rows)
    _add_messages(found, records)
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


def _files(run_dir: Path) -> dict[int, Path]:
    """Step -> its file of training rollouts, in order."""
    paths = (run_dir / "rollouts").glob("step_*.jsonl")
    found = [(int(match[1]), path) for path in paths if (match := re.fullmatch(r"step_(\d+)\.jsonl", path.name))]
    return dict(sorted(found))


def _records(path: Path, most: int, problems: list[str]) -> tuple[list[Record], bool]:
    """The rollouts in the first `most` bytes of a file, less what cannot be read, and whether there are more."""
    try:
        with regular(path).open("rb") as file:
            data, cut = file.read(most), bool(file.read(1))
    except OSError:
        return [], False
    lines, records = data.split(b"\n"), []
    damaged = int(not cut and (not data or lines[-1] != b""))  # the file appeared whole, and was cut off since
    for line in lines[:-1]:  # behind the last newline is nothing, or a line cut off
        try:
            records.append(read_record(line))
        except UNREADABLE:
            damaged += 1
    if damaged:
        problems.append(damage(path, damaged))
    return records, cut


def _groups(records: list[Record], tokens: Tokens) -> Iterator[tuple[str, list[Record]]]:
    """Example groups of a step: of each env the most mixed, the best and the worst, and one with a failure."""
    groups = [list(group) for _, group in groupby(sorted(records, key=_group_key), key=_group_key)]
    by_env: dict[str, list[list[Record]]] = {}
    for group in groups:
        by_env.setdefault(group[0].env, []).append(group)
    seen: set[int] = set()
    for kind in KINDS:
        for env_groups in by_env.values():
            rest = [group for group in env_groups if id(group) not in seen]
            if rest and len(seen) < GROUPS * min(2, len(by_env)):
                best = max(rest, key=lambda group: (_merit(kind, group), any(map(tokens.has, group))))
                if kind == "mixed" and len(best) > 1 and _merit(kind, best) == 0:
                    continue
                seen.add(id(best))
                yield kind if len(best) > 1 or kind != "mixed" else "single", best
    for group in groups:
        if id(group) not in seen and any(record.stage is Stage.FAILED for record in group):
            yield "failed", group
            break


def _group_key(record: Record) -> tuple[str, int, str]:
    return record.env, record.group, str(record.task)


def _merit(kind: str, group: list[Record]) -> float:
    rewards = [record.reward for record in group if record.reward is not None and record.stage is not Stage.FAILED]
    if not rewards:
        return float("-inf")
    mean = sum(reward / len(rewards) for reward in rewards)  # neither sums nor squares: an env may reward 1e308
    deviation = math.dist(rewards, [mean] * len(rewards)) / len(rewards) ** 0.5
    return {"mixed": round(deviation, 6), "best": mean, "worst": -mean}[kind]


def _group(kind: str, group: list[Record], places: dict[int, int]) -> dict[str, Any]:
    first = group[0]
    return {
        "kind": kind,
        "env": safe(first.env),
        "title": safe(f"{first.env}, task {str(first.task)[:NAME]}, group {first.group}"),
        "rollouts": [places[id(record)] for record in group[:MEMBERS]],
        "more": max(0, len(group) - MEMBERS),
    }


def _row(record: Record) -> dict[str, Any]:
    """What the table shows; floats in four digits. Fields without anything are left out."""
    outcome = record.outcome
    row = {
        "step": record.step,
        "env": safe(record.env)[:NAME],
        "agent": safe(record.agent) if record.agent != "agent" else None,
        "task": safe(str(record.task))[:NAME],
        "group": record.group,
        "rollout": record.rollout,
        "reward": _rounded(record.reward),
        "advantage": _rounded(record.advantage),
        "tokens": record.completion_tokens,
        "outcome": (outcome.stage + (f" ({outcome.source})" if outcome.source else "")) if outcome else "evaluated",
        "reason": safe(outcome.reason)[:NAME] if outcome and outcome.reason else None,
        "parts": {safe(name): _rounded(value) for name, value in record.rewards.items()},
        "metrics": {safe(name): _rounded(value) for name, value in record.metrics.items()},
        "versions": None if record.start_version is None else [record.start_version, record.end_version],
        "pool": record.difficulty_pool,
        "stop": record.stop,
        "matched": {slot: safe(name) for slot, name in record.matched.items()},
    }
    return {name: value for name, value in row.items() if value not in (None, {})}


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _add_messages(found: Rollouts, records: list[Record]) -> None:
    """Give rows their messages while there is room: those of examples, then of all steps in turn."""
    chosen = [place for example in found.examples for group in example["groups"] for place in group["rollouts"]]
    ranks: dict[int, int] = {}
    order = []
    for place, record in enumerate(records):
        ranks[record.step] = ranks.get(record.step, -1) + 1
        order.append((ranks[record.step], place))
    room, without = TEXT_BYTES, 0
    for place in dict.fromkeys(chosen + [place for _, place in sorted(order)]):
        messages = records[place].messages
        if sum(min(LONG, len(message.content)) for message in messages) > room:
            without += 1
            continue
        shown = [_message(message) for message in messages]
        size = len(encoded(shown).encode())
        if size > room:
            without += 1
            continue
        room -= size
        found.rows[place]["messages"] = shown
    if without:
        found.left_out.append(f"the messages of {without:,} rollouts (prl rollouts has them)")


def _message(message: Any) -> dict[str, Any]:
    calls = [safe(called(call)) for call in message.tool_calls]
    shown = {
        "role": safe(message.role),
        "text": _ends(safe(message.content)),
        "reasoning": _ends(safe(message.reasoning)) if message.reasoning else None,
        "calls": [_ends(call) for call in calls],
        "name": safe(message.name) if message.name else None,
        "after": None if message.after is msgspec.UNSET else (message.after or 0) + 1,
        "shown": None if message.sampled else True,
    }
    return {name: value for name, value in shown.items() if value not in (None, [])}


def _ends(text: str) -> str:
    if len(text) <= LONG:
        return text
    return f"{text[: LONG // 2]}\n[… {len(text) - LONG:,} characters left out …]\n{text[-LONG // 2 :]}"
