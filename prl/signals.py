"""The signals that stop a command in order, and what to do at them."""

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import FrameType
from typing import Any

from prl.loop_monitor import BEAT_S, LoopMonitor, watching


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


def run_to_end(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end. The signals of `stopping` cancel it, so that everything is shut down in order.

    Another SIGINT cancels what that takes, too. Another SIGTERM or SIGHUP does not: schedulers, sweeps and terminals
    send several.

    Where a loop runs in this thread already, as in a notebook, another thread runs `work` and this one waits.
    """
    before = {number: signal.getsignal(number) for number in stopping()}
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        try:
            asyncio.run(cancel_on_signal(work))
        finally:
            for number, handler in before.items():  # else the next of its kind ends the process without a word
                signal.signal(number, handler)
        return
    with ThreadPoolExecutor(1, thread_name_prefix="prl") as threads:
        started: Future[Callable[[], Any]] = Future()
        stop = once_by_term(lambda: started.add_done_callback(lambda cancel: cancel.result()()))
        try:
            for number in before:  # before the work begins: the loop of this thread would not hear a signal until then
                signal.signal(number, lambda got, _: stop(got))
            threads.submit(asyncio.run, cancellable(work, started)).result()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


async def cancellable(work: Coroutine[Any, Any, None], started: "Future[Callable[[], Any]]") -> None:
    """Run `work`, not in the main thread; `started` gets what cancels it from another one."""
    task = asyncio.ensure_future(work)
    with watching("the run") as monitor:
        monitor.hear((), lambda _: task.cancel())
        started.set_result(monitor.tell)
        await task


async def cancel_on_signal(work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; the signals of `stopping` cancel it.

    They are heard by the thread that watches the loop: asyncio's own handlers wait for code that holds it up.
    """
    task = asyncio.ensure_future(work)
    with watching("the run") as monitor:
        numbers = stopping()
        monitor.hear(numbers, once_by_term(task.cancel))
        for number in numbers:  # until `listen` begins
            signal.signal(number, lambda *_: None)
        listening = asyncio.ensure_future(listen(numbers, monitor))
        try:
            await task
        finally:
            listening.cancel()


async def listen(numbers: Sequence[signal.Signals], monitor: LoopMonitor) -> None:
    """Have `monitor` hear of these signals, whoever else handles signals here: an env, a hook, a library.

    Any `loop.add_signal_handler` takes the kernel's call for itself, and may take a handler, as `signal.signal` does.
    """

    def heard(number: int, _: FrameType | None) -> None:
        taken_by = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(taken_by, warn_on_full_buffer=False)
        monitor.tell(number, taken_by)

    while True:
        for number in numbers:
            signal.signal(number, heard)
        await asyncio.sleep(BEAT_S)
