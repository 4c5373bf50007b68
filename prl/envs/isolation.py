"""Keep failures of env code its own: contained exceptions, and concurrent work that ends with its consumer."""

import asyncio
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")


async def as_finished(work: Iterable[Coroutine[Any, Any, T]]) -> AsyncGenerator[T, None]:
    """Run coroutines concurrently and yield each result as soon as it is there.

    When the consumer stops early, is cancelled, or one of the coroutines raises, the others are cancelled and awaited
    before the generator ends. Close it with `contextlib.aclosing`: a loop that is left by `break` does not.
    """
    finished: asyncio.Queue[asyncio.Task[T]] = asyncio.Queue()
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
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
    """Await env code; turn what would stop the event loop, SystemExit and KeyboardInterrupt, into RuntimeError."""
    try:
        result = code(*args, **kwargs)
        return await result if inspect.isawaitable(result) else cast(T, result)  # a plain function is called as well
    except (SystemExit, KeyboardInterrupt) as error:
        raise as_failure(error) from error


def as_failure(error: BaseException) -> Exception:
    """Return the error as a failure of the env code that raised it."""
    if isinstance(error, Exception):
        return error
    name, message = type(error).__name__, message_of(error, 400)
    return RuntimeError(f"the env's code let {name} escape" + (f": {message}" if message != name else ""))


def message_of(error: BaseException, most: int) -> str:
    """Return the message of an exception of env code, at most `most` characters; its class where that is nothing."""
    name = type(error).__name__
    try:
        return str(error)[:most] or name
    except BaseException as failure:  # of its `__str__`, or the memory is not enough for its text
        return f"{name}, whose text cannot be read: {type(failure).__name__}"
