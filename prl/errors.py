"""Errors meant for the person at the keyboard: printed as they are, without a traceback."""

import traceback


class PrlError(Exception):
    """What was wrong, where, and what to do."""


class ConfigError(PrlError):
    """The config asks for something that does not exist or does not fit together."""


class DeadlinePassed(PrlError, TimeoutError):
    """Something that was waited for did not come in time."""


class EngineError(PrlError):
    """A model server answered with an error or with something unusable. `status` is the HTTP status, 0 without one."""

    kind = "engine"

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
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({frame.filename}, line {frame.lineno})"
