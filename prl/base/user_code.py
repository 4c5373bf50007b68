"""Code of the user's: what it raises is a refusal before a run (`contained`), and ends one by its name (`called`)."""

import contextlib
import logging
from collections.abc import Iterator

from prl.base.errors import ConfigError, PrlError, of_own_code

log = logging.getLogger(__name__)


@contextlib.contextmanager
def contained(where: str, what: str) -> Iterator[None]:
    """Run the block, which is code that a config names; what it raises is a refusal.

    Args:
        where: The config key, for messages.
        what: What the block does, for messages: `importing it`.

    Raises:
        ConfigError: The code has raised something.
    """
    try:
        yield
    except PrlError:
        raise
    except BaseException as error:
        raise failed(error, where, what) from error


def hook(where: str, component: object, name: str) -> contextlib.AbstractContextManager[None]:
    """`contained`, for a block that calls the method `name` of a component."""
    return contained(where, f"{type(component).__name__}.{name}")


def failed(error: BaseException, where: str, what: str) -> ConfigError:
    """Return the refusal for an exception of the user's code. Raises KeyboardInterrupt, which is Ctrl-C."""
    if isinstance(error, KeyboardInterrupt):
        raise error
    return ConfigError(f"{where}: {what} failed: {of_own_code(error)}")


@contextlib.contextmanager
def called(where: str, component: object, name: str = "") -> Iterator[None]:
    """Run the block, which calls a component (its method `name`) during a run; `where` is its config key, for messages.

    SystemExit and KeyboardInterrupt are the component's own here, and would tear the event loop: Ctrl-C comes as a
    cancellation of what is awaited (`prl.launch.signals`), and interrupts only code that holds the loop up. Not for a
    block that awaits.

    Raises:
        PrlError: Whatever it raised, with file and line.
    """
    try:
        yield
    except PrlError:
        raise
    except BaseException as error:
        what = type(component).__name__ + f".{name}" * bool(name)
        log.info("%s: %s failed", where, what, exc_info=True)
        raise PrlError(f"{where}: {what} failed: {of_own_code(error)}") from error
