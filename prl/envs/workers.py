"""Processes that run the graders of an env: what a grader does there costs its own call, never the run.

`pebble` keeps those of this machine: it hands out calls, kills the worker whose call is cancelled, and replaces workers
that have ended. They are forked from Python's fork server, a process without the run's threads and libraries, which has
imported verifiers and the env's module. `ray_workers.py` has such workers on the nodes of a Ray cluster.
"""

import asyncio
import contextlib
import fcntl
import io
import logging
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import forkserver
from typing import Any

import msgspec
import psutil
from pebble import ProcessExpired, ProcessPool

from prl.base.errors import UNREADABLE

log = logging.getLogger(__name__)

MAX_CALLS = 2000
"""Calls after which a worker is replaced: what its code leaves behind does not pile up."""
MAX_PRINTED = 10_000
"""Characters of what a call prints that are kept."""
NICE = 5
"""Added to the niceness of workers: model and trainer go first."""

Call = Callable[[bytes], Coroutine[Any, Any, Any]]
"""Function that a worker runs, by its module and name: (argument) -> result, which must be plain data."""


Place = Callable[[str, int], Any]
"""(env, number of a worker) -> where Ray is to start it, as a `scheduling_strategy` of its own."""


class EnvProcessEnded(RuntimeError):
    """The env's code has ended the process that it ran in."""


class EnvCodeError(RuntimeError):
    """An exception of the env's code, whose class is `name`."""

    def __init__(self, name: str, message: str, remote: str):
        super().__init__(message)
        self.name = name
        self.add_note(remote)


# Of runpy: the module of the program that a worker runs as `__mp_main__` is one that its server has imported.
warnings.filterwarnings("ignore", ".* found in sys.modules after import of package", RuntimeWarning)


# --- in the run -------------------------------------------------------------------------------------------------------


class Workers(ABC):
    """The workers of the env `name`, wherever they are."""

    def __init__(self, name: str):
        self.name = name

    @abstractmethod
    def serving(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Have workers while the block lasts."""

    @abstractmethod
    async def reply(self, call: bytes) -> bytes:
        """Have a worker do a pickled call; return what `run_call` does. A cancelled call ends its worker.

        Raises EnvProcessEnded where the worker has ended without a reply.
        """

    async def call(self, code: Call, argument: bytes) -> Any:
        """Have a worker await `code(argument)`; return the result. A cancelled call ends its worker.

        Raises:
            EnvCodeError: The code raised.
            EnvProcessEnded: It ended its process.
        """
        reply = await self.reply(pickle.dumps((code, argument)))
        try:
            content = msgspec.msgpack.decode(reply)
        except UNREADABLE as error:
            raise EnvProcessEnded(f"a worker has ended without an answer: {error}") from error
        for line in content["printed"].splitlines():
            log.info("env %s printed: %s", self.name, line[:1000])
        if "error" in content:
            raise EnvCodeError(content["error"], content["message"], content["traceback"])
        return content["result"]


class LocalWorkers(Workers):
    """Workers on this machine.

    Args:
        name: The env's, for messages.
        modules: What they import.
        memory_gb: [GiB] What a worker may take beyond what it has at its start.
        count: How many.
    """

    def __init__(self, name: str, modules: Iterable[str], memory_gb: float, count: int):
        super().__init__(name)
        self._count = count
        self._memory = int(memory_gb * (1 << 30))
        self._context = multiprocessing.get_context("forkserver")
        # Every worker imports the program of this process as `__mp_main__`: its imports are made once, by the server.
        program = sys.modules["__main__"].__spec__
        preload = [__name__, *modules] if program is None else [__name__, *modules, program.name]
        self._context.set_forkserver_preload(preload)
        forkserver.ensure_running()  # its imports take seconds, which engine and trainer need as well
        self._pool: ProcessPool | None = None

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        try:
            self._pool = await asyncio.to_thread(self._new_pool)
            yield
        finally:
            await asyncio.to_thread(self._stop)

    async def reply(self, call: bytes) -> bytes:
        # One that pebble has given up: the env goes on with new workers.
        if self._pool is None or not self._pool.active:
            self._pool = await asyncio.to_thread(self._new_pool)
        try:
            return await asyncio.wrap_future(self._pool.schedule(run_call, (call,)))
        except ProcessExpired as error:
            status = error.exitcode
            how = f"exit status {status}" if status >= 0 else signal.Signals(-status).name
            raise EnvProcessEnded(f"the env's code ended its process: {how}") from error
        except (BrokenProcessPool, *UNREADABLE) as error:
            raise EnvProcessEnded(f"a worker has ended without an answer: {error}") from error

    def _new_pool(self) -> ProcessPool:
        self._stop()
        pool = ProcessPool(self._count, MAX_CALLS, begin, (self._memory,), self._context)
        assert pool.active  # which starts it
        return pool

    def _stop(self) -> None:
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None


# --- in a worker ------------------------------------------------------------------------------------------------------


def begin(memory: int) -> None:
    """Make a new process a worker, which may take `memory` bytes more than it has."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # by which pebble ends it: at once, in C code as well
    end_with_run()
    os.nice(NICE)
    # Of data, not of addresses: threads reserve much address space that nobody uses.
    limit = psutil.Process().memory_info().data + memory
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    nothing = os.open(os.devnull, os.O_WRONLY)  # what C code and children print could drive the terminal
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # Python's own generator is seeded anew by a fork, this one is not


def end_with_run() -> None:
    """Have the kernel end this process by SIGIO when the run is gone, whatever code it stands in.

    The parent is the fork server, which ends after its last worker: the parent's death signal would not come.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, fcntl.fcntl(parent.sentinel, fcntl.F_GETFL) | os.O_ASYNC)


def run_call(call: bytes) -> bytes:
    """Return the result of a pickled call as msgpack, or what it raised: no object of the env's reaches the run."""
    worker = os.getpid()
    printed = sys.stdout = sys.stderr = io.StringIO()
    try:
        code, argument = pickle.loads(call)  # of the run's making
        result = asyncio.run(code(argument))
        encoded = msgspec.msgpack.encode({"result": result, "printed": printed.getvalue()[:MAX_PRINTED]})
    except BaseException as error:
        encoded = msgspec.msgpack.encode(described(error) | {"printed": printed.getvalue()[:MAX_PRINTED]})
    if os.getpid() != worker:  # a child that a grader has forked is no worker
        os._exit(1)
    return encoded


async def nothing(_: bytes) -> None:
    """Do nothing, in a worker that is there then."""


def described(error: BaseException) -> dict[str, str]:
    """Return an exception as plain data."""
    name, message, text = type(error).__name__, "", ""
    with contextlib.suppress(BaseException):  # of its `__str__`, or the memory is not enough
        message = str(error)[:2000]
        text = "".join(traceback.format_exception(error))[-8000:]
    parts = {"error": name, "message": message or name, "traceback": text}
    return {name: part.encode("utf-8", "replace").decode() for name, part in parts.items()}
