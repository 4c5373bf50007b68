"""Standard output and error of a command: what others wrote can do nothing to the terminal.

A model, an env, a data set, a server or a library may print what a terminal would obey: a new title, a cleared screen,
text that reads backwards. `guard` has every such character written out, whoever prints it. Colours are left to rich:
its consoles write past the guard, and what they print passes `Console.render` instead.

A reader that goes away (`| head`, a closed terminal) ends a command that prints, but after `outlast` none that works.
"""

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterable
from typing import IO, Any, TextIO

import rich.console
from rich.segment import Segment

from prl.text import safe

GONE = (errno.EPIPE, errno.ECONNRESET, errno.EIO, errno.ENXIO)
"""What a stream says whose reader or terminal has gone."""

_outlasting = False
"""Whether this process goes on without readers."""


class Lasting:
    """A text stream that leads nowhere once nobody reads it, where the process goes on without readers.

    All else is the stream's own.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream
        self.gone = False
        """Whether its reader has gone."""

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, do: Callable[[], Any]) -> None:
        try:
            do()
        except OSError as error:
            if not _outlasting or error.errno not in GONE:
                raise
            self.gone = True
            nothing = os.open(os.devnull, os.O_WRONLY)  # what is buffered goes there too, also when Python ends
            os.dup2(nothing, self._stream.fileno())
            os.close(nothing)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Guarded:
    """A text stream that writes control characters out, `\\x1b`; a carriage return becomes a line's end.

    All else is the stream's own.
    """

    def __init__(self, stream: Lasting):
        self.rich_proxied_file = stream  # where rich's consoles write, as past a proxy of its own

    def write(self, text: str) -> int:
        self.rich_proxied_file.write(safe(text.replace("\r\n", "\n").replace("\r", "\n")))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self.rich_proxied_file.flush()

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

    def on_broken_pipe(self) -> None:
        """End the command, as rich does, but not where only what is said beside its output is not read."""
        if not self.stderr:
            super().on_broken_pipe()
        self.quiet = True

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
            setattr(sys, name, Guarded(Lasting(stream)))


def outlast() -> None:
    """Guard the standard streams, and have this process go on quietly where their readers go away."""
    global _outlasting
    _outlasting = True
    guard()
