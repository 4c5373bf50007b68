"""Errors meant for the person at the keyboard: printed as they are, without a traceback."""

import contextlib
import errno
import signal
import traceback

FULL = (errno.ENOSPC, errno.EDQUOT)
NO_MORE = (*FULL, errno.EFBIG, errno.EROFS)
"""Errors of a file system that takes no more, whoever writes."""
UNREADABLE = (ValueError, RecursionError)
"""Errors of msgspec and json for data that are none. ValueErrors are those of grammar, type and UTF-8; what is
nested too deep raises the other."""


class PrlError(Exception):
    """An error for the person at the keyboard: what was wrong, where, and what to do."""


class ConfigError(PrlError):
    """The config asks for something that does not exist or does not fit together."""


class DeadlinePassed(PrlError, TimeoutError):
    """Something that was waited for did not come in time."""


SIGNAL_REMEDY = (
    "try easier tasks (harder ones, if solved), curriculum=odf, "
    "a larger orchestrator.group_size or sampling.temperature"
)
"""What helps where the rollouts of a group earn the same."""


class NoSignal(PrlError):
    """No rollout brings a signal to train on: the run ends, with a checkpoint. `reward` is the mean of the last."""

    def __init__(self, message: str, reward: float | None = None):
        super().__init__(message)
        self.reward = reward


class EngineError(PrlError):
    """A model server answered with an error or with something unusable. `status` is the HTTP status, 0 without one."""

    kind = "engine"

    def __init__(self, message: str, status: int = 0, wait_s: float | None = None):
        super().__init__(message)
        self.status = status
        self.wait_s = wait_s
        """Seconds that the server asks to be left alone for (Retry-After); None where it does not say."""

    @property
    def of_server(self) -> bool:
        """Return whether the server failed, rather than refused this one request."""
        return self.status == 0 or self.status >= 500


class RequestAborted(EngineError):
    """A model server gave a request up before its end, as one does that has been asked to end."""


def of_own_code(error: BaseException) -> str:
    """Return what the user's own code raised, and where."""
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error}"
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    if isinstance(error, ModuleNotFoundError) and error.name:
        text += f": install its package (pip install {error.name.partition('.')[0]}, if that is its name)"
    # The innermost frame: the line that failed, not the call in prl.
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{text} ({frame.filename}, line {frame.lineno})"


def signal_name(number: int) -> str:
    """Describe the signal that ended a process: `killed by SIGKILL (out of memory?)`."""
    with contextlib.suppress(ValueError):
        name = signal.Signals(number).name
        return f"killed by {name}{' (out of memory?)' if number == signal.SIGKILL else ''}"
    return f"killed by signal {number}"


def of_disk(error: BaseException) -> str | None:
    """Return what to say where a file system takes no more, in a line; None of any other error."""
    if not isinstance(error, OSError) or error.errno not in NO_MORE:
        return None
    return unwritable(error, error.filename or "a file")


def unwritable(error: OSError, path: str) -> str:
    """Return what keeps `path` from being written, in a line."""
    todo = ": make room there" if error.errno in FULL else " (ulimit -f)" if error.errno == errno.EFBIG else ""
    return f"{path} cannot be written: {error.strerror}{todo}"
