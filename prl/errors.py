"""Errors meant for the person at the keyboard: printed as they are, without a traceback."""

import errno
import traceback

FULL = (errno.ENOSPC, errno.EDQUOT)
NO_MORE = (*FULL, errno.EFBIG, errno.EROFS)
"""What a file system says that takes no more, whoever writes."""
OF_A_PATH = (errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)
EITHER_WAY = (*OF_A_PATH, errno.EIO, errno.ESTALE)
"""What it says of reads too, and to anybody's code: about a write of prl's only where `mark_written` says so."""
WRITTEN = "_prl_written"
UNREADABLE = (ValueError, RecursionError)
"""What msgspec and json raise for data that are none: their errors of grammar and type and those of UTF-8 are
ValueErrors, and what is nested too deep raises the other."""


class PrlError(Exception):
    """What was wrong, where, and what to do."""


class ConfigError(PrlError):
    """The config asks for something that does not exist or does not fit together."""


class DeadlinePassed(PrlError, TimeoutError):
    """Something that was waited for did not come in time."""


class NoSignal(PrlError):
    """No rollout brings a signal to train on: the run ends, with a checkpoint."""


class EngineError(PrlError):
    """A model server answered with an error or with something unusable. `status` is the HTTP status, 0 without one."""

    kind = "engine"
    wait_s: float | None = None
    """How long the server asks to be left alone (Retry-After); None where it does not say."""

    def __init__(self, message: str, status: int = 0):
        super().__init__(message)
        self.status = status

    @property
    def of_server(self) -> bool:
        """Whether the server failed, rather than refused this one request."""
        return self.status == 0 or self.status >= 500


class RequestAborted(EngineError):
    """A model server gave a request up before its end, as one does that has been asked to end."""


def of_own_code(error: BaseException) -> str:
    """What the user's own code raised, and where."""
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error}"
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{text} ({frame.filename}, line {frame.lineno})"


def of_disk(error: BaseException) -> str | None:
    """What keeps a file from being written, in a line that names it; None of any other error."""
    known = NO_MORE + EITHER_WAY if hasattr(error, WRITTEN) else NO_MORE
    if not isinstance(error, OSError) or error.errno not in known:
        return None
    path = "a file" if error.filename is None else error.filename
    todo = ": make room there" if error.errno in FULL else " (ulimit -f)" if error.errno == errno.EFBIG else ""
    return f"{path} cannot be written: {error.strerror}{todo}"


def mark_written(error: OSError, path: str) -> OSError:
    """Have `error` name `path` and say, to `of_disk`, that prl was writing it; returns the error."""
    error.filename, error.filename2 = path, None  # a temporary name says nothing
    setattr(error, WRITTEN, True)
    return error
