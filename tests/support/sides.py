"""Both sides of what passes between orchestrator and trainer, connected on this machine."""

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from prl.wire.exchange import Answer, Exchange, FromOrchestrator, FromRank, Order
from prl.wire.session import OrchestratorEnd, RankEnd
from prl.wire.transfers import Transfers


def until(condition, seconds=30):
    """What `condition()` returns, once that is true."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return found


def joined(ours, theirs, invitation, rank):
    """Have a rank join, while the orchestrator tends its side."""
    with ThreadPoolExecutor() as threads:
        joining = threads.submit(theirs.join, invitation, rank)
        until(lambda: ours.tend() or joining.done())
        joining.result()


class Sides(contextlib.ExitStack):
    """The transfers of an orchestrator, and those of the trainer's first rank as it joins."""

    def __init__(self, folder, bucket_bytes):
        super().__init__()
        self.folder, self.bucket_bytes = folder, bucket_bytes
        end = OrchestratorEnd("127.0.0.1", 1)
        self.callback(end.close)
        self.ours = self._with(end, FromRank)
        self.ours.begin()
        self.invitation = end.invitation

    def theirs(self):
        """The first rank's, connected."""
        end = RankEnd(self.invitation, 0)
        self.callback(end.close)
        made = self._with(end, FromOrchestrator)
        until(lambda: self.ours.read(Answer) or made.read(Order) or end.answered)
        return made

    def _with(self, end, heard):
        made = Transfers(self.folder, self.bucket_bytes)
        made.exchange = Exchange(end, heard)
        return made


class Cutter:
    """Passes bytes on to a port, until the connections are cut; the next ones are passed on as well.

    `rate` are the bytes a second that pass either way; None = all that come.
    """

    def __init__(self, port, rate=None):
        self.to, self.pairs, self.cuts, self.rate = ("127.0.0.1", port), [], 0, rate
        self.flows = threading.Event()
        self.flows.set()
        self.door = socket.create_server(("127.0.0.1", 0))
        if rate is not None:  # else the kernel takes everything at once
            self.door.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.port = self.door.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            try:
                near = self.door.accept()[0]
            except OSError:
                return
            far = socket.socket()
            if self.rate is not None:
                far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            far.connect(self.to)
            self.pairs.append((near, far))
            for ways in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=ways, daemon=True).start()

    def _pass(self, source, target):
        try:
            while data := source.recv(1000):
                self.flows.wait()
                target.sendall(data)
                if self.rate is not None:
                    time.sleep(len(data) / self.rate)
        except OSError:
            pass

    def cut(self):
        pairs, self.pairs = self.pairs, []
        self.cuts += bool(pairs)
        for end in (end for pair in pairs for end in pair):
            with contextlib.suppress(OSError):  # the other side has ended it
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self):
        self.flows.set()
        self.door.close()
        self.cut()
