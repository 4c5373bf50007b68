"""Keep failures of env code its own: contained exceptions, and concurrent work that ends with whoever waits for it."""

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")


@contextlib.asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """An asyncio.TaskGroup that raises the first failure itself instead of an exception group."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def run_all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently; return their results in order.

    When one raises, or this is cancelled, the others are cancelled and awaited; then the first failure is raised.
    """
    async with task_group() as group:
        tasks = [group.create_task(coroutine) for coroutine in work]
    return [task.result() for task in tasks]


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
    return RuntimeError(f"the env's code let {type(error).__name__} escape: {str(error)[:400]}".removesuffix(": "))
