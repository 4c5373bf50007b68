"""The rollouts of a step for trackers: their distributions, and a table. Read from the run directory."""

from collections.abc import Iterable
from pathlib import Path

from prl.rollouts.record_lines import Message, Record
from prl.rollouts.rollout import IN_BATCH, Stage

COLUMNS = ("env", "task", "group", "reward", "advantage", "stage", "filter", "tokens", "messages")
"""Of the table: `stage` is where a rollout left, `filter` the one that dropped it or, monitoring, matched it."""


def read_rollouts(run_dir: Path, step: int) -> list[Record]:
    """What is recorded of a step; [] of a step that has no file. A line that cannot be read is left out."""
    from prl.transport.files import lines_of, step_name  # composing a config does not need it

    return lines_of(run_dir / "rollouts" / f"{step_name(step)}.jsonl", Record, [])


def distributions(records: Iterable[Record]) -> dict[str, list[float]]:
    """Rewards, advantages, lengths and ages of the rollouts that did not fail, by `<metric>/<env>`."""
    by_env: dict[str, list[float]] = {}
    for record in records:
        if record.stage is Stage.FAILED:
            continue
        age = None
        if record.start_version is not None and record.stage in IN_BATCH:
            age = record.step - 1 - record.start_version
        values = {
            "reward": record.reward,
            "length": record.completion_tokens,
            "advantage": record.advantage,
            "off_policy": age,
        }
        for name, value in values.items():
            if value is not None:
                by_env.setdefault(f"{name}/{record.env}", []).append(value)
    return by_env


def rows(records: Iterable[Record]) -> list[list[str | float | None]]:
    """The table, in the order of `COLUMNS`."""
    return [
        [
            record.env,
            str(record.task),
            record.group,
            record.reward,
            record.advantage,
            str(record.stage),
            ", ".join(f"{slot}: {name}" for slot, name in record.matched.items()),
            record.completion_tokens,
            "\n".join(map(_said, record.messages)),
        ]
        for record in records
    ]


def _said(message: Message) -> str:
    calls = "".join(f" {call.name}({call.arguments})" for call in message.tool_calls)
    return f"{message.role}: {message.content}{calls}"
