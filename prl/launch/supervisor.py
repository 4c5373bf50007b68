"""Watches the processes of a run: names one that dies, starts an engine again, and says who waits for whom."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from prl.base.errors import DeadlinePassed, EngineError, PrlError
from prl.engines.client import InferencePool, ModelPool
from prl.engines.http import ENGINE_DEAD
from prl.engines.rotation import DYING_S
from prl.engines.servers import Server
from prl.launch.launcher import POLL_S, Launcher, ProcessDied
from prl.orchestrator.who_waits import ENGINE, Waiting, numbered
from prl.transport.events import ORCHESTRATOR, STARTING, Track

log = logging.getLogger(__name__)

GRACE_S = 1.0
"""Time for a process that broke a request to be seen dead, seconds."""
QUIET_S = 10.0
"""Time without progress after which the run shows who waits for whom, seconds."""
Result = TypeVar("Result")


@dataclass
class Supervisor:
    """Raises what ends the run: a process that dies, unless it is an engine that may be started again."""

    launcher: Launcher
    say: Callable[[str], None]
    """Shows a line to the person who watches."""
    restarts: dict[str, int] = field(default_factory=dict)
    """Number of times that each engine may still be started again, by its process."""
    startup_timeout_s: float = 600.0
    """Deadline for an engine that was started again to answer, seconds."""
    pool: ModelPool | None = None
    """The policy's client, whose engines are `engine`, `engine 2` and so on; None before they have answered."""
    starting: list[str] = field(default_factory=list, init=False)
    """Things that the start waits for."""
    run_dir: Path | None = None
    """The run's directory; None = nobody looks whether it is still there."""
    track: Track = field(default_factory=lambda: Track(ORCHESTRATOR))
    """Beside it is recorded how long each process takes to start."""
    _restarted: dict[str, tuple[Server, float]] = field(default_factory=dict, init=False)
    """Engines that were started again and have not answered yet, and when they have to, by their processes."""
    _progress: Hashable = field(default=None, init=False)
    """Progress of the run when it was last looked at."""
    _since: float = field(default=0.0, init=False)
    """When there was progress last."""
    _reported: bool = field(default=False, init=False)
    """The run has said since then who waits for whom."""

    @contextlib.contextmanager
    def awaiting(self, what: str, tracks: Sequence[str]) -> Iterator[None]:
        """The start waits for `what` inside the block, which is recorded in `tracks`."""
        self.starting.append(what)
        began = time.monotonic()
        try:
            with contextlib.ExitStack() as stack:
                for name in tracks:
                    stack.enter_context(self.track.beside(name).doing(STARTING, self.track.step))
                yield
            self.say(f"waited {time.monotonic() - began:.1f} s for {what}")
        finally:
            self.starting.remove(what)

    def serve(self, pool: ModelPool) -> None:
        """The run begins: from now on an engine of `pool` that dies is started again."""
        self.pool = pool

    async def finish(self, timeout_s: float) -> None:
        """Wait for the trainer to write its last checkpoint and to end. Nothing is started again any more."""
        self.restarts = {}
        self._restarted = {}
        now = Waiting("the run waits for the trainer to write its last checkpoint", None)
        await self.guard(self.launcher.finish(timeout_s), lambda: now)

    async def watch(self, waiting: Callable[[], Waiting] | None = None) -> None:
        """Run until a process ends too early that the run cannot do without, and raise ProcessDied then.

        Raises PrlError once somebody has removed the run's directory. `waiting` is as in `guard`.
        """
        while True:
            if self.run_dir is not None and not (self.run_dir / "config.yaml").exists():
                raise PrlError(f"{self.run_dir} has no config.yaml any more: somebody has removed the run's directory")
            try:
                self.launcher.ensure_alive()
            except ProcessDied as death:
                await self._restart(death)
            self._check_restarted()
            self._report_who_waits(waiting or self._waiting_to_start)
            await asyncio.sleep(POLL_S)

    def _check_restarted(self) -> None:
        """Say which engine answers again. Raises DeadlinePassed for one that takes too long."""
        for name, (server, due) in list(self._restarted.items()):
            if not server.away:
                del self._restarted[name]
                self.say(f"{name} answers again")
            elif time.monotonic() > due:
                reason = f"{server.url} was away for {self.startup_timeout_s:g} s ({server.error})"
                raise DeadlinePassed(f"{name} does not answer after its restart: {reason}")

    def _waiting_to_start(self) -> Waiting:
        return Waiting(f"the start waits for {', '.join(self.starting) or 'nothing'}", tuple(self.starting))

    def _report_who_waits(self, waiting: Callable[[], Waiting]) -> None:
        """Show who waits for whom, once, where nothing has happened for `QUIET_S`."""
        now = waiting()
        if self._progress != now.done:
            self._progress = now.done
            self._since = time.monotonic()
            self._reported = False
        elif not self._reported and time.monotonic() - self._since > QUIET_S:
            self._reported = True
            self.say(f"no progress for {QUIET_S:.0f} s: {now.what}")

    async def _restart(self, death: ProcessDied) -> None:
        """Start an engine that died again, with the weights of now. Raises `death` where that may not be."""
        name = death.process
        pool = self.pool
        if not isinstance(pool, InferencePool) or self.restarts.get(name, 0) < 1:
            raise death
        self.restarts[name] -= 1
        servers = [server for place, server in enumerate(pool.servers) if numbered(ENGINE, place) == name]
        for server in servers:  # none for another model, whose clients look for it by themselves
            pool.rotation.leave(server, EngineError(death.brief))
        try:
            # On Ray this waits for room in the cluster.
            url = await asyncio.to_thread(self.launcher.restart_engine, name)
        except ProcessDied:
            raise
        except PrlError as error:
            raise ProcessDied(f"{death}\nIt cannot be started again: {error}", name) from error
        if url is None:
            raise death
        log.info("%s", death)
        self.say(f"{death.brief}. It is started again")
        pool.rotation.restarted(servers, url)
        for server in servers:
            self._restarted[name] = server, server.failed_at + self.startup_timeout_s

    async def guard(self, work: Coroutine[Any, Any, Result], waiting: Callable[[], Waiting] | None = None) -> Result:
        """Return the result of `work`, unless a process dies first for good.

        A dying process also breaks the requests to it, and its own name and log say more than they do: where `work`
        fails, the watch gets some time to raise instead.

        Args:
            work: What the processes are needed for.
            waiting: Says what the run waits for; None = it is starting, and waits for what is in `starting`.
        """
        working = asyncio.ensure_future(work)
        watching = asyncio.ensure_future(self.watch(waiting))
        try:
            await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
            if working.done() and (error := working.exception()) is not None and not watching.done():
                dying = ENGINE_DEAD in str(error) or (self.pool is not None and self.pool.ailing)
                await asyncio.wait([watching], timeout=DYING_S if dying and self.restarts else GRACE_S)
            if watching.done():
                watching.result()
            return working.result()
        finally:
            working.cancel()
            watching.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)

    async def last_checkpoint(self, end: Callable[[], None], grace_s: float, why: str = "stopping") -> None:
        """Have the trainer finish its batch and write a checkpoint; give up with a message after `grace_s` seconds.

        For a run that has been stopped or fails, which is `why`; another SIGINT cancels it. `end` tells the trainer
        that no batch follows.
        """
        self.say(f"{why}: the trainer writes a last checkpoint, for at most {grace_s:g} s (again Ctrl-C = at once)")
        try:
            async with asyncio.timeout(grace_s):
                end()
                await self.launcher.finish(grace_s)
        except TimeoutError:
            self.say(f"no last checkpoint: {grace_s:g} s had passed")
        except PrlError as error:
            self.say(f"no last checkpoint: {error}")
