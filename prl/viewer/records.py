"""Rollout files, which `prl.rollouts.records` writes, as typed records. Loads neither torch nor verifiers."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from prl.errors import ConfigError

DROPPING_SLOTS = {"pre_filtered": "pre_batch", "post_filtered": "post_batch"}
"""Stage of an outcome -> the filter slot that decided it."""


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
    after: int | msgspec.UnsetType | None = msgspec.UNSET


class Outcome(msgspec.Struct):
    stage: str
    reason: str = ""
    source: str | None = None


class Record(msgspec.Struct):
    """A line of a rollout file, as `prl.rollouts.records.record` documents it."""

    step: int
    env: str
    group: int
    reward: float | None
    messages: list[Message]
    agent: str = "agent"
    task: Any = None
    rewards: dict[str, float | None] = {}
    metrics: dict[str, float | None] = {}
    advantage: float | None = None
    start_version: int | None = None
    end_version: int | None = None
    outcome: Outcome | None = None
    matched: dict[str, str] = {}
    difficulty_pool: str | None = None
    stop: str | None = None
    completion_tokens: int = 0
    samples: int = 1

    @property
    def stage(self) -> str:
        """The stage of its outcome; empty for a rollout of an evaluation that did not fail."""
        return "" if self.outcome is None else self.outcome.stage

    @property
    def trained(self) -> bool:
        return self.stage == "trained"

    @property
    def failed(self) -> bool:
        return self.stage == "failed"

    @property
    def monitored(self) -> list[tuple[str, str]]:
        """Slot and name of the filters that matched without dropping it."""
        return [(slot, name) for slot, name in self.matched.items() if slot != DROPPING_SLOTS.get(self.stage)]

    @property
    def events(self) -> list[str]:
        """What the table counts: the stage at which it left, unless it trained, and the filters that only matched."""
        events = []
        if self.outcome is not None and not self.trained:
            source = self.outcome.source
            events.append(self.stage.replace("_", "-") + (f" ({source})" if source else ""))
        return [*(f"matched ({name})" for _, name in self.monitored), *events]


def read(paths: Iterable[Path]) -> tuple[list[Record], list[str]]:
    """Read rollout files. Returns the records, and a note on each file with lines that cannot be read.

    Raises:
        ConfigError: A whole file cannot be read.
    """
    decoder = msgspec.json.Decoder(Record)
    records, notes = [], []
    for path in paths:
        damaged, readable = [], 0
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        for number, line in enumerate(content.split(b"\n"), 1):
            if not line.strip():
                continue
            try:
                records.append(decoder.decode(line))
                readable += 1
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                damaged.append(number)
        if damaged:
            where = f"line {damaged[0]}" + (f" and {len(damaged) - 1} more" if len(damaged) > 1 else "")
            notes.append(f"{path}: {where} cannot be read (half written, or not a rollout); the other {readable} can")
    return records, notes
