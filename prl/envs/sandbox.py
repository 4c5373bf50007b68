"""Run Python that a model wrote, in a process that can do next to nothing, and return what expressions evaluate to.

`sandboxed.py` is its program, and says what it cannot do. The run counts files and bytes of its folder, reads a bounded
output and ends it at its deadline. There is one process, so that nothing is left once it is killed and awaited, and its
folder removed.
"""

import ast
import asyncio
import contextlib
import importlib.util
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
ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1"}  # numpy's
PIPES: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
_THREADS = ThreadPoolExecutor(AT_ONCE, "prl-code")
"""A process ends with the thread that started it, which these outlive."""
Step = str | tuple[str, str]
"""An expression, or statements and an expression."""
FAILED = object()
"""In place of the value of an expression that raised."""


class SandboxFailed(RuntimeError):
    """The process could not give up its rights, so that the code was not run."""


def hides_files() -> bool:
    """Return whether this kernel can keep code from the files of others. Raises SandboxFailed where it can less."""
    asked = _input([], [], 10, 256)
    output = subprocess.run(COMMAND, input=asked, capture_output=True, cwd="/", timeout=60).stdout
    _lines(output)
    return not output.startswith(WITHOUT_LANDLOCK)


def _input(
    code: Sequence[str], expressions: Sequence[Step], seconds: float, memory_mb: int, packages: Sequence[str] = ()
) -> bytes:
    specs = [importlib.util.find_spec(package) for package in packages]
    folders = [str(spec.submodule_search_locations[0]) for spec in specs if spec and spec.submodule_search_locations]
    steps = [("", each) if isinstance(each, str) else each for each in expressions]
    asked = {"code": list(code), "expressions": steps, "seconds": seconds, "memory": memory_mb << 20}
    return json.dumps(asked | {"written": MOST_WRITTEN, "packages": folders}).encode()


async def evaluate(
    *code: str, expressions: Sequence[Step], seconds: float, memory_mb: int, packages: Sequence[str] = ()
) -> list[Any]:
    """Run `code`, programs that share their names, then evaluate the expressions in it, in a process of its own.

    Args:
        code: Programs.
        expressions: Python expressions over its names, each alone or with a program that runs before it.
        seconds: Time for all of it.
        memory_mb: [MiB] Address space of the process.
        packages: Installed packages that the code can import, as numpy; loading them takes time and memory of it.

    Returns:
        The value of each expression, in order, where it is None, a number, a text, bytes, or a list, tuple, dict or set
        of such; of a subclass's value, the class's. FAILED for any other and for one that raised; fewer where the code
        raised, or one of the limits ended it.

    Raises SandboxFailed.
    """
    asked = _input(code, expressions, seconds, memory_mb, packages)
    output = await asyncio.get_running_loop().run_in_executor(_THREADS, _output_of, asked, seconds)
    return [_value(line) for line in _lines(output)]


def _output_of(asked: bytes, seconds: float) -> bytes:
    """Return what a new process writes within its limits, and leave nothing of it."""
    deadline, output = time.monotonic() + seconds, b""
    with (
        tempfile.TemporaryDirectory(prefix="prl-code-", ignore_cleanup_errors=True) as folder,
        subprocess.Popen(COMMAND, **PIPES, cwd=folder, env=ENVIRONMENT | {"HOME": folder, "TMPDIR": folder}) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        output_ready = select.poll()  # which takes descriptors above 1,023 as well
        output_ready.register(process.stdout, select.POLLIN)
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(asked)
                process.stdin.flush()
            # The program begins at the end of its input.
            process.stdin.close()
            while len(output) < MOST_OUTPUT and time.monotonic() < deadline and not _is_full(folder):
                if output_ready.poll(COUNT_S * 1000):
                    part = os.read(process.stdout.fileno(), MOST_OUTPUT)
                    output += part
                    if not part:
                        break
        finally:
            process.kill()
    return output


def _is_full(folder: str) -> bool:
    files = written = 0
    with os.scandir(folder) as entries:
        for entry in islice(entries, MOST_FILES + 1):
            files += 1
            with contextlib.suppress(FileNotFoundError):
                found = entry.stat(follow_symlinks=False)
                # A file with holes counts by its size, many small ones by their blocks.
                written += max(found.st_size, 512 * found.st_blocks)
    return files > MOST_FILES or written > MOST_WRITTEN


def _lines(output: bytes) -> list[bytes]:
    """Return the lines of results. Raises SandboxFailed where there was nothing to be run safely."""
    first, *lines = output.split(b"\n")
    if first not in (READY, WITHOUT_LANDLOCK):
        raise SandboxFailed(f"no sandbox for code on this machine: {first.decode(errors='replace') or 'it ended'}")
    return lines[:-1]  # what comes after the last one is a line that was cut


def _value(line: bytes) -> Any:
    try:
        return ast.literal_eval(line.decode())
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return FAILED
