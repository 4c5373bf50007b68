"""Ranks that are forks of one process, which has imported what takes seconds to import."""

import multiprocessing
import os
import sys
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

import pytest

IMPORTED = ["sharded", "architectures", "prl.wire.meeting"]
"""By all ranks: the tests of a process have one server of forks."""


def ranks() -> ForkServerContext:
    """How ranks are started: each a fork of a process that has imported torch and the trainer."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with pytest.MonkeyPatch.context() as patch:  # Python 3.11's server is not told of `sys.path`, and passes over
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # in silence what it does not find
        forkserver.ensure_running()
    return context


def leave_unless_imported(names: set[str]) -> None:
    """End this process with status 1 where it has not imported all of `names`."""
    sys.exit(not names <= sys.modules.keys())
