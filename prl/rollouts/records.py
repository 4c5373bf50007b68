"""Rollout files: every rollout as a JSON line, with its messages and its outcome."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from verifiers.v1.graph import MessageNode
from verifiers.v1.types import Message, content_text

from prl.rollouts.rollout import Rollout
from prl.wire.files import step_name, write_atomically


def write_records(run_dir: Path, step: int, rollouts: Sequence[Rollout], prefix: str = "") -> None:
    """Append to `rollouts/<prefix>step_<n>.jsonl`.

    Without a prefix these are the batch of `step` and rollouts that never got into one; an evaluation of version n of
    the policy has the prefix `eval_<env>_`.
    """
    path = run_dir / "rollouts" / f"{prefix}{step_name(step)}.jsonl"
    before = path.read_bytes() if path.exists() else b""
    write_atomically(path, before + b"".join(_encoded(record(rollout, step)) for rollout in rollouts))


def _encoded(line: dict[str, Any]) -> bytes:
    """A JSON line. Names of rewards and texts may hold lone surrogates, which UTF-8 cannot encode: they are escaped."""
    try:
        return msgspec.json.encode(line) + b"\n"
    except UnicodeEncodeError:
        return json.dumps(line).encode() + b"\n"


def record(rollout: Rollout, step: int) -> dict[str, Any]:
    """One rollout as plain data.

    - `outcome`: stage, reason and source as in `prl.rollouts.rollout`; null for a rollout of an evaluation unless it
      failed.
    - `matched`: filter slot -> the filter that matched, enforced or not.
    - `messages`: every message of the trace once, on whichever branch, in order. A message that does not follow the one
      before it has `after`: the position (from 0) of the message that it follows, null where it opens a history. An
      assistant message that the model was shown and did not sample here has `sampled: false`.
    - `difficulty_pool`: the pool that its group moved the task to, or left it in.
    """
    mask = [trains for sample in rollout.samples for trains in sample.mask]
    credited = [a for a, trains in zip(rollout.advantages or [], mask, strict=False) if trains]
    return {
        "step": step,
        "env": rollout.env_name,
        "agent": rollout.agent.name,
        "task": rollout.task.data.idx,
        "group": rollout.group_id,
        "reward": rollout.reward,
        "rewards": {name: reward.value for name, reward in rollout.trace.rewards.items() if reward is not None},
        "metrics": dict(rollout.metrics),
        "advantage": sum(credited) / len(credited) if credited else None,
        "start_version": rollout.start_version,
        "end_version": rollout.end_version,
        "outcome": None if rollout.outcome is None else dataclasses.asdict(rollout.outcome),
        "matched": dict(rollout.matched),
        "difficulty_pool": rollout.difficulty_pool,
        "stop": rollout.trace.stop_condition,
        "completion_tokens": rollout.num_completion_tokens,
        "samples": len(rollout.samples),
        "messages": _messages(rollout.nodes),
    }


def _messages(nodes: list[MessageNode]) -> list[dict[str, Any]]:
    messages = []
    for position, node in enumerate(nodes):
        message: Message = node.message
        calls = getattr(message, "tool_calls", None) or ()
        optional = {
            "reasoning": getattr(message, "reasoning_content", None),
            "tool_calls": [{"name": call.name, "arguments": call.arguments} for call in calls],
            "name": message.name if message.role == "tool" else None,
        }
        plain: dict[str, Any] = {"role": message.role, "content": content_text(message.content)}
        plain |= {key: value for key, value in optional.items() if value}
        if position and node.parent != position - 1:
            plain["after"] = node.parent
        if message.role == "assistant" and not node.sampled:
            plain["sampled"] = False
        messages.append(plain)
    return messages
