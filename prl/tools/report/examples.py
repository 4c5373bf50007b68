"""The rollouts of a run's page: some steps of the run, their rollouts as rows, and of example groups the tokens.

Only the files of the chosen steps are read; what is left out is named.
"""

import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from prl.base.files import lines_of
from prl.rollouts.components import COMPONENTS
from prl.rollouts.pictures import is_digest
from prl.rollouts.record_lines import Message, Record
from prl.rollouts.rollout import Stage
from prl.runs.run_dir import STEP
from prl.tools.report.html import encoded, rounded
from prl.tools.rollouts.render import called, stage_and_source

ROLLOUTS = 10_000
"""Rows of the table of rollouts, from which on no further step is read."""
NAME = 200
"""Characters of a name or of a reason."""
TEXT_BYTES = 3_000_000
"""Messages on the page, as they stand in it. Example groups come first."""
PAGE_TOKENS = 40_000
"""Coloured tokens on the page."""
LONG = 12_000
"""Characters of a message; of longer ones both ends are shown."""
GROUPS, OF_AN_ENV, MEMBERS = 8, 3, 8
"""Example groups of a step, of an env at most, and rollouts shown of each."""

SEQUENCE_TOKENS = 4_000
"""Tokens of one sequence; the first ones are shown."""

Key = tuple[str, ...]
Column = Sequence[float | None]
Line = dict[str, Any]
"""A line of an export."""
Group = list[Record]


@dataclass
class Rollouts:
    """The data for the script of the page, and what was left out, in sentences."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    """One a rollout; those of example groups have `sequences`."""
    examples: list[dict[str, Any]] = field(default_factory=list)
    """One a step: `step` and its `groups`, each with its title and its rollouts' places in `rows`."""
    left_out: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Files that could not be read, and why."""
    has_tokens: bool = False


def read_rollouts(run_dir: Path, only: int | None = None, compared: Collection[int] = ()) -> Rollouts:
    """The rollouts that the page shows: of one step, or of as many as there is room for, `compared` ones among them."""
    files = {step: path for step, path in step_files(run_dir).items() if only in (None, step)}
    folders = exports(run_dir)
    page = Rollouts()
    if not files:
        return page
    shown = example_steps(list(files), folders) | (set(compared) & set(files))
    records: list[Record] = []
    read = 0
    for step in [*sorted(shown), *(step for step in reversed(files) if step not in shown)]:
        if len(records) < ROLLOUTS:
            records += lines_of(files[step], Record, page.problems)
            read += 1
    if read < len(files):
        page.left_out.append(f"{len(files) - read} of {len(files)} steps")
    page.rows = [row_of(record) for record in records]
    add_examples(page, records, {step: folders.get(step) for step in sorted(shown)})
    add_messages(page, records)
    return page


def step_files(run_dir: Path) -> dict[int, Path]:
    """Step -> the file of its rollouts, in the order of the steps."""
    paths = (run_dir / "rollouts").glob("step_*.jsonl")
    return dict(sorted((int(match[1]), path) for path in paths if (match := STEP.fullmatch(path.stem))))


def example_steps(steps: list[int], exported: Collection[int]) -> set[int]:
    """The first, a middle and the last step; in the middle one with tokens where there is any near."""
    half = (steps[0] + steps[-1]) / 2
    with_tokens = set(exported) & set(steps)
    # Tokens were exported for a few steps only; a middle step without them would show no colours.
    middle = min(with_tokens - {steps[0], steps[-1]} or steps, key=lambda step: abs(step - half))
    return {steps[0], middle, steps[-1], max(with_tokens, default=steps[-1])}


def add_examples(page: Rollouts, records: list[Record], folders: dict[int, Path | None]) -> None:
    """Add the example groups of the steps of `folders`, and their tokens from there while the page has room."""
    places = {id(record): place for place, record in enumerate(records)}
    room = PAGE_TOKENS
    for step, folder in folders.items():
        exported = read_tokens(folder, page.problems)
        entries = []
        for group in example_groups([record for record in records if record.step == step], exported):
            entries.append(entry_of(group, [places[id(record)] for record in group[:MEMBERS]]))
            for record in group[:MEMBERS]:
                sequences = readable(exported.get(key_of(record), []), record, page.problems)
                room -= sum(len(sequence["text"]) for sequence in sequences)
                # A rollout whose tokens do not fit any more keeps its messages.
                if sequences and room >= 0:
                    page.rows[places[id(record)]]["sequences"] = sequences
                    page.has_tokens = True
        if entries:
            page.examples.append({"step": step, "groups": entries})
    if room < 0:
        page.left_out.append(f"tokens beyond {PAGE_TOKENS:,}")


def example_groups(records: list[Record], exported: Collection[Key]) -> list[Group]:
    """Example groups of a step: of each env those whose rewards differ most, and one with a failure."""
    groups: dict[tuple[str, int, str], Group] = {}
    for record in records:
        groups.setdefault((record.env, record.group, str(record.task)), []).append(record)
    # Groups of equal rewards teach nothing, and show nothing to a reader.
    ranked = sorted(groups, key=lambda key: merit(groups[key], exported), reverse=True)
    chosen: list[Group] = []
    for env in dict.fromkeys(record.env for record in records):
        own = [key for key in ranked if key[0] == env]
        chosen += [groups.pop(key) for key in own[:OF_AN_ENV]]
    failed = [group for group in groups.values() if any(record.stage is Stage.FAILED for record in group)]
    return chosen[:GROUPS] + failed[:1]


def merit(group: Group, exported: Collection[Key]) -> tuple[bool, float]:
    """Return whether the tokens of a group whose rewards differ are there, and how much they differ."""
    rewards = [record.reward for record in group if record.reward is not None and record.stage is not Stage.FAILED]
    spread = round(statistics.pstdev(rewards), 6) if rewards else -1.0
    return spread > 0 and any(key_of(record) in exported for record in group), spread


def entry_of(group: Group, places: list[int]) -> dict[str, Any]:
    """An example group, whose first rollouts have these places in the table."""
    first = group[0]
    return {
        "title": f"{first.env}, task {str(first.task)[:NAME]}, group {first.group}",
        "rollouts": places,
        "more": len(group) - len(places),
    }


def row_of(record: Record) -> dict[str, Any]:
    """Return what the table shows; floats in four digits. Fields without anything are left out."""
    outcome = record.outcome
    turns = turns_of(record)
    row = {
        "step": record.step,
        "env": record.env[:NAME],
        "agent": record.agent if record.agent != "agent" else None,
        "task": str(record.task)[:NAME],
        "group": record.group,
        "rollout": record.rollout,
        "reward": rounded(record.reward),
        "advantage": rounded(record.advantage),
        "tokens": record.completion_tokens,
        "outcome": stage_and_source(outcome) if outcome else "evaluated",
        "reason": outcome.reason[:NAME] if outcome and outcome.reason else None,
        "parts": {name: rounded(value) for name, value in record.rewards.items()},
        "metrics": {name: rounded(value) for name, value in record.metrics.items()},
        "versions": None if record.start_version is None else [record.start_version, record.end_version],
        "pool": record.difficulty_pool,
        "stop": record.stop,
        "matched": record.matched,
        "turns": turns if turns != 1 else None,
    }
    return {name: value for name, value in row.items() if value not in (None, {})}


def turns_of(record: Record) -> int:
    """Replies that the model sampled in a rollout."""
    return sum(message.role == "assistant" and message.sampled for message in record.messages)


def add_messages(page: Rollouts, records: list[Record]) -> None:
    """Give rows their messages while there is room, those of examples first."""
    examples = [place for step in page.examples for group in step["groups"] for place in group["rollouts"]]
    room, without = TEXT_BYTES, 0
    # The examples first: what has no room left are rows that one sees only on asking.
    for place in dict.fromkeys([*examples, *range(len(records))]):
        shown = [message_of(records[place], message) for message in records[place].messages]
        size = len(encoded(shown))
        if size > room:
            without += 1
            continue
        room -= size
        page.rows[place]["messages"] = shown
    if without:
        page.left_out.append(f"the messages of {without:,} rollouts (prl rollouts has them)")


def message_of(record: Record, message: Message) -> dict[str, Any]:
    """A message as the script reads it. Fields without anything are left out."""
    shown = {
        "role": message.role,
        "text": ends_of(record.content_of(message)),
        "pictures": [[digest, record.picture(digest)] for _, digest in message.pictures if is_digest(digest)],
        "reasoning": ends_of(message.reasoning or ""),
        "calls": [ends_of(called(call)) for call in message.tool_calls],
        "name": message.name,
        "after": None if message.after is msgspec.UNSET else (message.after or 0) + 1,
        "shown": not message.sampled,
    }
    return {name: value for name, value in shown.items() if value or name == "text"}


def ends_of(text: str) -> str:
    """A text, or both ends of a long one."""
    if len(text) <= LONG:
        return text
    return f"{text[: LONG // 2]}\n[… {len(text) - LONG:,} characters left out …]\n{text[-LONG // 2 :]}"


# --- the tokens that the trainer exported (`prl/trainer/export.py`) ---------------------------------------------------


def exports(run_dir: Path) -> dict[int, Path]:
    """Step -> the folder of its export."""
    paths = (run_dir / "tokens").glob("step_*")
    return {int(match[1]): path for path in paths if (match := STEP.fullmatch(path.name))}


def read_tokens(folder: Path | None, problems: list[str]) -> dict[Key, list[Line]]:
    """The sequences of a step's export by rollout; none where there is no export."""
    sequences: dict[Key, list[Line]] = {}
    for path in sorted(folder.glob("rank_*.jsonl")) if folder else ():
        for line in lines_of(path, Line, problems):
            key = tuple(str(line.get(name)) for name in ("env", "group", "rollout", "agent"))
            sequences.setdefault(key, []).append(line)
    return sequences


def key_of(record: Record) -> Key:
    """The rollout of a record, as exports name it."""
    return tuple(map(str, (record.env, record.group, record.rollout, record.agent)))


def readable(lines: Sequence[Line], record: Record, problems: list[str]) -> list[dict[str, Any]]:
    """The columns of a rollout's lines but for those that lack a list, have lists of unlike lengths, or no numbers."""
    found = []
    for line in lines:
        try:
            found.append(columns(line) | {"pictures": pictures_of(line, record)})
        except (LookupError, TypeError, ValueError) as error:
            problems.append(f"tokens of step {line.get('step')}: a line cannot be read: {error!r}")
    return found


def pictures_of(line: Line, record: Record) -> list[tuple[int, int, str]]:
    """The pictures in a sequence: the place of the first placeholder token, their number, and the picture's name."""
    return [(start, length, record.picture(digest)) for start, length, digest in line.get("pictures") or ()]


def columns(line: Line) -> dict[str, Any]:
    """A sequence as the script reads it: a list of values for each name, null where a token has none."""
    end, mask = SEQUENCE_TOKENS, line["mask"]
    texts = line.get("text") or [f"⟨{token}⟩" for token in line["token_ids"]]
    uses = list(dict.fromkeys(line["use"][:end]))
    trained = [use not in ("context", "weight 0") for use in line["use"]]
    policy, sampler, teacher = line["trainer_logprobs"], line["inference_logprobs"], line.get("ref_logprobs")
    advantages = line.get("advantages")
    values: dict[str, Column | None] = {
        "advantage": advantages and where(trained, advantages),
        "policy logprob": policy,
        "sampler logprob": where(mask, sampler),
        "log-ratio": where([ratio is not None for ratio in line["ratio"]], difference(policy, sampler)),
        "ratio": line["ratio"],
        "teacher logprob": teacher and where(trained, teacher),
        "teacher divergence": teacher and difference(policy, teacher),
    }
    for component in COMPONENTS.values():
        members = [on and (sampled or not component.on_mask) for on, sampled in zip(trained, mask, strict=True)]
        weights = line.get(component.stream) or [component.absent_weight] * len(mask)
        values[f"{component.name} weight"] = where(members, weights, 0.0)
    return {
        "text": [str(text) for text, _ in zip(texts, mask, strict=True)][:end],
        "ids": [token for token, _ in zip(line["token_ids"], mask, strict=True)][:end],
        "sampled": [int(on) for on in mask[:end]],
        "uses": uses,
        "use": [uses.index(use) for use in line["use"][:end]],
        "more": max(0, len(mask) - end),
        "values": {name: [*map(rounded, column[:end])] for name, column in values.items() if column and any(column)},
    }


def where(kept: Sequence[bool], column: Column, otherwise: float | None = None) -> Column:
    """The column with `otherwise` where a token is not kept."""
    return [value if on else otherwise for value, on in zip(column, kept, strict=True)]


def difference(one: Column, other: Column) -> Column:
    """One column less the other, null where either is."""
    return [None if a is None or b is None else a - b for a, b in zip(one, other, strict=True)]
