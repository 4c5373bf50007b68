"""Concurrent work that ends with its consumer, and exceptions of env code that stay failures."""

import asyncio
import contextlib

import pytest

from prl.episodes.isolation import alone, as_failure, as_finished, run_contained, said_by
from prl.user_code import Interrupted, Late


@pytest.fixture
def ended():
    """Names of the coroutines that were cancelled."""
    return []


@pytest.fixture
def after(ended):
    async def work(name, seconds=60.0, error=None):
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            ended.append(name)
            raise
        if error is not None:
            raise error
        return name

    return work


async def test_results_come_in_the_order_in_which_they_are_there(after):
    work = [after("slow", 0.1), after("fast", 0.0), after("medium", 0.05)]
    assert [name async for name in as_finished(work)] == ["fast", "medium", "slow"]


async def test_nothing_to_do_yields_nothing():
    assert [name async for name in as_finished([])] == []


async def test_an_exception_reaches_the_consumer_and_ends_the_others(after, ended):
    seen = []
    with pytest.raises(ZeroDivisionError):
        async for name in as_finished([after("a", 0.0), after("bad", 0.02, ZeroDivisionError()), after("b")]):
            seen.append(name)
    assert seen == ["a"] and ended == ["b"]


async def test_closing_ends_the_others_before_it_returns(after, ended):
    async with contextlib.aclosing(as_finished([after("a", 0.0), after("b"), after("c")])) as results:
        assert await anext(results) == "a" and ended == []
    assert ended == ["b", "c"]


async def test_work_that_was_never_begun_is_not_begun_by_closing(after, ended):
    """A generator that nobody iterates starts no task; its coroutines are the caller's, who made them."""
    begun = []

    async def note():
        begun.append(1)

    async with contextlib.aclosing(as_finished(note() for _ in range(3))):
        pass
    assert begun == []


async def test_a_system_exit_of_env_code_is_a_runtime_error():
    async def leave(status):
        raise SystemExit(status)

    with pytest.raises(RuntimeError, match="the env's code let SystemExit escape: 3"):
        await run_contained(leave, 3)


async def test_a_cancellation_that_nobody_asked_for_is_a_failure_and_one_that_somebody_did_is_raised():
    assert isinstance(as_failure(asyncio.CancelledError()), RuntimeError)
    assert isinstance(as_failure(error := KeyError("x")), KeyError) and as_failure(error) is error

    async def wait():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError as error:
            as_failure(error)

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("error", [Interrupted(), Late()])
async def test_an_interruption_by_prl_is_no_failure_of_env_code(error):
    async def code():
        raise error

    with pytest.raises(type(error)):
        as_failure(error)
    with pytest.raises(type(error)):
        await run_contained(code)


class Mute(Exception):
    def __str__(self):
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("a long story"), "a long"),
        (ValueError(), "ValueError"),
        (Mute(), "Mute, whose text cannot be read: KeyboardInterrupt"),
    ],
)
def test_an_exception_says_something_in_any_case(error, said):
    assert said_by(error, 6) == said


# --- code in the current task -----------------------------------------------------------------------------------------


async def cancels_itself(*, then):
    asyncio.current_task().cancel()
    if then == "waits":
        await asyncio.sleep(10)
    if then == "fails":
        raise ValueError("mine")
    if then == "takes no notice":
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(10)
    return "done"


async def in_its_own_task(code):
    return await asyncio.create_task(code)


@pytest.mark.parametrize(
    ("then", "ends"),
    [
        ("waits", asyncio.CancelledError),
        ("returns", asyncio.CancelledError),
        ("fails", ValueError),
        ("takes no notice", "done"),
    ],
)
async def test_code_that_cancels_the_task_it_runs_in_ends_as_in_a_task_of_its_own(then, ends):
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    for run in (in_its_own_task, lambda code: alone(code, loop)):
        try:
            ended = await run(cancels_itself(then=then))
        except BaseException as error:
            ended = type(error)
        assert ended == ends
        assert task.cancelling() == 0
        await asyncio.sleep(0)  # nothing is left that would be raised here


async def test_code_in_the_current_task_keeps_its_own_deadlines():
    async def late():
        try:
            async with asyncio.timeout(0.01):
                await asyncio.sleep(10)
        except TimeoutError:
            return "late"

    assert await alone(late(), asyncio.get_running_loop()) == "late"
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await alone(asyncio.sleep(10), asyncio.get_running_loop())
    assert asyncio.current_task().cancelling() == 0


async def test_code_in_the_current_task_hears_of_a_cancellation_from_outside(after):
    heard = []

    async def code():
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            heard.append(True)
            raise

    task = asyncio.create_task(alone(code(), asyncio.get_running_loop()))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert heard == [True]


async def test_what_still_runs_at_the_deadline_is_cancelled():
    ended = []

    async def work(seconds):
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            ended.append("cancelled")
        return seconds

    deadline = asyncio.get_running_loop().time() + 0.1
    async with contextlib.aclosing(as_finished((work(s) for s in (10, 0, 11)), deadline)) as finished:
        assert [each async for each in finished] == [0, 10, 11]
    assert ended == ["cancelled"] * 2
    assert asyncio.get_running_loop().time() - deadline < 5
