"""Rollout files: every rollout as a JSON line, with what it said and why it was or was not trained."""

import json
from pathlib import Path
from typing import Any

import msgspec
from verifiers.v1.graph import MessageNode
from verifiers.v1.types import content_text

from prl.rollouts.rollout import Rollout
from prl.wire.files import step_name, write_atomically


def write_records(
    run_dir: Path, step: int, rollouts: list[Rollout], kept: list[Rollout], discarded: list[Rollout]
) -> None:
    """`rollouts/step_<n>.jsonl`: the batch of `step` and the rollouts discarded since the last; appends on a retry."""
    trained = {id(rollout) for rollout in kept}
    lines = [record(rollout, step=step, trained=id(rollout) in trained) for rollout in [*rollouts, *discarded]]
    path = run_dir / "rollouts" / f"{step_name(step)}.jsonl"
    before = path.read_bytes() if path.exists() else b""
    write_atomically(path, before + b"".join(map(_encoded, lines)))


def write_eval_records(run_dir: Path, version: int, env_name: str, rollouts: list[Rollout]) -> None:
    """`rollouts/eval_<env>_step_<n>.jsonl`."""
    lines = [record(rollout, step=version, trained=False, evaluated=True) for rollout in rollouts]
    path = run_dir / "rollouts" / f"eval_{env_name}_{step_name(version)}.jsonl"
    write_atomically(path, b"".join(map(_encoded, lines)))


def _encoded(line: dict[str, Any]) -> bytes:
    """A JSON line. What an env calls its rewards, or what it says, may hold text that UTF-8 does not spell."""
    try:
        return msgspec.json.encode(line) + b"\n"
    except UnicodeEncodeError:
        return json.dumps(line).encode() + b"\n"


def record(rollout: Rollout, *, step: int, trained: bool, evaluated: bool = False) -> dict[str, Any]:
    """One rollout as plain data.

    `messages` holds every message of the trace once, on whichever branch, as they came. One that does not follow the one
    before it says so: `after` is the place in the list (from 0) of the one that it follows, null where it opens a history.
    An assistant message that the model was shown and did not sample here has `sampled: false`.
    `pool` is the one that its group moved the task to or left it in: it was handed out from the normal one.
    """
    trace = rollout.trace
    why_not = "evaluation" if evaluated and rollout.error is None else rollout.not_trained_because
    credited = [a for a, m in zip(rollout.advantages or [], (m for s in rollout.samples for m in s.mask)) if m]
    return {
        "step": step,
        "env": rollout.env_name,
        "agent": trace.agent.name,
        "task": trace.task.data.idx,
        "group": rollout.group_id,
        "reward": rollout.reward,
        "rewards": {name: reward.value for name, reward in trace.rewards.items() if reward is not None},
        "metrics": dict(trace.metrics),
        "advantage": sum(credited) / len(credited) if credited else None,
        "start_version": rollout.start_version,
        "end_version": rollout.end_version,
        "trained": trained,
        "not_trained_because": None if trained else why_not,
        "error_kind": rollout.error_kind,
        "filters": {"pre_batch": rollout.pre_filtered_by, "post_batch": rollout.filtered_by},
        "pool": rollout.pool,
        "stop": trace.stop_condition,
        "completion_tokens": rollout.num_completion_tokens,
        "samples": len(rollout.samples),
        "messages": _messages(trace.nodes),
    }


def _messages(nodes: list[MessageNode]) -> list[dict[str, Any]]:
    told = []
    for place, node in enumerate(nodes):
        plain = _message(node.message)
        if place and node.parent != place - 1:
            plain["after"] = node.parent
        if plain["role"] == "assistant" and not node.sampled:
            plain["sampled"] = False
        told.append(plain)
    return told


def _message(message: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role, "content": content_text(message.content)}
    if getattr(message, "reasoning_content", None):
        plain["reasoning"] = message.reasoning_content
    if getattr(message, "tool_calls", None):
        plain["tool_calls"] = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]
    if message.role == "tool" and message.name:
        plain["name"] = message.name
    return plain
