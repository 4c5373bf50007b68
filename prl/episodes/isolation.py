"""Keep failures of env code its own: contained exceptions, and concurrent work that ends with its consumer."""

import asyncio
import inspect
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from typing import Any, ParamSpec, TypeVar, cast

from prl.user_code import Interrupted, Late

P = ParamSpec("P")
T = TypeVar("T")


async def as_finished(work: Iterable[Coroutine[Any, Any, T]], deadline: float = math.inf) -> AsyncGenerator[T, None]:
    """Run coroutines concurrently and yield each result as soon as it is there.

    When the consumer stops early, is cancelled, or one of the coroutines raises, the others are cancelled and awaited
    before the generator ends. Close it with `contextlib.aclosing`: a loop that is left by `break` does not. Those that
    still run at `deadline`, in the event loop's time, are cancelled as well.
    """
    finished: asyncio.Queue[asyncio.Task[T]] = asyncio.Queue()
    tasks = [asyncio.create_task(each) for each in work]
    for task in tasks:
        task.add_done_callback(finished.put_nowait)
    timer = None if math.isinf(deadline) else asyncio.get_running_loop().call_at(deadline, _cancel, tasks)
    try:
        for _ in tasks:
            yield (await finished.get()).result()
    finally:
        if timer is not None:
            timer.cancel()
        _cancel(tasks)
        if left := [task for task in tasks if not _ended(task)]:
            await asyncio.gather(*left, return_exceptions=True)


def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()


def _ended(task: asyncio.Task[Any]) -> bool:
    if task.done() and not task.cancelled():
        task.exception()  # asyncio complains of one that nobody has looked at
    return task.done()


async def alone(code: Awaitable[T], loop: asyncio.AbstractEventLoop) -> T:
    """Await env code in the current task of `loop` as if it had one of its own: cancelling that cancels nothing else.

    A CancelledError is raised as it comes, or where the code returns without having heard of the one it asked for; but
    the current task does not count as being cancelled any more than it did before. So do the cancellations of whoever
    waits for this task: they are heard, and are not to be told from the code's own.
    """
    task = asyncio.current_task(loop)
    before = 0 if task is None else task.cancelling()
    try:
        result = await code
    finally:
        unheard = task is not None and task.cancelling() > before and await _forget(task, before)
    if unheard:
        raise asyncio.CancelledError
    return result


async def _forget(task: asyncio.Task[Any], before: int) -> bool:
    """Have the current task count as cancelled `before` times. Returns whether it had not heard of a cancellation."""
    try:
        await asyncio.sleep(0)
    except asyncio.CancelledError:
        return True
    finally:
        while task.cancelling() > before:
            task.uncancel()
    return False


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
    """Return the error for something that env code let escape. Raises it where it is prl's own interruption."""
    if isinstance(error, Interrupted | Late):
        raise error
    name, said = type(error).__name__, said_by(error, 400)
    return RuntimeError(f"the env's code let {name} escape" + (f": {said}" if said != name else ""))


def said_by(error: BaseException, most: int) -> str:
    """Return what an exception of env code says, at most `most` characters; its class where that is nothing."""
    name = type(error).__name__
    try:
        return str(error)[:most] or name
    except BaseException as failure:  # of its `__str__`, or the memory is not enough for its text
        return f"{name}, whose text cannot be read: {type(failure).__name__}"
