"""Rollout records as text for a terminal.

Each is a header and its messages. Loads neither torch nor verifiers. What models and tools said is not trusted:
characters that a terminal would obey are written out (`\\x1b`).
"""

from collections.abc import Iterator

import msgspec

from prl.base.errors import UNREADABLE
from prl.base.text import safe
from prl.rollouts.record_lines import Message, Record, ToolCall
from prl.rollouts.rollout import Outcome, Stage

LABEL = 11  # columns: the longest role and a gap
RULE = 80  # columns


def step_text(title: str, records: list[Record], notes: list[str]) -> str:
    """Rollouts, group by group."""
    texts = [title, *notes]
    groups: dict[tuple, list[Record]] = {}
    for record in records:
        groups.setdefault((record.env, record.group, str(record.task)), []).append(record)
    for (_, group, _), members in groups.items():
        heading = f"━━ group {group}: {len(members)} rollout{'s' * (len(members) > 1)}, reward {extent(members)} "
        texts += ["", heading.ljust(RULE, "━")]
        for record in members:
            texts += ["", rollout(record)]
    return safe("\n".join(texts))


def stage_and_source(outcome: Outcome) -> str:
    """The stage and what decided it: `post-filtered (zero_advantage)`."""
    return outcome.stage.replace("_", "-") + (f" ({outcome.source})" if outcome.source else "")


def rollout(record: Record, source: str = "frozen model") -> str:
    """One rollout; `source` generated it where no policy did."""
    branched = any(message.after is not msgspec.UNSET for message in record.messages)
    indent = " " * (LABEL + (len(str(len(record.messages))) + 1 if branched else 0))
    lines = header(record, source)
    for place, message in enumerate(record.messages, start=1):
        if message.after is not msgspec.UNSET:
            origin = "opens a history" if message.after is None else f"goes on after message {message.after + 1}"
            lines.append(f"{indent}┄┄ another branch, {origin} ┄┄")
        for label, part in parts(message, record.content_of(message)):
            label = f"{place} {label}" if branched and label else label
            lines.append(label.ljust(len(indent)) + part.replace("\n", f"\n{indent}"))
    lines += [] if record.messages else ["(no message)"]
    for name, value in record.info.items():
        lines.append(f"{'info':{len(indent)}}{name}={spelt(value)}".replace("\n", f"\n{indent}"))
    return safe("\n".join(lines))


def header(record: Record, source: str) -> list[str]:
    """The lines above a rollout's messages: what it is; then reward, credit, versions, sizes, filters; and outcome."""
    agent = f"agent {record.agent}" if record.agent != "agent" else ""
    names = [f"step {record.step}", record.env, f"task {record.task}", f"group {record.group}", agent]
    first, last = record.start_version, record.end_version
    versions = f"version {first}" if first == last else f"versions {first} to {last}"
    facts = [
        f"reward {number(record.reward)}" + (f" ({named(record.rewards)})" if record.rewards else ""),
        "no advantage" if record.advantage is None else f"advantage {record.advantage:+.4g}",
        named(record.metrics),
        source if first is None else versions,
        f"difficulty pool {record.difficulty_pool}" if record.difficulty_pool else "",
        f"{record.completion_tokens} tokens",
        f"{record.samples} samples" if record.samples != 1 else "",
        f"stop {record.stop}" if record.stop else "",
        *(f"matched by filter {name} ({slot})" for slot, name in record.matched.items()),
    ]
    lines = [" · ".join(filter(None, names)), "  " + " · ".join(filter(None, facts))]
    if record.outcome is not None:
        reason = "" if record.stage == Stage.TRAINED else f": {record.outcome.reason}"
        lines.append(f"  {stage_and_source(record.outcome)}{reason}")
    return lines


def parts(message: Message, content: str) -> Iterator[tuple[str, str]]:
    """The parts of a message with this `content`, as label and text; the label is empty where it is that of before."""
    if message.reasoning:
        yield "reasoning", message.reasoning
    shown = [] if message.sampled else ["(shown to the model, not sampled)"]
    if message.role == "tool" and message.name:
        shown.append(f"{message.name}: {content}")
    elif content or not message.tool_calls:
        shown.append(content or "(empty)")
    shown += map(called, message.tool_calls)
    for place, text in enumerate(shown):
        yield "" if place else message.role, text


def called(call: ToolCall) -> str:
    """`name(key=value, …)`, or the arguments as the model wrote them if they are not a JSON object."""
    try:
        arguments = msgspec.json.decode(call.arguments or "{}", type=dict)
    except UNREADABLE:
        return f"{call.name}({call.arguments})"
    return f"{call.name}({', '.join(f'{key}={spelt(value)}' for key, value in arguments.items())})"


def spelt(value: object) -> str:
    """JSON; a text of several lines, as code is, with its lines."""
    several = isinstance(value, str) and "\n" in value
    return f'"""\n{value}\n"""' if several else msgspec.json.encode(value).decode()


def number(value: float | None) -> str:
    return "?" if value is None else f"{value:.4g}"


def extent(records: list[Record]) -> str:
    """Rewards of those that did not fail: `1`, or `0.05 to 1, mean 0.525`."""
    rewards = [record.reward for record in records if record.reward is not None and record.stage != Stage.FAILED]
    if not rewards or min(rewards) == max(rewards):
        return number(rewards[0] if rewards else None)
    return f"{min(rewards):.4g} to {max(rewards):.4g}, mean {sum(rewards) / len(rewards):.4g}"


def named(values: dict[str, float | None]) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in values.items())
