"""Counterparts: the overrides that mean here what keys of TRL, verl, OpenRLHF, transformers and prime-rl mean there."""

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from prl.config.groups import options

OF_GROUP = re.compile(r"(?<![\w.])(\w+)=\{value\}")
"""A group in a counterpart, whose option is the value that was typed."""


@functools.cache
def table() -> dict[str, dict[str, str]]:
    """The sections of other projects' keys, and their words, as `counterparts.yaml` explains them."""
    result: dict[str, dict[str, str]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return result


def counterpart(key: str, value: Any = "") -> str | None:
    """Return what to write instead of another project's key, or of one below it; None where there is no such key."""
    words = table()["words"]
    for up in range(key.count(".") + 1):
        node, typed = key.replace("-", "_").rsplit(".", up)[0], "" if up else str(value).strip()
        for tail in tails(node):
            text = words.get(f"{tail}={typed.lower()}", words.get(tail))
            if text and (typed or "{value}" not in text):
                return f"prl has no {node}{filled(text, typed)}"
    return None


def filled(text: str, value: str) -> str:
    """A counterpart with a value, as the end of a sentence. A group's other value becomes a list of its options."""
    for group in OF_GROUP.findall(text):
        names = [name for name in options().get(group, [value]) if not name.startswith("custom")]
        if not value or set(re.findall(r"[\w.-]+", value)) - set(names):
            text = f"e.g. {text.replace('{value}', names[0])} (or {', '.join(names[1:])})"
    text = text.replace("[{value}]", f"[{value.strip('[]')}]").replace("{value}", value)
    return f"{': write' if '=' in text else ';'} {text}"


def tails(key: str) -> Iterator[str]:
    """A key, then what is left of it without each of the other projects' sections that it begins with."""
    yield key
    section, _, tail = key.partition(".")
    if tail and section in table()["sections"]:
        yield from tails(tail)
