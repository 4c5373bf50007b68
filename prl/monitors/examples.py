"""Some rollouts of a run, for monitors that show texts. Whatever stands in them is harmless in a terminal."""

from pathlib import Path
from typing import Any

from prl.base.files import lines_of, step_name
from prl.base.text import safe
from prl.rollouts.record_lines import Record

TIMES, ROLLOUTS = 20, 8
"""Times in a run that rollouts are shown, and how many."""


def examples(run_dir: Path, step: int, max_steps: int) -> list[Record]:
    """The first rollouts of a step, by groups; none of most steps."""
    # From the first step on, as many times as a person looks at.
    if step < 1 or (step - 1) % max(1, max_steps // TIMES):
        return []
    return lines_of(run_dir / "rollouts" / f"{step_name(step)}.jsonl", Record, [])[:ROLLOUTS]


def facts_of(record: Record) -> dict[str, Any]:
    """Return the facts about a rollout: its origin, and what became of it."""
    names = ("step", "env", "task", "group", "rollout", "reward", "advantage", "stop")
    facts = {name: getattr(record, name) for name in names} | {"stage": record.stage and str(record.stage)}
    return {name: safe(value) if isinstance(value, str) else value for name, value in facts.items()}


def messages_of(record: Record) -> list[dict[str, Any]]:
    """The messages of a rollout as OpenAI's API has them, their pictures named."""
    messages = []
    for message in record.messages:
        shown: dict[str, Any] = {"role": message.role, "content": safe(record.content_of(message))}
        if message.reasoning:
            shown["reasoning_content"] = safe(message.reasoning)
        if message.tool_calls:
            calls = [{"name": safe(call.name), "arguments": safe(call.arguments)} for call in message.tool_calls]
            shown["tool_calls"] = [{"type": "function", "function": call} for call in calls]
        messages.append(shown)
    return messages
