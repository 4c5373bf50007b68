"""Ranks that are forks of one process, which has imported what takes seconds to import."""

import os
import sys
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from unittest.mock import patch

IMPORTED = ["sharded", "architectures", "seeing", "tinker_ranks"]
"""By all ranks: the tests of a process have one server of forks."""
SERVER = forkserver.ForkServer()
"""Not the one of multiprocessing's own, which other tests have started with other imports."""


class Rank(ForkServerProcess):
    """A fork of what has imported torch and the trainer."""

    def start(self) -> None:
        with patch.object(forkserver, "connect_to_new_process", SERVER.connect_to_new_process):
            super().start()


class Ranks(ForkServerContext):
    """How ranks are started."""

    Process = Rank


def ranks() -> Ranks:
    """What starts ranks as forks."""
    SERVER.set_forkserver_preload(IMPORTED)
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # Python 3.11's server is not told of
        SERVER.ensure_running()  # `sys.path`, and passes over in silence what it does not find
    return Ranks()


def exit_codes(target: Callable[..., object], arguments: Sequence[tuple], timeout_s: float) -> list[int | None]:
    """Run a rank for each of the arguments. Returns how they ended; None of one that had to be killed."""
    context = ranks()
    processes = [context.Process(target=target, args=own) for own in arguments]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout_s)
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
