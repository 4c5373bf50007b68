"""Consoles whose text does nothing to the terminal, whoever wrote it, and what becomes of output that nobody reads."""

import os
from collections.abc import Iterable
from typing import Any

import rich.console
from rich.segment import Segment

from prl.base.text import safe


class Console(rich.console.Console):
    """rich's console; of what it prints, colours and the cursor are its own, and text is harmless."""

    def on_broken_pipe(self) -> None:
        """End the command, as rich does, but not where only what is printed beside its output is not read."""
        if self.stderr:
            detach()
        else:
            super().on_broken_pipe()

    def render(self, *args: Any, **options: Any) -> Iterable[Segment]:
        for segment in super().render(*args, **options):
            # Here, where rich hands out text and its own sequences apart: behind this point they look the same.
            yield segment if segment.control else segment._replace(text=safe(segment.text))


def detach() -> None:
    """Lead standard output and error nowhere from now on: whoever read them has gone, and the run goes on."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nothing, stream)
    os.close(nothing)
