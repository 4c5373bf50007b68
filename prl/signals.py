"""The signals that stop a command in order, and what the event loop of a command does meanwhile."""

import asyncio
import faulthandler
import logging
import signal
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)

STILL_S = 10.0
"""[s] Code that holds the event loop up for longer is named."""
BEAT_S = 1.0


def stopping() -> tuple[signal.Signals, ...]:
    """Return the signals that stop what runs here: Ctrl-C, SIGTERM, and SIGHUP, which a closed terminal sends.

    A SIGHUP that is ignored stays so: that is what `nohup` is for. Only the first thread of a process gets any signal.
    """
    if threading.current_thread() is not threading.main_thread():
        return ()
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM) if ignored else (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop:
    """The handler of these signals: cancels `task` of `loop`.

    Another SIGINT cancels what that takes, too. Another SIGTERM or SIGHUP does not: schedulers, sweeps and terminals
    send several. Where code has held the loop up since a signal of a second ago, the next one interrupts that code.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]):
        self.loop = loop
        self.task = task
        self.received = 0
        self.waits_since: float | None = None
        """When a signal came that the loop has not taken."""

    def __call__(self, number: int, _: FrameType | None) -> None:
        self.received += 1
        if self.waits_since is not None and time.monotonic() > self.waits_since + BEAT_S:
            raise KeyboardInterrupt
        if number == signal.SIGINT or self.received == 1:
            self.waits_since = time.monotonic()
            self.loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        self.waits_since = None
        self.task.cancel()


def run_to_end(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end. The signals of `stopping` cancel it, so that everything is shut down in order.

    Where a loop runs in this thread already, as in a notebook, another thread runs `work` and this one waits.
    """
    before = {number: signal.getsignal(number) for number in stopping()}
    with ThreadPoolExecutor(1, thread_name_prefix="prl") as threads:
        runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        loop = runner.get_loop()
        task = loop.create_task(work)
        stop = Stop(loop, task)
        try:
            for number in before:
                signal.signal(number, stop)
            if is_in_loop():
                threads.submit(run, runner, task).result()
            else:
                run(runner, task)
        finally:
            for number, handler in before.items():  # else the next of its kind ends the process without a word
                signal.signal(number, handler)


def is_in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def run(runner: asyncio.Runner, task: asyncio.Task[None]) -> None:
    with runner:
        runner.run(watched(task))


async def watched(task: asyncio.Task[None]) -> None:
    """Await a task. Code that holds the event loop up for `STILL_S` is named on the terminal, by Python's stack."""
    watching = asyncio.create_task(name_what_holds_the_loop_up())
    try:
        await task
    finally:
        watching.cancel()


async def name_what_holds_the_loop_up() -> None:
    loop = asyncio.get_running_loop()
    try:
        while True:
            faulthandler.dump_traceback_later(STILL_S, file=2)  # by a thread that needs no lock of Python's
            began = loop.time()
            await asyncio.sleep(BEAT_S)
            late_s = loop.time() - began - BEAT_S
            if late_s > BEAT_S:
                log.warning("the event loop stood still for %.1f s: nothing of the run went on", late_s)
    finally:
        faulthandler.cancel_dump_traceback_later()
