"""The signals that stop a command in order, and the name of what holds its event loop up."""

import asyncio
import concurrent.futures
import faulthandler
import signal
import threading
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, NoReturn

import uvloop

from prl.base.terminal import detach

STILL_S = 10.0
"""[s] Code that holds the event loop up for longer is named."""
BEAT_S = 1.0
noted: list[int] = []
"""Signals that `stop` has raised for: Python drops what is raised in a weak reference's callback, as imports
have. Another thread's loop looks for them."""


class Stopped(KeyboardInterrupt):
    """Signal `number` has stopped the command."""

    def __init__(self, number: int):
        super().__init__()
        self.number = number


def stop(number: int, _: FrameType | None) -> NoReturn:
    """Raise Stopped: the handler of a command that runs no event loop yet, or no longer."""
    if number == signal.SIGHUP:
        detach()
    noted.append(number)
    raise Stopped(number)


class Loop(uvloop.Loop):
    """The event loop of a command: what runs in it cannot stop it."""

    def stop(self) -> None:
        if asyncio.current_task(self) is not None:
            raise RuntimeError("loop.stop(): the event loop is the run's, and goes on")
        super().stop()


def stopping() -> tuple[signal.Signals, ...]:
    """Return the signals that stop what runs here: Ctrl-C, SIGTERM, and SIGHUP, which a closed terminal sends.

    A SIGHUP that is ignored stays so: that is what `nohup` is for. Only the first thread of a process gets any signal.
    """
    if threading.current_thread() is not threading.main_thread():
        return ()
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM) if ignored else (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_to_end(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end. The signals of `stopping` cancel it, so that everything is shut down in order.

    In a notebook, where this thread's event loop runs already, a thread has it.

    A second Ctrl-C ends that at once. Another SIGTERM or SIGHUP does not: schedulers and terminals send several.

    Raises:
        Stopped: One of them came.
    """
    if asyncio._get_running_loop() is not None:
        return run_in_thread(work)
    before = {number: signal.getsignal(number) for number in stopping()}
    if before:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # asyncio takes Ctrl-C over from no other handler
    received: list[int] = []
    try:
        with asyncio.Runner(loop_factory=Loop) as runner:  # uvloop: a tenth less of the orchestrator's time
            runner.run(cancelled_by_signals(work, received))
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise Stopped(received[0] if received else signal.SIGINT) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_in_thread(work: Coroutine[Any, Any, None]) -> None:
    """Do `run_to_end` in a thread, and wait for it. Ctrl-C, or a notebook's "interrupt", cancels `work`."""
    ended: concurrent.futures.Future[None] = concurrent.futures.Future()

    def run() -> None:
        try:
            run_to_end(work)
            ended.set_result(None)
        except BaseException as error:
            ended.set_exception(error)

    try:
        threading.Thread(target=run).start()
        ended.result()
    except KeyboardInterrupt:
        noted.append(signal.SIGINT)
        ended.result()
    finally:
        noted.clear()


async def cancelled_by_signals(work: Coroutine[Any, Any, None], received: list[int]) -> None:
    """Run `work`; the first SIGTERM or SIGHUP cancels it, and is `received`. Ctrl-C is left to asyncio.

    A signal from before that has stopped nothing cancels it at once.
    """
    task, loop, numbers = asyncio.current_task(), asyncio.get_running_loop(), stopping()
    assert task is not None
    interrupt = signal.getsignal(signal.SIGINT)

    def cancel(number: int) -> None:
        if number == signal.SIGHUP:
            detach()
        if not task.cancelling():
            received.append(number)
            task.cancel()

    def handle() -> None:
        for number in numbers:
            if number == signal.SIGINT:
                signal.signal(number, interrupt)
            else:
                loop.add_signal_handler(number, cancel, number)
        if noted:
            cancel(noted.pop())

    handle()
    watching = asyncio.create_task(beat(handle))
    try:
        await asyncio.sleep(0)  # that begins
        await work
    finally:
        watching.cancel()
        work.close()  # where it never began


async def beat(handle: Callable[[], None]) -> None:
    """Have Python's stack on the terminal whenever code holds the event loop up for `STILL_S`, until cancelled.

    Signals are taken back with `handle` from what runs in the loop and has set handlers of its own.
    """
    try:
        while True:
            handle()
            faulthandler.dump_traceback_later(STILL_S, file=2)  # by a thread that needs no lock of Python's
            await asyncio.sleep(BEAT_S)
    finally:
        faulthandler.cancel_dump_traceback_later()
