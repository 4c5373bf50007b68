"""The signals that stop a command in order, and what to do at them."""

import signal
import threading
from collections.abc import Callable
from typing import Any


def stopping() -> tuple[signal.Signals, ...]:
    """Return the signals that stop what runs here: Ctrl-C, SIGTERM, and SIGHUP, which a closed terminal sends.

    A SIGHUP that is ignored stays so: that is what `nohup` is for. Only the first thread of a process gets any signal.
    """
    if threading.current_thread() is not threading.main_thread():
        return ()
    deaf = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM) if deaf else (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def once_by_term(cancel: Callable[[], Any]) -> Callable[[int], None]:
    """What to do at a signal of `stopping`: `cancel`, but of SIGTERM and SIGHUP only at the first signal."""
    got: list[int] = []

    def stop(number: int) -> None:
        got.append(number)
        if number == signal.SIGINT or len(got) == 1:
            cancel()

    return stop
