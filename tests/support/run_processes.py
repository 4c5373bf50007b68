"""The processes of a run, seen from outside."""

import time
from pathlib import Path


def family(pid: int) -> dict[int, str]:
    """The descendants of `pid` that still run, with their command lines."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text(errors="replace").rsplit(")", 1)[1].split()[:2]
        except OSError:
            continue
        if state != "Z":
            parents[int(stat.parent.name)] = int(parent)
    found, frontier = {}, {pid}
    while frontier:
        frontier = {child for child, parent in parents.items() if parent in frontier}
        found |= {child: command_line(child) for child in frontier}
    return found


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, timeout: float, what, pause_s: float = 0.05) -> None:
    """Wait for a condition; `what` is its name, or returns what is known when it did not come."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout} s: {what() if callable(what) else what}"
        time.sleep(pause_s)


def scratch_of(pid: int) -> Path:
    """The folder for temporary files of a process of a run."""
    environment = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return Path(next(line for line in environment if line.startswith("TMPDIR=")).partition("=")[2])


def left_in(scratch: Path) -> list[str]:
    """What is left of a run's temporary files and sockets."""
    return [str(scratch)] * scratch.exists()
