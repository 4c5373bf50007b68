"""The processes that run an env's code, seen from the run: calls are handed to workers, which are replaced as needed.

A call has the deadline of whoever awaits it. What it does in its process costs that call alone:

- It blocks or spins: when its awaiter gives up, the worker has half a second to stop it, then it is killed.
- It ends the process, by itself or by a bound (memory, output): it has failed with that reason.
- Calls that shared the worker, because all of them waited for something, are carried out anew in another one.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import time
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from prl.episodes.worker import ENDED, ORDER, Handler, Marks, fork, frame, read_frame, run_template

log = logging.getLogger(__name__)

READY_WORKERS = min(8, os.cpu_count() or 1)
"""Workers of an env, not counting those that a call holds up."""
MAX_WORKERS = 32
MAX_SHARING = 64
"""Calls in one worker, all but one of them waiting for something."""
HELD_S = 1.0
"""[s] A call that has not come back to its event loop for so long holds its worker up."""
LOOK_S = 0.25
CANCEL_S = 0.5
"""[s] Time for a call that nobody awaits any more to stop."""
MAX_CALLS = 2000
"""Calls that a worker carries out before it is replaced: what its code leaves behind does not pile up."""
MAX_OUTPUT = 1 << 20
"""[bytes] What a worker may print between two calls that it begins."""
MAX_LOGGED = 200
"""Printed lines of an env that are logged."""
MAX_TRIES = 4
"""Times that a call is begun: it may share a worker with others that end it."""
GB = 1 << 30


class EnvProcessEnded(RuntimeError):
    """The env's code ended the process that it ran in, or had to be ended."""


class EnvCodeError(RuntimeError):
    """What the env's code raised in its process: the class is `name`."""

    def __init__(self, name: str, message: str, remote: str):
        super().__init__(message)
        self.name = name
        if remote:
            self.add_note(remote)


@dataclass(eq=False)
class Call:
    """A call, from when it is asked for until it has a result."""

    number: int
    argument: Any
    result: asyncio.Future[Any]
    tries: int = 0
    waits: bool = False
    """It has been begun, and waits or has waited for something: its worker can take another one."""


@dataclass(eq=False)
class Worker:
    """One process."""

    slot: int
    output: int
    """File of what it prints."""
    task: asyncio.Task[None] | None = None
    writer: asyncio.StreamWriter | None = None
    unsent: list[bytes] = field(default_factory=list)
    calls: dict[int, Call] = field(default_factory=dict)
    begun: int = 0
    printed: int = 0
    standing: tuple[int, int] = (0, 0)
    since: float = 0.0
    held: bool = False
    """A call has not come back to the event loop for `HELD_S`."""
    verdict: str | None = None
    """Why it was killed."""
    guilty: int | None = None
    """Number of the call for which it was killed; None where the marks say who it was."""
    ended: "asyncio.Future[int] | None" = None
    """Its wait status."""

    @property
    def free(self) -> bool:
        """Whether it can begin a call now."""
        if self.verdict is not None or self.held or self.begun >= MAX_CALLS:
            return False
        return len(self.calls) < MAX_SHARING and all(call.waits for call in self.calls.values())

    def send(self, message: dict[str, Any]) -> None:
        if self.writer is None:
            self.unsent.append(frame(message))
        elif not self.writer.is_closing():
            self.writer.write(frame(message))


class Workers:
    """The workers of one env. The template is forked here and now; workers with the first calls.

    Args:
        name: The env's.
        handler: Carries out a call, in a worker.
        memory_gb: [GiB] What a worker may take in addition to what it has at its start.
    """

    def __init__(self, name: str, handler: Handler, memory_gb: float):
        self.name = name
        self._marks = Marks(MAX_WORKERS)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        marks, memory = self._marks, int(memory_gb * GB)
        self.template = fork(lambda: run_template(theirs, marks, handler, memory))
        theirs.close()
        self._control.setblocking(False)
        self._end = weakref.finalize(self, _end_template, self._control, self.template)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._workers: dict[int, Worker] = {}
        self._ending: set[int] = set()
        """Slots of workers of an event loop that it has left, which have not ended yet."""
        self._waiting: deque[Call] = deque()
        self._numbers = itertools.count(1)
        self._timer: asyncio.TimerHandle | None = None
        self._logged = 0

    async def call(self, argument: Any) -> Any:
        """Have a worker carry out a call; return its result.

        Raises:
            EnvCodeError: The env's code raised.
            EnvProcessEnded: It ended its process.
            ValueError, TypeError: `argument` is no plain data.
        """
        self._join_loop()
        assert self._loop is not None
        call = Call(next(self._numbers), argument, self._loop.create_future())
        frame({"argument": argument})  # refused here, not while another call is handed out
        self._waiting.append(call)
        self._hand_out_safely()
        try:
            return await call.result
        except asyncio.CancelledError:
            self._give_up(call)
            raise

    def stop(self) -> None:
        """End the workers; calls that are awaited are cancelled. Later calls get new ones."""
        self._forget()

    def close(self) -> None:
        """End the template as well."""
        self._forget()
        self._end()

    # --- handing out ------------------------------------------------------------------------------------------------

    def _join_loop(self) -> None:
        """Begin in the running event loop, with workers of its own."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if not self._end.alive:
            raise EnvProcessEnded(f"the processes of env {self.name!r} have been ended")
        self._forget()
        self._loop = loop
        loop.add_reader(self._control.fileno(), self._hear)

    def _forget(self) -> None:
        """Leave the event loop that it was in, which may be closed."""
        if self._timer is not None:
            self._timer.cancel()
        loop, self._loop, self._timer = self._loop, None, None
        if loop is not None and not loop.is_closed():
            loop.remove_reader(self._control.fileno())
            for worker in list(self._workers.values()):
                if worker.task is not None:
                    worker.task.cancel()
                self._stop_reading(worker, loop)
        for worker in list(self._workers.values()):
            self._kill(worker, "the run ended")
            os.close(worker.output)
            for call in worker.calls.values():
                if loop is not None and not loop.is_closed():
                    call.result.cancel()
        self._ending |= set(self._workers)
        self._workers.clear()
        self._waiting.clear()

    def _hand_out(self) -> None:
        """Give waiting calls to workers that are free; start workers where there are too few."""
        while self._waiting:
            if self._waiting[0].result.done():
                self._waiting.popleft()
                continue
            free = [worker for worker in self._workers.values() if worker.free]
            worker = min(free, key=lambda each: len(each.calls)) if free else self._new_worker()
            if worker is None:
                break
            call = self._waiting.popleft()
            call.tries += 1
            call.waits = False
            worker.calls[call.number] = call
            worker.begun += 1
            worker.printed = 0
            worker.send({"call": call.number, "argument": call.argument})
        if self._timer is None and self._loop is not None and any(w.calls for w in self._workers.values()):
            self._timer = self._loop.call_later(LOOK_S, self._look)

    def _new_worker(self) -> Worker | None:
        """Fork another worker; None if there are enough, or as many as there may be."""
        ready = sum(not worker.held and worker.verdict is None for worker in self._workers.values())
        slots = set(range(MAX_WORKERS)) - set(self._workers) - self._ending
        if ready >= READY_WORKERS or not slots:
            return None
        assert self._loop is not None
        ours, theirs = socket.socketpair()
        output, printed = os.pipe()
        os.set_blocking(output, False)
        worker = Worker(min(slots), output, ended=self._loop.create_future())
        self._marks.leave(worker.slot)
        try:
            socket.send_fds(self._control, [ORDER.pack(b"f", worker.slot)], [theirs.fileno(), printed])
        except OSError as error:
            ours.close()
            os.close(output)
            raise EnvProcessEnded(f"the processes of env {self.name!r} are gone: {error}") from error
        finally:
            theirs.close()
            os.close(printed)
        self._workers[worker.slot] = worker
        self._loop.add_reader(output, self._read_output, worker)
        worker.task = self._loop.create_task(self._serve(worker, ours))
        return worker

    async def _serve(self, worker: Worker, channel: socket.socket) -> None:
        """Read what a worker answers until it has ended, and settle its calls."""
        reader, worker.writer = await asyncio.open_connection(sock=channel)
        try:
            for message in worker.unsent:
                worker.writer.write(message)
            while (answer := await read_frame(reader)) is not None:
                self._hear_answer(worker, answer)
            self._kill(worker, worker.verdict)  # its channel is closed, whatever else it does
            assert worker.ended is not None
            async with asyncio.timeout(5.0):
                status = await worker.ended
        except TimeoutError:
            status = None
        finally:
            worker.writer.close()
        self._read_output(worker)
        self._stop_reading(worker, asyncio.get_running_loop())
        os.close(worker.output)
        if status is not None:
            self._workers.pop(worker.slot, None)
        guilty = self._marks.read(worker.slot)[0] if worker.guilty is None else worker.guilty
        reason = worker.verdict or how_it_ended(status)
        for call in list(worker.calls.values()):
            if guilty in (0, call.number) and worker.verdict != RETIRED:
                self._fail(call, EnvProcessEnded(f"the env's code {reason}"))
            else:
                self._begin_anew(call)
        worker.calls.clear()
        self._hand_out_safely()

    def _hear_answer(self, worker: Worker, answer: dict[str, Any]) -> None:
        call = worker.calls.get(answer.get("call", 0))
        if call is None:
            return
        if "waits" in answer:
            call.waits = True
        else:
            del worker.calls[call.number]
            worker.held = False
            if call.result.done():
                pass
            elif "error" in answer:
                parts = [str(answer.get(key, "")) for key in ("error", "message", "traceback")]
                call.result.set_exception(EnvCodeError(*parts))
            else:
                call.result.set_result(answer.get("result"))
            if worker.begun >= MAX_CALLS and not worker.calls:
                self._kill(worker, RETIRED)
        self._hand_out_safely()

    def _hand_out_safely(self) -> None:
        """Hand out, where an exception has nobody to be raised to: then it is that of the calls."""
        try:
            self._hand_out()
        except EnvProcessEnded as error:
            while self._waiting:
                self._fail(self._waiting.popleft(), error)

    def _fail(self, call: Call, error: Exception) -> None:
        if not call.result.done():
            call.result.set_exception(error)

    def _begin_anew(self, call: Call) -> None:
        """Carry out a call in another worker, since somebody else's has taken this one."""
        if call.tries >= MAX_TRIES:
            self._fail(
                call, EnvProcessEnded(f"the env's code shared a process with code that ended it {call.tries} times")
            )
        elif not call.result.done():
            self._waiting.appendleft(call)

    # --- watching ---------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Find workers that a call holds up: they take no further calls, and their other calls begin anew elsewhere."""
        self._timer = None
        now = time.monotonic()
        for worker in self._workers.values():
            standing = self._marks.read(worker.slot)
            if standing != worker.standing or not standing[0]:
                worker.standing, worker.since, worker.held = standing, now, False
            elif now - worker.since > HELD_S and not worker.held:
                worker.held = True
                for call in [call for call in worker.calls.values() if call.number != standing[0]]:
                    del worker.calls[call.number]
                    worker.send({"call": call.number})
                    self._begin_anew(call)
        self._hand_out_safely()

    def _give_up(self, call: Call) -> None:
        """Stop a call that nobody awaits any more: its worker is killed if it does not answer soon."""
        worker = next((worker for worker in self._workers.values() if call.number in worker.calls), None)
        if worker is None or self._loop is None:
            return
        worker.send({"call": call.number})
        self._loop.call_later(CANCEL_S, self._kill_if_busy, worker, call)

    def _kill_if_busy(self, worker: Worker, call: Call) -> None:
        if worker.calls.get(call.number) is call and self._workers.get(worker.slot) is worker:
            del worker.calls[call.number]
            worker.guilty = call.number
            self._kill(worker, "did not stop at its deadline")

    def _kill(self, worker: Worker, verdict: str | None) -> None:
        worker.verdict = verdict
        with contextlib.suppress(OSError):
            self._control.send(ORDER.pack(b"k", worker.slot))

    def _hear(self) -> None:
        """Take what the template says of workers that have ended."""
        while True:
            try:
                message = self._control.recv(ENDED.size)
            except OSError:
                return
            if not message:  # it is gone, and its workers with it
                for worker in self._workers.values():
                    if worker.ended is not None and not worker.ended.done():
                        worker.ended.set_result(signal.SIGKILL)
                if self._loop is not None:
                    self._loop.remove_reader(self._control.fileno())
                return
            slot, status = ENDED.unpack(message)
            if (worker := self._workers.get(slot)) is None:
                self._ending.discard(slot)
            elif worker.ended is not None and not worker.ended.done():
                worker.ended.set_result(status)

    def _read_output(self, worker: Worker) -> None:
        """Log what a worker has printed, and end it if it prints without end."""
        try:
            said = os.read(worker.output, 1 << 16)
        except OSError:
            return
        if not said:
            self._stop_reading(worker, asyncio.get_running_loop())
        worker.printed += len(said)
        for line in said.decode(errors="replace").splitlines():
            self._logged += 1
            if self._logged <= MAX_LOGGED:
                log.info("env %s printed: %s", self.name, line[:1000])
            elif self._logged == MAX_LOGGED + 1:
                log.info("env %s prints more than %d lines: the others are not logged", self.name, MAX_LOGGED)
        if worker.printed > MAX_OUTPUT and worker.verdict is None:
            self._kill(worker, f"printed more than {MAX_OUTPUT >> 20} MiB")

    def _stop_reading(self, worker: Worker, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(OSError, ValueError):
            loop.remove_reader(worker.output)


RETIRED = "had run long enough"


def how_it_ended(status: int | None) -> str:
    """Say what a wait status means, as the end of a sentence about the code."""
    if status is None:
        return "has left its process in a state in which it does not end"
    if os.WIFSIGNALED(status):
        return f"ended its process: {signal.Signals(os.WTERMSIG(status)).name}"
    return f"ended its process with exit status {os.WEXITSTATUS(status)}"


def _end_template(control: socket.socket, pid: int) -> None:
    """End the template by closing its control; wait for it, and kill it where it does not end."""
    control.close()
    deadline = time.monotonic() + 2.0
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)
