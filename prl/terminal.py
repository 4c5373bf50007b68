"""Standard output and error of a command: what others wrote can do nothing to the terminal.

A model, an env, a data set, a server or a library may print what a terminal would obey: a new title, a cleared screen,
text that reads backwards. `guard` has every such character written out, whoever prints it. Colours are left to rich:
its consoles write past the guard, and what they print passes `Console.render` instead.
"""

import contextlib
import sys
from collections.abc import Iterable
from typing import IO, Any, TextIO

import rich.console
from rich.segment import Segment

from prl.text import safe


class Guarded:
    """A text stream that writes control characters out, `\\x1b`; a carriage return becomes a line's end.

    All else is the stream's own.
    """

    def __init__(self, stream: TextIO):
        self.rich_proxied_file = stream  # where rich's consoles write, as past a proxy of its own

    def write(self, text: str) -> int:
        self.rich_proxied_file.write(safe(text.replace("\r\n", "\n").replace("\r", "\n")))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


class Console(rich.console.Console):
    """rich's console; of what it prints, colours and the cursor are its own, and text is harmless."""

    @property
    def file(self) -> IO[str]:
        """What is under rich's own proxy, which a live table sets before the guard, and under the guard."""
        file = super().file
        while under := getattr(file, "rich_proxied_file", None):
            file = under
        return file

    @file.setter
    def file(self, file: IO[str]) -> None:
        self._file = file

    def render(self, *args: Any, **options: Any) -> Iterable[Segment]:
        for segment in super().render(*args, **options):
            yield segment if segment.control else segment._replace(text=safe(segment.text))


def guard() -> None:
    """Guard the standard streams of this process, from now on. A second call does nothing."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not hasattr(stream, "rich_proxied_file"):
            with contextlib.suppress(OSError, AttributeError):
                stream.reconfigure(errors="backslashreplace")  # what a locale cannot say ends no command
            setattr(sys, name, Guarded(stream))
