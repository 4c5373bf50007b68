"""A search in a run's rollouts, from the newest step backwards; no more is read than a page of results takes."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A search; None admits all."""

    step: int | None = None
    env: str | None = None
    outcome: str | None = None
    """Stage and cause, as a row of the table has them."""
    filter: str | None = None
    """A filter that matched, enforced or not."""
    turns: float | None = None
    """At least so many replies."""
    least: float | None = None
    most: float | None = None
    """Both ends of the reward, these included."""
    text: str | None = None
    """Part of a message, a task, an outcome or its reason, in either case of letters."""

    def admits(self, record: Record) -> bool:
        """Return whether a rollout is among what is asked for. One without a reward is in no range of rewards."""
        reward = record.reward
        if (self.least is not None or self.most is not None) and reward is None:
            return False
        return (
            (self.env is None or record.env == self.env)
            and (self.filter is None or self.filter in record.matched.values())
            and (self.turns is None or turns_of(record) >= self.turns)
            and (self.least is None or reward is None or reward >= self.least)
            and (self.most is None or reward is None or reward <= self.most)
            and (self.outcome is None or row_of(record)["outcome"] == self.outcome)
            and (self.text is None or self.text.lower() in text_of(record).lower())
        )


def wanted(query: Mapping[str, str]) -> Wanted:
    """A search as the browser asks for it. Raises ConfigError for what is no number."""
    texts = {name: query[name] for name in ("env", "outcome", "filter", "text") if query.get(name)}
    numbers = {name: number(query, name) for name in ("turns", "least", "most")}
    return Wanted(step=number(query, "step", int), **texts, **numbers)


def search(run_dir: Path, asked: Wanted, before: int | None = None) -> dict[str, Any]:
    """A page of results: rows, and the step `before` which the search goes on; None where it is through.

    Args:
        run_dir: of the run.
        asked: the rollouts that are wanted.
        before: only earlier steps are read; None = the search begins at the newest.
    """
    began, files = time.monotonic(), step_files(run_dir)
    steps = [step for step in reversed(files) if before is None or step < before]
    if asked.step is not None:
        steps = [step for step in steps if step == asked.step]
    page, found = Rollouts(), list[Record]()
    read = 0
    for step in steps:
        found += filter(asked.admits, lines_of(files[step], Record, page.problems))
        read += 1
        if len(found) >= PAGE or time.monotonic() - began > SECONDS:
            break
    page.rows = [row_of(record) for record in found]
    add_messages(page, found)
    more = steps[read - 1] if read < len(steps) else None
    return {"rows": page.rows, "before": more, "steps": list(files), "exported": sorted(exports(run_dir))}


def text_of(record: Record) -> str:
    """All that a search for a text looks at, a part a line: what the page's own search does, too."""
    row = row_of(record)
    said = [
        part
        for message in record.messages
        for part in (message.content, message.reasoning or "", *map(called, message.tool_calls))
    ]
    parts = [row["env"], row["task"], row["group"], row["outcome"], row.get("reason", ""), *said]
    return "\n".join(map(str, parts))


def number(query: Mapping[str, str], name: str, kind: Callable[[str], Any] = float) -> Any:
    """A number that a request names; None where it names none. Raises ConfigError for what is no number."""
    try:
        return kind(query[name]) if query.get(name) else None
    except ValueError:
        raise ConfigError(f"{name}={query[name]} is no number") from None
