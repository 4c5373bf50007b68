"""Run a coroutine until it ends, a process of the run dies, or the user stops it."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

from prl.inference.client import InferencePool

T = TypeVar("T")

DYING_ENGINE_S = 10.0  # an engine that fails takes its time to end
GRACE_S = 1.0


async def cancel_on_signal(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; SIGINT and SIGTERM cancel it, so that everything is shut down in order."""
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        return await task
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def until_process_dies(
    work: Coroutine[Any, Any, T], watch: Coroutine[Any, Any, None], policy: InferencePool
) -> T:
    """The result of `work`, unless `watch` raises first.

    A dying process also breaks the requests to it, and its own name and log say more than they do: where `work` fails,
    `watch` gets some time to raise instead.
    """
    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(watch)
    try:
        await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
        if working.done() and working.exception() is not None and not watching.done():
            await asyncio.wait([watching], timeout=DYING_ENGINE_S if policy.ailing else GRACE_S)
        if watching.done():
            watching.result()
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
