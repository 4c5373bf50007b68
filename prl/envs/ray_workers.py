"""Workers on the nodes of a Ray cluster, each in an actor that has a worker of its own node as a run has local ones.

What kills a grader, limits it and describes what it raised is the same there; graders never run in Ray's own process.
A lost actor is started again by Ray, elsewhere where its node is lost.
"""

import asyncio
import contextlib
import ctypes
import pickle
import signal
import sys
from collections.abc import AsyncIterator, Iterable
from typing import Any

import ray
import ray.exceptions

from prl.base.errors import PrlError
from prl.base.text import in_one_line
from prl.envs.workers import EnvProcessEnded, LocalWorkers, Place, Workers, nothing

ANSWER_S = 60.0
"""Deadline for an actor to end a call that was cancelled, or to be back where it was lost, seconds."""
PR_SET_PDEATHSIG = 1


class RayWorkers(Workers):
    """Workers on the cluster that this process has joined.

    Args:
        name: The env's.
        modules: What they import.
        memory_gb: [GiB] What a worker may take beyond what it has at its start.
        count: How many.
        place: Where they are.
    """

    def __init__(self, name: str, modules: Iterable[str], memory_gb: float, count: int, place: Place):
        super().__init__(name)
        options = [{"scheduling_strategy": place(name, number)} for number in range(count)]
        actor = ray.remote(num_cpus=1, max_restarts=-1)(WorkerHost)
        arguments = (name, list(modules), memory_gb, sys.path)
        self._actors: list[Any] = [actor.options(**each).remote(*arguments) for each in options]
        self._idle: asyncio.Queue[Any] = asyncio.Queue()
        self._freeing: list[asyncio.Task[None]] = []

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        try:
            await asyncio.gather(*map(self._start, self._actors))
            yield
        finally:
            for task in self._freeing:
                task.cancel()
            for actor in self._actors if ray.is_initialized() else ():
                ray.kill(actor)
            self._actors = []
            self._idle = asyncio.Queue()

    async def reply(self, call: bytes) -> bytes:
        actor = await self._idle.get()
        answer = actor.reply.remote(call)
        try:
            reply: bytes = await answer
        except BaseException as error:
            ray.cancel(answer)
            self._freeing = [task for task in self._freeing if not task.done()]
            self._freeing.append(asyncio.create_task(self._free(actor)))
            if isinstance(error, ray.exceptions.RayTaskError):  # raised by the worker, in its actor
                raise EnvProcessEnded(in_one_line(error.cause)) from error
            if isinstance(error, ray.exceptions.RayError):
                raise EnvProcessEnded(f"the worker is lost: {in_one_line(error)[:300]}") from error
            raise
        self._idle.put_nowait(actor)
        return reply

    async def _free(self, actor: Any) -> None:
        """Have an actor take calls again once it has ended its last one. One that hangs is killed and started again."""
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._start(actor)
        except TimeoutError:
            ray.kill(actor, no_restart=False)
            await self._start(actor)

    async def _start(self, actor: Any) -> None:
        """Have an actor take calls once it can: a lost one is started again by Ray."""
        try:
            await actor.start.remote()
        except ray.exceptions.RayError as error:
            raise PrlError(f"envs.{self.name}.workers: {in_one_line(error)[-400:]}") from error
        self._idle.put_nowait(actor)


# --- on a node --------------------------------------------------------------------------------------------------------


class WorkerHost:
    """The actor of a worker. It ends with its node: Ray leaves those of a killed raylet running."""

    def __init__(self, name: str, modules: list[str], memory_gb: float, path: list[str]):
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        sys.path += [folder for folder in path if folder not in sys.path]
        sys.modules["__main__"].__file__ = None  # Ray's own program, which each process of a grader would run first
        self.workers = LocalWorkers(name, modules, memory_gb, count=1)

    @ray.method(max_task_retries=-1)
    async def start(self) -> None:
        """Have a worker that has imported what it needs."""
        await self.workers.reply(pickle.dumps((nothing, b"")))

    async def reply(self, call: bytes) -> bytes:
        """Have the worker do a call."""
        return await self.workers.reply(call)
