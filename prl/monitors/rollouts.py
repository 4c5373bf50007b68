"""The rollouts of a step for trackers: their distributions, and a table. Read from the run directory."""

import math
from collections.abc import Iterable
from pathlib import Path

import msgspec

from prl.rollouts.record_lines import Message, Record, read_records
from prl.rollouts.rollout import IN_BATCH, Stage

COLUMNS = ("env", "task", "group", "reward", "advantage", "stage", "filter", "tokens", "messages")
"""Of the table: `stage` is where a rollout left, `filter` the one that dropped it or, monitoring, matched it."""


def read_rollouts(run_dir: Path, step: int) -> list[Record]:
    """What is recorded of a step; [] of a step that has no file. A line that cannot be read is left out."""
    from prl.transport.files import step_name  # composing a config does not need it

    path = run_dir / "rollouts" / f"{step_name(step)}.jsonl"
    return read_records([path])[0] if path.exists() else []


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


class Ratios(msgspec.Struct):
    """What is read of a line of the token export (`prl/trainer/export.py`)."""

    env: str
    ratio: list[float | None]


def log_ratios(run_dir: Path, step: int) -> dict[str, list[float]]:
    """Log of trainer over sampler of the step's exported tokens, by `log_ratio/<env>`.

    Every step has tokens with `trainer.token_export`; without it the first sequences of `trainer.example_steps` do.
    """
    from prl.transport.files import step_name

    by_env: dict[str, list[float]] = {}
    for path in sorted((run_dir / "tokens" / step_name(step)).glob("rank_*.jsonl")):
        for line in msgspec.json.Decoder(Ratios).decode_lines(path.read_bytes()):
            if values := [math.log(ratio) for ratio in line.ratio if ratio]:
                by_env.setdefault(f"log_ratio/{line.env}", []).extend(values)
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
