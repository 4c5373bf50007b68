"""Rollout files: every rollout as a JSON line, with its messages and its outcome."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from verifiers.v1.graph import MessageNode

from prl.base.errors import UNREADABLE
from prl.base.files import content_of, step_name, write_atomically
from prl.rollouts.inputs import Picture
from prl.rollouts.pictures import SCHEME
from prl.rollouts.record_lines import Message, Record, ToolCall
from prl.rollouts.rollout import Rollout, encodable

INFO = 10_000
"""Characters of JSON that a record keeps of a value which the env's code left in the trace's `info`."""


def write_records(run_dir: Path, step: int, rollouts: Sequence[Rollout], prefix: str = "") -> None:
    """Append to `rollouts/<prefix>step_<n>.jsonl`.

    Without a prefix these are the batch of `step` and rollouts that never got into one; an evaluation of version n of
    the policy has the prefix `eval_<env>_`.
    """
    path = run_dir / "rollouts" / f"{prefix}{step_name(step)}.jsonl"
    write_atomically(path, content_of(path) + b"".join(_encoded(record(rollout, step)) for rollout in rollouts))


def _encoded(line: Record) -> bytes:
    """Return a JSON line. Names and texts may hold lone surrogates, which UTF-8 cannot encode: `?` for each."""
    try:
        return msgspec.json.encode(line) + b"\n"
    except UnicodeEncodeError:
        return encodable(json.dumps(msgspec.to_builtins(line), ensure_ascii=False)).encode() + b"\n"


def record(rollout: Rollout, step: int) -> Record:
    """Return a rollout as plain data."""
    return Record(
        step=step,
        env=rollout.env_name,
        agent=rollout.agent.name,
        task=rollout.task.data.idx,
        group=rollout.group_id,
        rollout=rollout.index,
        reward=rollout.reward,
        rewards={name: reward.value for name, reward in rollout.trace.rewards.items() if reward is not None},
        metrics=dict(rollout.metrics),
        advantage=rollout.mean_advantage,
        start_version=rollout.start_version,
        end_version=rollout.end_version,
        outcome=rollout.outcome,
        matched=dict(rollout.matched),
        info={str(name): _bounded(value) for name, value in rollout.trace.info.items()},
        difficulty_pool=rollout.difficulty_pool,
        stop=rollout.trace.stop_condition,
        completion_tokens=rollout.num_completion_tokens,
        samples=len(rollout.samples),
        pictures=list(pictures_of(rollout).values()) or msgspec.UNSET,
        messages=[_message(node, position - 1) for position, node in enumerate(rollout.trace.nodes)],
    )


def pictures_of(rollout: Rollout) -> dict[str, Picture]:
    """Return the pictures that a rollout's model calls were sent, by digest."""
    pictures: dict[str, Picture] = {}
    for call in rollout.trace.calls:
        for picture in getattr(call, "pictures", ()):
            pictures.setdefault(picture.digest, picture)
    return pictures


def _text_of(content: Any) -> str:
    """Return a message's content as text: its text parts one after the other, as chat templates join them."""
    if not isinstance(content, list):
        return content or ""
    return "".join(part.text for part in content if part.type == "text")


def _pictures_in(content: Any) -> list[tuple[int, str]]:
    """Return the pictures in a message's content: the place in its text before which each stands, and its digest."""
    pictures: list[tuple[int, str]] = []
    place = 0
    for part in content if isinstance(content, list) else ():
        if part.type == "image_url":
            pictures.append((place, part.image_url.url.removeprefix(SCHEME)))
        else:
            place += len(part.text)
    return pictures


def _bounded(value: Any) -> Any:
    """Return a value as plain data; of a long one the beginning of its JSON, of one that is no plain data its type."""
    try:
        value = encodable(value) if isinstance(value, str) else value
        text = msgspec.json.encode(value).decode()
        return msgspec.json.decode(text) if len(text) <= INFO else f"{text[:INFO]} …"
    except (TypeError, *UNREADABLE):
        return f"({type(value).__name__}, no plain data)"


def _message(node: MessageNode, before: int) -> Message:
    message = node.message
    fields = vars(message)  # not every role has all; asking pydantic for one that is not there is slow
    # Most messages follow the one before them. `after` is written where the history branches.
    return Message(
        message.role,
        _text_of(message.content),
        reasoning=fields.get("reasoning_content") or None,
        tool_calls=[ToolCall(call.name, call.arguments) for call in fields.get("tool_calls") or ()],
        name=fields.get("name") or None,
        after=msgspec.UNSET if node.parent == before or before < 0 else node.parent,
        sampled=message.role != "assistant" or node.sampled,
        pictures=_pictures_in(message.content),
    )
