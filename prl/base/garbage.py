"""Garbage collection, where it takes time and finds nothing."""

import atexit
import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Collect no garbage inside.

    The modules of a run make half a million objects, which stay. To look for garbage among them takes a fifth of the
    time that they take to load.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def skip_last() -> None:
    """Have this process end without a last collection, which takes two seconds where torch is loaded.

    Where Triton is loaded there is one: its bindings would print what is left.
    """
    atexit.register(lambda: gc.unfreeze() if "triton" in sys.modules else gc.freeze())
