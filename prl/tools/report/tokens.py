"""The tokens of example rollouts, from what the trainer exported (`prl/trainer/export.py`)."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from prl.errors import UNREADABLE
from prl.monitors.text import safe
from prl.rollouts.components import COMPONENTS
from prl.rollouts.record import Record

PAGE_TOKENS = 40_000
"""Tokens on a page."""
SEQUENCE_TOKENS = 4_000
"""Tokens of one sequence; the first ones are shown."""

Key = tuple[str, int, int, str]


class Line(msgspec.Struct):
    """A line of an export; what an older one lacks is null."""

    env: str
    token_ids: list[int]
    mask: list[bool]
    inference_logprobs: list[float | None]
    trainer_logprobs: list[float | None]
    ratio: list[float | None]
    fate: list[str]
    advantages: list[float | None] | None = None
    ref_logprobs: list[float | None] | None = None
    rl_weights: list[float | None] | None = None
    ce_weights: list[float | None] | None = None
    ref_kl_weights: list[float | None] | None = None
    text: list[str] | None = None
    group: int | None = None
    rollout: int | None = None
    agent: str | None = None


DECODER = msgspec.json.Decoder(Line)


class Tokens:
    """The exports of a run, read a step at a time."""

    def __init__(self, run_dir: Path):
        names = (run_dir / "tokens").glob("step_*")
        self._folders = {int(match[1]): path for path in names if (match := re.fullmatch(r"step_(\d+)", path.name))}
        self._read: dict[int, dict[Key, list[Line]]] = {}
        self._room = PAGE_TOKENS
        self.left_out: list[str] = []
        self.problems: list[str] = []
        """What could not be read, and where."""

    @property
    def steps(self) -> list[int]:
        """The steps that have an export."""
        return sorted(self._folders)

    def has(self, record: Record) -> bool:
        """Whether the rollout's tokens were exported."""
        return key_of(record) in self._step(record.step)

    def of(self, record: Record) -> list[dict[str, Any]]:
        """The rollout's sequences as columns `[tokens]`, while the page has room for them."""
        sequences = []
        for line in self._step(record.step).get(key_of(record), []):
            count = min(len(line.token_ids), SEQUENCE_TOKENS)
            if count > self._room:
                if not self.left_out:
                    self.left_out.append(f"tokens beyond {PAGE_TOKENS:,}")
                continue
            self._room -= count
            sequences.append(columns(line))
        return sequences

    def _step(self, step: int) -> dict[Key, list[Line]]:
        if step not in self._read:
            lines: dict[Key, list[Line]] = {}
            paths = sorted(self._folders[step].glob("rank_*.jsonl")) if step in self._folders else []
            for path in paths:
                for line in read_lines(path, self.problems):
                    if line.group is not None and line.rollout is not None:
                        lines.setdefault((line.env, line.group, line.rollout, line.agent or "agent"), []).append(line)
            self._read[step] = lines
        return self._read[step]


def columns(line: Line) -> dict[str, Any]:
    """A sequence as the script reads it: a list of values for each name, null where a token has none."""
    end = SEQUENCE_TOKENS
    fates = list(dict.fromkeys(line.fate[:end]))
    trained = [fate not in ("context", "weight 0") for fate in line.fate]
    text = line.text or [f"⟨{token}⟩" for token in line.token_ids]
    ratios = difference(line.trainer_logprobs, line.inference_logprobs)
    values: dict[str, Sequence[float | None] | None] = {
        "advantage": line.advantages and where(trained, line.advantages),
        "policy logprob": line.trainer_logprobs,
        "sampler logprob": where(line.mask, line.inference_logprobs),
        "log-ratio": where([ratio is not None for ratio in line.ratio], ratios),
        "ratio": line.ratio,
        "teacher logprob": line.ref_logprobs and where(trained, line.ref_logprobs),
        "teacher divergence": line.ref_logprobs and difference(line.trainer_logprobs, line.ref_logprobs),
    }
    for component in COMPONENTS.values():
        weights = getattr(line, component.stream, None)
        on = [member and (mask or not component.on_mask) for member, mask in zip(trained, line.mask, strict=True)]
        given = weights or [component.absent_weight] * len(line.mask)
        values[f"{component.name} weight"] = [weight if here else 0.0 for weight, here in zip(given, on, strict=True)]
    return {
        "text": [safe(token) for token in text[:end]],
        "ids": line.token_ids[:end],
        "sampled": [int(on) for on in line.mask[:end]],
        "fates": fates,
        "fate": [fates.index(fate) for fate in line.fate[:end]],
        "more": max(0, len(line.token_ids) - end),
        "values": {name: short(column[:end]) for name, column in values.items() if column and any(column)},
    }


def where(kept: Sequence[bool], column: Sequence[float | None]) -> list[float | None]:
    """The column with null where a token is not kept."""
    return [value if on else None for value, on in zip(column, kept, strict=True)]


def difference(one: Sequence[float | None], other: Sequence[float | None]) -> list[float | None]:
    """One column less the other, null where either is."""
    return [None if a is None or b is None else a - b for a, b in zip(one, other, strict=True)]


def short(column: Iterable[float | None]) -> list[float | None]:
    return [None if value is None else float(f"{value:.4g}") for value in column]


def key_of(record: Record) -> Key:
    return record.env, record.group, record.rollout, record.agent


def read_lines(path: Path, problems: list[str]) -> list[Line]:
    """The sequences in a file, but for those that cannot be read."""
    lines, damaged = [], 0
    for line in path.read_bytes().split(b"\n"):
        try:
            lines += [DECODER.decode(line)] if line else []
        except UNREADABLE:
            damaged += 1
    if damaged:
        problems.append(f"{path} is damaged: {damaged} line{'s' * (damaged != 1)} of it left out")
    return lines
