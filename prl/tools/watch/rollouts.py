"""A search in a run's rollouts, from the newest step backwards; no more is read than a page of results takes."""

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prl.base.errors import ConfigError
from prl.base.files import lines_of
from prl.rollouts.record_lines import Record
from prl.tools.report.examples import Rollouts, add_messages, exports, row_of, step_files, turns_of
from prl.tools.rollouts.render import called

PAGE = 200
"""Rollouts from which on no further step is read."""
SECONDS = 1.0
"""[s] Time after which none is."""
NUMBERS = {"step": int, "before": int, "turns": float, "least": float, "most": float}
"""What a search says in numbers; `env`, `outcome`, `filter` and `text` are texts."""


def asked(query: Mapping[str, str]) -> dict[str, Any]:
    """A search as the browser sends it. Raises ConfigError for what is no number."""
    found = {}
    for name, text in query.items():
        try:
            found[name] = NUMBERS.get(name, str)(text)
        except ValueError:
            raise ConfigError(f"{name}={text} is no number") from None
    return found


def search(run_dir: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """A page of results: rows, and the step `before` which the search goes on; None where it is through."""
    began, files, page, found = time.monotonic(), step_files(run_dir), Rollouts(), list[Record]()
    steps = [step for step in reversed(files) if step < wanted.get("before", math.inf)]
    steps = [step for step in steps if step == wanted.get("step", step)]
    read = 0
    for step in steps:
        found += [record for record in lines_of(files[step], Record, page.problems) if admits(wanted, record)]
        read += 1
        if len(found) >= PAGE or time.monotonic() - began > SECONDS:
            break
    page.rows = [row_of(record) for record in found]
    add_messages(page, found)
    more = steps[read - 1] if read < len(steps) else None
    return {"rows": page.rows, "before": more, "steps": list(files), "exported": sorted(exports(run_dir))}


def admits(wanted: Mapping[str, Any], record: Record) -> bool:
    """Return whether a rollout is among what is wanted. One without a reward is in no range of rewards."""
    reward = math.nan if record.reward is None else record.reward
    return (
        wanted.get("env", record.env) == record.env
        and turns_of(record) >= wanted.get("turns", 0)
        and ("least" not in wanted or reward >= wanted["least"])
        and ("most" not in wanted or reward <= wanted["most"])
        and ("filter" not in wanted or wanted["filter"] in record.matched.values())
        and ("outcome" not in wanted or row_of(record)["outcome"] == wanted["outcome"])
        and ("text" not in wanted or wanted["text"].lower() in text_of(record).lower())
    )


def text_of(record: Record) -> str:
    """All in which a text is looked for, as the page's own search has it."""
    row = row_of(record)
    said = [row["env"], row["task"], str(row["group"]), row["outcome"], row.get("reason", "")]
    for message in record.messages:
        said += [record.content_of(message), message.reasoning or "", *map(called, message.tool_calls)]
    return "\n".join(said)
