"""Watches the processes of a run from their start to their end, and starts an engine that dies once more."""

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from prl.errors import PrlError
from prl.inference.client import InferencePool, ModelPool
from prl.inference.lasting import DYING_S
from prl.launch.launcher import POLL_S, Launcher, ProcessDied
from prl.launch.processes import Condition, condition
from prl.launch.watchdog import Watchdog
from prl.orchestrator.waiting import ENGINE, TRAINER, Waiting, numbered
from prl.reaper import descendants
from prl.wire.events import ORCHESTRATOR, STARTING, Lane

if TYPE_CHECKING:  # it brings verifiers along
    from prl.episodes.environment import Environment

log = logging.getLogger(__name__)

ENGINE_DEAD = "EngineDeadError"
"""In what vLLM answers once its engine core has died, until it ends itself."""
GRACE_S = 1.0
STOPPED_LOOK_S = 5.0
"""Time between two looks at whether an engine is stopped while others work, seconds."""
Result = TypeVar("Result")


@dataclass
class Supervisor:
    """Raises what ends the run. An engine that dies after the run began is started again as often as it may be; once it
    may not, the run goes on without it where it has another for that role."""

    launcher: Launcher
    say: Callable[[str], None]
    """Shows a line to the person who watches."""
    restarts: dict[str, int] = field(default_factory=dict)
    """How often each engine may still be started again, by its process; those given up are not in it."""
    startup_timeout_s: float = 600.0
    """Deadline for an engine that was started again to answer, seconds."""
    environments: Sequence["Environment"] = ()
    """Their processes are forked from one each, which is not started again."""
    waiting: Callable[[], Waiting] | None = None
    """What the run waits for; None = it is starting, and waits for what is in `starting`."""
    pool: ModelPool | None = None
    """The policy's client, whose engines are `inference`, `inference 2` and so on; None before they have answered."""
    check: Callable[[], None] = lambda: None
    """Called as often as the processes are looked at: keeps connections going, and raises PrlError for what else ends
    the run."""
    starting: list[str] = field(default_factory=list, init=False)
    """What the start waits for."""
    _reviving: dict[str, asyncio.Task[None]] = field(default_factory=dict, init=False)
    """Waits for engines that were started again to come back, by their processes."""
    _deaths: dict[str, str] = field(default_factory=dict, init=False)
    """How each of them ended last."""
    _stopped: Counter[str] = field(default_factory=Counter, init=False)
    """Looks in a row at which an engine was stopped."""
    _looked: float = field(default=0.0, init=False)
    """When that was looked at last."""
    lane: Lane = field(default_factory=lambda: Lane(ORCHESTRATOR), init=False)
    """Beside it is recorded how long each process takes to start."""

    def __post_init__(self) -> None:
        self.watchdog = Watchdog(
            waiting=lambda: self._starting() if self.waiting is None else self.waiting(),
            conditions=self._conditions,
            say=self.say,
            stopped_timeout_s=self.launcher.stopped_timeout_s,
        )

    def _conditions(self) -> list[Condition]:
        """What each process of the run is doing, and what those that envs' graders run in."""
        own = [(f"graders of env {env.name}", env.workers.template) for env in self.environments if env.workers]
        return [*self.launcher.conditions(), *(condition(name, {pid, *descendants(pid)}) for name, pid in own)]

    def _starting(self) -> Waiting:
        what = f"the start waits for {', '.join(self.starting) or 'nothing'}"
        return Waiting(what, (), tuple(self.starting), math.inf, starting=True)

    @contextlib.contextmanager
    def awaiting(self, what: str, lanes: Sequence[str]) -> Iterator[None]:
        """The start waits for `what` inside the block, which is recorded in `lanes`."""
        self.starting.append(what)
        try:
            with contextlib.ExitStack() as stack:
                for name in lanes:
                    stack.enter_context(self.lane.beside(name).doing(STARTING, self.lane.step))
                yield
        finally:
            self.starting.remove(what)

    def serve(self, pool: ModelPool) -> None:
        """The run begins: requests of `pool` are sent again where its engine is started again."""
        self.pool = pool
        self._tell_what_may_restart()

    def _tell_what_may_restart(self) -> None:
        for place, server in enumerate(self.pool.servers if self.pool is not None else ()):
            server.restartable = self.restarts.get(numbered(ENGINE, place), 0) > 0

    def finishing(self, timeout_s: float) -> None:
        """The last batch is trained: nothing is started again any more, and the trainer has `timeout_s` to end."""
        self.restarts = {}
        what = "the run waits for the trainer to write its last checkpoint"
        self.waiting = lambda: Waiting(what, (TRAINER,), None, timeout_s)

    async def watch(self) -> None:
        """Run until a process ends too early that the run cannot do without, and raise ProcessDied then."""
        try:
            while True:
                self.check()
                try:
                    self.launcher.ensure_alive()
                    self._look_for_failed_starts()
                    for environment in self.environments:
                        if cause := environment.cause_of_end():
                            raise ProcessDied(cause)
                    if self._engine_runs():
                        self.watchdog.look()
                    self._look_for_stopped_engines()
                except ProcessDied as death:
                    await self._restart(death)
                await asyncio.sleep(POLL_S)
        finally:
            while self._reviving:
                self._reviving.popitem()[1].cancel()

    def _look_for_stopped_engines(self) -> None:
        """Raise ProcessDied for an engine that keeps its requests while it is stopped, and others could have them.

        The watchdog looks at a run that makes no progress; with several engines it may make some for long.
        """
        now = time.monotonic()
        if now - self._looked < STOPPED_LOOK_S or self.pool is None or len(self.restarts) < 2:
            return
        self._looked, before = now, self._stopped
        engines = [each for each in self.launcher.conditions() if self._others(each.name)]
        self._stopped = Counter({each.name: before[each.name] + 1 for each in engines if each.stopped})
        for each in engines:  # by looks: between two of them nothing is known, and this process may have slept
            stopped_s = (self._stopped[each.name] - 1) * STOPPED_LOOK_S
            if each.stopped and stopped_s >= self.launcher.stopped_timeout_s:
                raise ProcessDied(
                    f"process {each.name!r} was stopped for {stopped_s:.0f} s ({each.stopped}, state T; launcher."
                    "stopped_timeout_s), and another engine can have its requests",
                    each.name,
                )

    def _look_for_failed_starts(self) -> None:
        """Raise what a start of the only engine of its role failed at; of another one ProcessDied."""
        for name, task in self._reviving.items():
            if task.done() and (error := task.exception()) is not None:
                if not isinstance(error, PrlError) or not self._others(name):
                    raise error
                raise ProcessDied(f"process {name!r} was started again: {error}", name) from error

    def _others(self, name: str) -> list[str]:
        """Other engines of the role of an engine; none for another process."""
        role = name.partition(" ")[0]
        others = [each for each in self.restarts if each != name and each.partition(" ")[0] == role]
        return others if name in self.restarts else []

    def _engine_runs(self) -> bool:
        """Whether not all engines of the policy that are left are being started again, which may take a while."""
        return self.pool is None or not all(server.restarting or server.gone for server in self.pool.servers)

    async def _restart(self, death: ProcessDied) -> None:
        """Start the engine that died, with the weights of now, or go on without it. Raises ProcessDied else."""
        name, pool = death.process, self.pool
        first = self._deaths.get(name) if name in self._reviving else None
        if (task := self._reviving.pop(name, None)) is not None:
            task.cancel()
        if not isinstance(pool, InferencePool) or self.restarts.get(name, 0) < 1:
            said = f"{death}\nIt was being started again: {first}" if first else str(death)
            return await self._give_up(ProcessDied(said, name, death.brief))
        self.restarts[name] -= 1
        self._deaths[name] = death.brief
        if (url := self._url(name)) is not None:
            pool.pause(url)
        try:
            started = await asyncio.to_thread(self.launcher.restart_engine, name)
        except PrlError as error:
            return await self._give_up(ProcessDied(f"{death}\nIt cannot be started again: {error}", name, death.brief))
        if not started:
            return await self._give_up(death)
        log.info("%s", death)
        self.say(f"{death.brief}. It is started again")
        pool.counts["engine/restarts"] += 1
        if url is not None:
            self._reviving[name] = asyncio.create_task(self._revive(name, pool, url))
        else:  # its clients look for it by themselves
            self.watchdog.forget()

    async def _give_up(self, death: ProcessDied) -> None:
        """Go on without the engine that died. Raises `death` where the run has no other for its role."""
        name, pool = death.process, self.pool
        others = self._others(name)
        if not isinstance(pool, InferencePool) or not others:
            raise death
        if not await asyncio.to_thread(self.launcher.drop_engine, name):
            raise death
        del self.restarts[name]
        if (url := self._url(name)) is not None:
            pool.give_up(url)
        log.warning("%s\nThe run goes on without it, with %s", death, ", ".join(others))
        self.watchdog.forget()

    def _url(self, name: str) -> str | None:
        """Where an engine of the policy is, by its process; None for those of another model."""
        urls = self.pool.urls if self.pool is not None else []
        return next((url for place, url in enumerate(urls) if numbered(ENGINE, place) == name), None)

    async def _revive(self, name: str, pool: InferencePool, url: str) -> None:
        await pool.revive(url, self.startup_timeout_s)
        del self._reviving[name]
        self._tell_what_may_restart()
        self.watchdog.forget()
        self.say(f"{name} answers again")

    async def guard(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of `work`, unless a process dies first for good.

        A dying process also breaks the requests to it, and its own name and log say more than they do: where `work`
        fails, the watch gets some time to raise instead.
        """
        working, watching = asyncio.ensure_future(work), asyncio.ensure_future(self.watch())
        try:
            await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
            if working.done() and (error := working.exception()) is not None and not watching.done():
                dying = ENGINE_DEAD in str(error) or (self.pool is not None and self.pool.ailing)
                ailing = dying and self._hosts_an_engine()
                await asyncio.wait([watching], timeout=DYING_S if ailing else GRACE_S)
            if watching.done():
                watching.result()
            return working.result()
        finally:
            working.cancel()
            watching.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)

    def _hosts_an_engine(self) -> bool:
        """Whether a process of the run is the policy's engine: of `inference.urls` none will be seen to die."""
        return any(each.name.partition(" ")[0] == ENGINE for each in self.launcher.conditions())

    async def last_checkpoint(self, end: Callable[[], None], grace_s: float) -> None:
        """Have the trainer finish what it has and write a checkpoint; give up, and say so, after `grace_s` seconds.

        Called when the run has been stopped; another SIGINT cancels it. `end` tells the trainer that nothing follows.
        """
        self.say(f"stopping: the trainer writes a last checkpoint, for at most {grace_s:g} s (again Ctrl-C = at once)")
        try:
            async with asyncio.timeout(grace_s):
                end()
                await self._checking(self.launcher.finish(grace_s))
        except (TimeoutError, PrlError) as error:
            reason = f"checkpoint.grace_s={grace_s:g} had passed" if isinstance(error, TimeoutError) else error
            self.say(f"no last checkpoint: {reason}")

    async def _checking(self, work: Coroutine[Any, Any, None]) -> None:
        """Do `work`, and what `watch` does all the time but look at the processes."""
        working = asyncio.ensure_future(work)
        try:
            while not working.done():
                self.check()
                await asyncio.wait([working], timeout=POLL_S)
            working.result()
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
