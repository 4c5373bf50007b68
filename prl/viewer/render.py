"""Rollout records as text for a terminal: a table of the step, then each rollout as a header and its messages.

What models and tools said is not trusted: nothing of it is read as rich markup, and characters that a terminal would obey
are written out (`\\x1b`). This module loads neither torch nor verifiers; `prl/rollouts/records.py` writes what it reads.
"""

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from prl.errors import ConfigError

COLOURS = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
LABEL = 11  # columns: the longest role and a gap
NARROWEST = 20  # columns
# All but newline and tab that moves the cursor, starts a sequence, breaks a line or turns the direction of writing.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class ToolCall(msgspec.Struct):
    name: str
    arguments: str = ""


class Message(msgspec.Struct):
    role: str
    content: str = ""
    reasoning: str | None = None
    tool_calls: list[ToolCall] = []
    name: str | None = None
    sampled: bool = True
    after: int | None | msgspec.UnsetType = msgspec.UNSET


class Record(msgspec.Struct):
    """A line of a rollout file, as `records.record` documents it. What older runs did not write has a default."""

    step: int
    env: str
    group: int
    reward: float | None
    trained: bool
    messages: list[Message]
    agent: str = "agent"
    task: Any = None
    rewards: dict[str, float | None] = {}
    metrics: dict[str, float | None] = {}
    advantage: float | None = None
    start_version: int | None = None
    end_version: int | None = None
    not_trained_because: str | None = None
    error_kind: str | None = None
    filters: dict[str, str | None] = {}
    pool: str | None = None
    stop: str | None = None
    completion_tokens: int = 0
    samples: int = 1

    @property
    def matches(self) -> list[tuple[str, str, bool]]:
        """The filters that matched it: name, slot, and whether it is the one that dropped it, rather than watched."""
        found = [(name, slot) for slot, name in self.filters.items() if name]
        dropped = (self.not_trained_because or "").startswith("filter ")
        # What one slot dropped, the next was not asked about.
        return [(name, slot, dropped and place == len(found) - 1) for place, (name, slot) in enumerate(found)]

    @property
    def events(self) -> list[str]:
        """What the table counts: how it failed, which filters matched it, why else it was left out."""
        told = [f"failed ({self.error_kind})"] if self.error_kind else []
        told += [f"filter {name}" if dropped else f"filter {name} (monitor)" for name, _, dropped in self.matches]
        reason = self.not_trained_because
        if reason and reason != "evaluation" and not self.error_kind and not reason.startswith("filter "):
            told.append(reason.partition(":")[0])
        return told


def read(paths: Iterable[Path]) -> tuple[list[Record], list[str]]:
    """The records of some files, and a note on each file that has lines which cannot be read. Raises ConfigError where
    a whole file cannot."""
    decoder = msgspec.json.Decoder(Record)
    records, notes = [], []
    for path in paths:
        damaged, fine = [], 0
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        for number, line in enumerate(content.split(b"\n"), 1):
            if not line.strip():
                continue
            try:
                records.append(decoder.decode(line))
                fine += 1
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                damaged.append(number)
        if damaged:
            where = f"line {damaged[0]}" + (f" and {len(damaged) - 1} more" if len(damaged) > 1 else "")
            notes.append(f"{path}: {where} cannot be read (half written, or no rollout); the other {fine} can")
    return records, notes


def show(
    console: Console, title: str, records: list[Record], shown: list[Record], notes: list[str], evaluated: bool
) -> None:
    """Print the table of `records`, then those of them that are to be `shown`, group by group."""
    console.width = max(NARROWEST, console.width)
    console.print(Text(safe(title), "bold"))
    console.print(summary(records, evaluated))
    for note in notes:
        console.print(Text(safe(note), "yellow"))
    groups: dict[tuple, list[Record]] = {}
    for record in shown:
        groups.setdefault((record.env, record.group, str(record.task)), []).append(record)
    for (_, group, _), members in groups.items():
        heading = f"━━ group {group}: {len(members)} rollout{'s' * (len(members) > 1)}, reward {extent(members)} "
        console.print()
        console.print(Text(heading.ljust(console.width, "━"), "bold"))
        for record in members:
            console.print()
            console.print(rollout(console.width, record), soft_wrap=True)


def summary(records: list[Record], evaluated: bool) -> Table:
    """A row for each env, or for each of its agents where several play. A failed rollout is no part of the mean reward, but
    of an evaluation's, where it counts as 0 as in `eval/<env>/avg@<k>`."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("env")
    for name in ("rollouts", "reward") if evaluated else ("rollouts", "reward", "trained"):
        table.add_column(name, justify="right")
    table.add_column("failed" if evaluated else "failed, filtered, left out")
    for name, part in rows(records).items():
        rewards = [0.0 if r.error_kind else r.reward for r in part if evaluated or not r.error_kind]
        rewards = [reward for reward in rewards if reward is not None]
        mean = f"{sum(rewards) / len(rewards):.3f}" if rewards else "–"
        cells = [name, str(len(part)), mean] + ([] if evaluated else [str(sum(r.trained for r in part))])
        events = Counter(event for record in part for event in record.events)
        cells.append("\n".join(f"{n} {event}" for event, n in events.most_common()) or "–")
        table.add_row(*(Text(safe(cell)) for cell in cells))
    return table


def rows(records: list[Record]) -> dict[str, list[Record]]:
    """Name of a row of the table -> its records."""
    agents = {env: {r.agent for r in records if r.env == env} for env in {r.env: None for r in records}}
    parts: dict[str, list[Record]] = {}
    for record in records:
        alone = len(agents[record.env]) == 1
        parts.setdefault(record.env if alone else f"{record.env} {record.agent}", []).append(record)
    return parts | {"all": records} if len(parts) > 1 else parts


def rollout(width: int, record: Record) -> Text:
    """One rollout, on lines of at most `width` columns."""
    text = Text()
    for line in flow([Text(safe(fact), "bold") for fact in identity(record)], width):
        text.append_text(line).append("\n")
    for line in flow(facts(record), width, indent=2):
        text.append_text(line).append("\n")
    branched = any(message.after is not msgspec.UNSET for message in record.messages)
    margin = LABEL + (len(str(len(record.messages))) + 1 if branched else 0)
    if not record.messages:
        text.append("(no message)\n", "dim")
    for place, message in enumerate(record.messages):
        if message.after is not msgspec.UNSET:
            origin = "opens a history" if message.after is None else f"goes on after message {message.after + 1}"
            text.append(f"┄┄ another branch, {origin} ┄┄\n", "dim")
        for label, part, style in parts(message):
            label = f"{place + 1} {label}" if branched and label else label
            inset = 2 if message.role == "tool" else 0  # an answer stands in from the call that asked for it
            text.append(beside(safe(label), margin + inset, safe(part), width), style)
    text.right_crop(1)
    return text


def identity(record: Record) -> list[str]:
    agent = [f"agent {record.agent}"] if record.agent != "agent" else []
    return [f"step {record.step}", record.env, f"task {record.task}", f"group {record.group}", *agent]


def facts(record: Record) -> list[Text]:
    """What the header of a rollout says besides."""
    told = [f"reward {number(record.reward)}" + (f" ({named(record.rewards)})" if record.rewards else "")]
    told.append("no advantage" if record.advantage is None else f"advantage {record.advantage:+.4g}")
    told += [named(record.metrics)] if record.metrics else []
    first, last = record.start_version, record.end_version
    versions = f"version {first}" if first == last else f"versions {first} to {last}"
    told.append("frozen model" if first is None else versions)
    told += [f"pool {record.pool}"] if record.pool else []
    told.append(f"{record.completion_tokens} tokens")
    told += [f"{record.samples} samples"] if record.samples != 1 else []
    told += [f"stop {record.stop}"] if record.stop else []
    told += [f"matched by filter {name} ({slot})" for name, slot, dropped in record.matches if not dropped]
    return [*(Text(safe(fact)) for fact in told), *fate(record)]


def fate(record: Record) -> list[Text]:
    """That it was trained, or why not; nothing for an evaluation's."""
    reason = record.not_trained_because or "no reason recorded"
    if record.trained:
        return [Text("trained", "green")]
    if record.error_kind:
        return [Text(safe(f"failed ({record.error_kind}): {reason}"), "red")]
    slots = [f" ({slot})" for _, slot, dropped in record.matches if dropped]
    return [] if reason == "evaluation" else [Text(safe(f"not trained: {reason}{''.join(slots)}"), "yellow")]


def parts(message: Message) -> Iterator[tuple[str, str, str]]:
    """What a message consists of: label, text and style. The label is empty where it is that of the part before."""
    label, colour = message.role, COLOURS.get(message.role, "white")
    if message.reasoning:
        yield "reasoning", message.reasoning, "dim italic"
    if not message.sampled:
        yield label, "(shown to the model, not sampled)", "dim"
        label = ""
    if message.role == "tool":
        yield label, f"{message.name}: {message.content}" if message.name else message.content, colour
    elif message.content or not message.tool_calls:
        yield label, message.content or "(empty)", colour if message.content else "dim"
        label = ""
    for call in message.tool_calls:
        yield label, called(call), f"bold {colour}"
        label = ""


def called(call: ToolCall) -> str:
    """`name(key=value, …)`, or the arguments as the model wrote them where they are no JSON object."""
    try:
        arguments = msgspec.json.decode(call.arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return f"{call.name}({call.arguments})"
    return f"{call.name}({', '.join(f'{key}={spelt(value)}' for key, value in arguments.items())})"


def spelt(value: Any) -> str:
    """JSON; a text of several lines, as code is, with its lines."""
    several = isinstance(value, str) and "\n" in value
    return f'"""\n{value}\n"""' if several else msgspec.json.encode(value).decode()


def beside(label: str, margin: int, text: str, width: int) -> str:
    """The text in lines of at most `width` columns, with the label in the margin of the first."""
    room = max(NARROWEST, width - margin)
    lines = [line for paragraph in text.expandtabs().split("\n") for line in wrapped(paragraph, room)]
    lines = [f"{'' if place else label:{margin}}{line}" for place, line in enumerate(lines)]
    return "".join(line.rstrip() + "\n" for line in lines)


def wrapped(line: str, width: int) -> list[str]:
    if not line.isascii():  # rich counts columns, textwrap characters; it takes ten times as long
        return [piece.plain for piece in Text(line).wrap(None, width, overflow="fold")]
    return [line] if len(line) <= width else textwrap.wrap(line, width, break_on_hyphens=False)


def flow(texts: list[Text], width: int, indent: int = 0) -> Iterator[Text]:
    """The texts on as many lines as they need, none broken unless it is longer than a line."""
    margin = Text(" " * indent)
    line = margin.copy()
    for text in texts:
        for piece in text.wrap(None, width - indent, overflow="fold"):
            piece.rstrip()
            if len(line) == indent:
                line.append_text(piece)
            elif cell_len(line.plain) + 3 + cell_len(piece.plain) <= width:
                line.append(" · ", "dim").append_text(piece)
            else:
                yield line
                line = margin.copy().append_text(piece)
    yield line


def safe(text: str) -> str:
    """The text with what a terminal would obey written out, as Python writes it: `\\x1b`."""
    return CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def number(value: float | None) -> str:
    return "?" if value is None else f"{value:.4g}"


def extent(records: list[Record]) -> str:
    """Rewards of those that did not fail: `1`, or `0.05 to 1, mean 0.525`."""
    rewards = [record.reward for record in records if record.reward is not None and not record.error_kind]
    if not rewards or min(rewards) == max(rewards):
        return number(rewards[0] if rewards else None)
    return f"{min(rewards):.4g} to {max(rewards):.4g}, mean {sum(rewards) / len(rewards):.4g}"


def named(values: dict[str, float | None]) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in values.items())
