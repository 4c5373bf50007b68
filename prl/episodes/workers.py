"""The processes that run an env's code, seen from the run: calls are handed to workers, which are replaced as needed.

A call has the deadline of whoever awaits it. What it does in its process costs that call alone:

- It blocks or spins: when its awaiter gives up, the worker has half a second to stop it, then it is killed.
- It ends the process, by itself or by a bound (memory, output): it has failed with that reason.
- Calls that shared the worker, because all of them waited for something, are carried out anew in another one.
"""

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import threading
import time
import weakref
from collections import deque
from typing import Any

from prl.episodes.calls import MAX_CALLS, RETIRED, Call, EnvCodeError, EnvProcessEnded, Printed, Worker, how_it_ended
from prl.episodes.frames import Marks, frame, read_frame
from prl.episodes.template import ENDED, ORDER, end_template, order_worker, run_template
from prl.episodes.worker import Handler
from prl.reaper import fork

READY_WORKERS = min(8, os.cpu_count() or 1)
"""Workers of an env, not counting those that a call holds up, or has to itself while it waits."""
MAX_WORKERS = 32
HELD_S = 1.0
"""[s] A call that has not come back to its event loop for so long holds its worker up."""
LOOK_S = 0.25
CANCEL_S = 0.5
"""[s] Time for a call that nobody awaits any more to stop."""
MAX_OUTPUT = 1 << 20
"""[bytes] What a worker may print between two calls that it begins."""
MAX_TRIES = 4
"""Times that a call is begun: it may share a worker with others that end it."""


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
        first = threading.current_thread() is threading.main_thread()
        made = (theirs, self._marks, handler, int(memory_gb * (1 << 30)))
        self.template = fork(lambda: run_template(*made, by_main_thread=first))
        theirs.close()
        self._control.setblocking(False)
        self._end = weakref.finalize(self, end_template, self._control, self.template)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._workers: dict[int, Worker] = {}
        self._ending: set[int] = set()
        """Slots of workers that it has left, which have not ended yet."""
        self._waiting: deque[Call] = deque()
        self._numbers = itertools.count(1)
        self._timer: asyncio.TimerHandle | None = None
        self._printed = Printed(name)

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

    def close(self) -> None:
        """End workers and template; calls that are awaited are cancelled."""
        self.stop()
        self._end()

    # --- handing out ------------------------------------------------------------------------------------------------

    def _join_loop(self) -> None:
        """Begin in the running event loop, with workers of its own."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if not self._end.alive:
            raise EnvProcessEnded(f"the processes of env {self.name!r} have been ended")
        self.stop()
        self._loop = loop
        loop.add_reader(self._control.fileno(), self._hear)

    def stop(self) -> None:
        """End the workers; calls that are awaited are cancelled. Later ones, in any event loop, get new workers."""
        loop, self._loop = self._loop, None
        if loop is not None and not loop.is_closed():
            loop.remove_reader(self._control.fileno())
            if self._timer is not None:
                self._timer.cancel()
            for worker in self._workers.values():
                if worker.task is not None:
                    worker.task.cancel()
                loop.remove_reader(worker.output)
            for call in [
                *self._waiting,
                *(call for worker in self._workers.values() for call in worker.calls.values()),
            ]:
                call.result.cancel()
        self._timer = None
        for worker in self._workers.values():
            self._kill(worker, None)
            os.close(worker.output)
        self._ending |= set(self._workers)
        self._workers.clear()
        self._waiting.clear()

    def _hand_out(self) -> None:
        """Give waiting calls to workers that are free; start workers where there are too few."""
        while self._waiting:
            if self._waiting[0].result.done():
                self._waiting.popleft()
                continue
            alone = self._waiting[0].tries > 1  # it has shared two workers that ended
            free = [worker for worker in self._workers.values() if worker.free and not (alone and worker.calls)]
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
        ready = sum(worker.counts for worker in self._workers.values())
        slots = set(range(MAX_WORKERS)) - set(self._workers) - self._ending
        if ready >= READY_WORKERS or not slots:
            return None
        assert self._loop is not None
        slot = min(slots)
        self._marks.leave(slot)
        try:
            channel, output = order_worker(self._control, slot)
        except OSError as error:
            raise EnvProcessEnded(f"the processes of env {self.name!r} are gone: {error}") from error
        worker = self._workers[slot] = Worker(slot, output, self._loop.create_future())
        self._loop.add_reader(output, self._read_output, worker)
        worker.task = self._loop.create_task(self._serve(worker, channel))
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
            async with asyncio.timeout(5.0):
                status = await worker.ended
        except TimeoutError:
            status = None
        finally:
            worker.writer.close()
        self._read_output(worker)
        asyncio.get_running_loop().remove_reader(worker.output)
        os.close(worker.output)
        self._workers.pop(worker.slot, None)
        if status is None:
            self._ending.add(worker.slot)
        alone = next(iter(worker.calls)) if len(worker.calls) == 1 else None
        guilty = worker.guilty or self._marks.read(worker.slot)[0] or alone
        for call in list(worker.calls.values()):
            if call.number == guilty and worker.verdict != RETIRED:
                call.fail(EnvProcessEnded(f"the env's code {worker.verdict or how_it_ended(status)}"))
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
            self._read_output(worker)  # what the call has printed comes before its result
            if "error" in answer:
                call.fail(EnvCodeError(*(str(answer.get(key, "")) for key in ("error", "message", "traceback"))))
            elif not call.result.done():
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
                self._waiting.popleft().fail(error)

    def _begin_anew(self, call: Call) -> None:
        """Carry out a call in another worker, since somebody else's has taken this one."""
        if call.tries >= MAX_TRIES:
            call.fail(EnvProcessEnded(f"its process was ended {call.tries} times by other code of the env"))
        elif not call.result.done():
            self._waiting.appendleft(call)

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
        worker.verdict, worker.ending = verdict, True
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
                    if not worker.ended.done():
                        worker.ended.set_result(signal.SIGKILL)
                if self._loop is not None:
                    self._loop.remove_reader(self._control.fileno())
                return
            slot, status = ENDED.unpack(message)
            self._ending.discard(slot)
            if slot in self._workers and not self._workers[slot].ended.done():
                self._workers[slot].ended.set_result(status)

    def _read_output(self, worker: Worker) -> None:
        """Log what a worker has printed, and end it if it prints without end."""
        try:
            said = os.read(worker.output, 1 << 16)
        except OSError:
            return
        if not said:
            asyncio.get_running_loop().remove_reader(worker.output)
        worker.printed += len(said)
        self._printed.take(said)
        if worker.printed > MAX_OUTPUT and not worker.ending:
            self._kill(worker, f"printed more than {MAX_OUTPUT >> 20} MiB")
