"""Keep failures of env code its own: contained exceptions, and concurrent work that ends with its consumer."""

import asyncio
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")

ESCAPING_EXCEPTIONS = (asyncio.CancelledError, SystemExit, KeyboardInterrupt)
"""Exceptions that would end the event loop or cancel our own task if env code leaked them."""


async def as_finished(work: Iterable[Coroutine[Any, Any, T]]) -> AsyncGenerator[T, None]:
    """Run coroutines concurrently and yield each result as soon as it is there.

    When the consumer stops early, is cancelled, or one of the coroutines raises, the others are cancelled and awaited
    before the generator ends. Close it with `contextlib.aclosing`: a loop that is left by `break` does not.
    """
    finished: asyncio.Queue[asyncio.Task[T]] = asyncio.Queue()
    tasks = [asyncio.create_task(each) for each in work]
    for task in tasks:
        task.add_done_callback(finished.put_nowait)
    try:
        for _ in tasks:
            yield (await finished.get()).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def run_contained(code: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Await env code; turn what would stop the event loop, SystemExit and KeyboardInterrupt, into RuntimeError.

    While a loop runs, Ctrl-C cancels its work (`prl.launch.local`): a KeyboardInterrupt is then the code's own.
    """
    try:
        result = code(*args, **kwargs)
        return await result if inspect.isawaitable(result) else cast(T, result)  # a plain function is called as well
    except (SystemExit, KeyboardInterrupt) as error:
        raise escaped(error) from error


def as_failure(error: BaseException) -> Exception:
    """Return the error as a failure of the env code that raised it.

    Raises:
        asyncio.CancelledError: `error` is the cancellation of the current task, not one that env code raised by itself.
    """
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
        raise error
    return error if isinstance(error, Exception) else escaped(error)


def escaped(error: BaseException) -> RuntimeError:
    """Return the error for something that env code let escape."""
    return RuntimeError(f"the env's code let {type(error).__name__} escape")
