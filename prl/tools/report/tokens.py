"""The tokens of example rollouts, from what the trainer exported (`prl/trainer/export.py`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prl.base.files import lines_of
from prl.rollouts.components import COMPONENTS
from prl.rollouts.record_lines import Record
from prl.runs.run_dir import STEP
from prl.tools.report.html import rounded

SEQUENCE_TOKENS = 4_000
"""Tokens of one sequence; the first ones are shown."""

Key = tuple[str, ...]
Column = Sequence[float | None]


Line = dict[str, Any]
"""A line of an export."""


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


def readable(lines: Sequence[Line], problems: list[str]) -> list[dict[str, Any]]:
    """The columns of lines but for those that lack a list, or whose lists have unlike lengths or no numbers."""
    found = []
    for line in lines:
        try:
            found.append(columns(line))
        except (LookupError, TypeError, ValueError) as error:
            problems.append(f"tokens of step {line.get('step')}: a line cannot be read: {error!r}")
    return found


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
