"""What scripts/gpu_check looks at: functions that give rows of its page."""

from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

OK, WRONG, NOTHING_EXPECTED, NO_ROOM = "ok", "NOT ok", "measured", "does not fit"


@dataclass
class Row:
    """Of the page."""

    check: str
    measured: str
    expected: str
    result: str
    numbers: dict[str, Any] = field(default_factory=dict)
    """What was measured, for programs."""


def row(check: str, measured: str, expected: str, ok: bool | None, **numbers: Any) -> Row:
    """A row whose result is whether it is as expected; None = nothing is."""
    return Row(check, measured, expected, NOTHING_EXPECTED if ok is None else OK if ok else WRONG, numbers)


def bench_trainer() -> ModuleType:
    """The script of that name, as a module."""
    return SourceFileLoader("bench_trainer", str(Path(__file__).parents[1] / "bench_trainer")).load_module()
