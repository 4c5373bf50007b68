"""Both sides of what passes between orchestrator and trainer, connected on this machine."""

import contextlib
import time

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
