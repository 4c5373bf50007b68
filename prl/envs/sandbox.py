"""Run Python that a model wrote, in a process that can do next to nothing, and return what expressions evaluate to.

`sandboxed.py` is its program, and says what it cannot do. The run counts files and bytes of its folder, reads a bounded
output and ends it at its deadline. There is one process, so that nothing is left once it is killed and awaited, and its
folder removed.
"""

import asyncio
import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

from prl.envs import sandboxed
from prl.envs.sandboxed import READY, WITHOUT_LANDLOCK

MOST_OUTPUT = 1 << 16
"""[bytes] Results that are read; a process that sends more is ended."""
MOST_FILES = 64
"""Files in the folder."""
MOST_WRITTEN = 1 << 22
"""[bytes] Size of a file, and of all together when they are counted, every `COUNT_S`."""
COUNT_S = 0.05
AT_ONCE = 8
"""Processes at a time: most replies that are slow wait or sleep."""
COMMAND = [sys.executable, "-I", "-S", "-B", sandboxed.__file__]
PIPES: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
_THREADS = ThreadPoolExecutor(AT_ONCE, "prl-code")
"""A process ends with the thread that started it, which these outlive."""
FAILED = object()
"""In place of the value of an expression that raised."""


class SandboxFailed(RuntimeError):
    """The process could not give up its rights, so that the code was not run."""


def hides_files() -> bool:
    """Return whether this kernel can keep code from the files of others. Raises SandboxFailed where it can less."""
    asked = _input("", [], 10, 256)
    output = subprocess.run(COMMAND, input=asked, capture_output=True, cwd="/", timeout=60).stdout
    _lines(output)
    return not output.startswith(WITHOUT_LANDLOCK)


def _input(code: str, expressions: Sequence[str], seconds: float, memory_mb: int) -> bytes:
    asked = {"code": code, "expressions": list(expressions), "seconds": seconds, "memory": memory_mb << 20}
    return json.dumps(asked | {"written": MOST_WRITTEN}).encode()


async def evaluate(code: str, expressions: Sequence[str], *, seconds: float, memory_mb: int) -> list[Any]:
    """Run `code`, then evaluate the expressions in it, in a process of its own.

    Args:
        code: A program.
        expressions: Python expressions over its names.
        seconds: Time for all of it.
        memory_mb: [MiB] Address space of the process.

    Returns:
        The value of each expression as JSON has it, in order: tuples are lists, and sets sorted ones. FAILED for one
        that raised; fewer where the code raised, or one of the limits ended it.

    Raises SandboxFailed.
    """
    asked = _input(code, expressions, seconds, memory_mb)
    output = await asyncio.get_running_loop().run_in_executor(_THREADS, _output_of, asked, seconds)
    return [_value(line) for line in _lines(output)]


def _output_of(asked: bytes, seconds: float) -> bytes:
    """Return what a new process writes within its limits, and leave nothing of it."""
    deadline, output = time.monotonic() + seconds, b""
    with (
        tempfile.TemporaryDirectory(prefix="prl-code-", ignore_cleanup_errors=True) as folder,
        subprocess.Popen(COMMAND, **PIPES, cwd=folder, env={"HOME": folder, "TMPDIR": folder}) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(asked)
                process.stdin.flush()
            process.stdin.close()
            while len(output) < MOST_OUTPUT and time.monotonic() < deadline and not _is_full(folder):
                if select.select([process.stdout], [], [], COUNT_S)[0]:
                    part = os.read(process.stdout.fileno(), MOST_OUTPUT)
                    output += part
                    if not part:
                        break
        finally:
            process.kill()
    return output


def _is_full(folder: str) -> bool:
    with os.scandir(folder) as entries, contextlib.suppress(FileNotFoundError):
        sizes = [entry.stat(follow_symlinks=False).st_size for entry in islice(entries, MOST_FILES + 1)]
        return len(sizes) > MOST_FILES or sum(sizes) > MOST_WRITTEN
    return False


def _lines(output: bytes) -> list[bytes]:
    """Return the lines of results. Raises SandboxFailed where there was nothing to be run safely."""
    first, *lines = output.split(b"\n")
    if first not in (READY, WITHOUT_LANDLOCK):
        raise SandboxFailed(f"no sandbox for code on this machine: {first.decode(errors='replace') or 'it ended'}")
    return lines[:-1]  # what comes after the last one is a line that was cut


def _value(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return FAILED
