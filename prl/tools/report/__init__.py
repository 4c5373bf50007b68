"""Pages and tables of what runs left in their directories. Nothing here starts or changes a run.

Start with `page.py` (of a run) and `sweep.py` (of several); `runs.py` reads a run directory back, `html.py`
makes a page safe.
"""

import importlib
import logging
import sys
import threading
from pathlib import Path

from prl.base.errors import of_disk
from prl.runs.result import RunResult

log = logging.getLogger(__name__)


def sum_up(result: RunResult, run_dir: str) -> None:
    """Print what became of a completed run, and where it is to be looked at."""
    print(f"completed {result.steps} steps in {result.seconds:.0f} s", file=sys.stderr)
    for sentence in try_to_sum_up(Path(run_dir)):
        print(sentence, file=sys.stderr)
    print(f"look at: {run_dir}", file=sys.stderr, flush=True)


def try_to_sum_up(run_dir: Path) -> list[str]:
    """The sentences of the verdict about rewards and times: `held-out reward 0.29 to 0.94`, `engine 92 % busy …`.

    Those that are known; with a warning where something failed.
    """
    try:
        from prl.tools.report.runs import read_run
        from prl.tools.report.shares import read_spans, shares
        from prl.tools.report.verdict import summary

        return summary(read_run(run_dir), shares(read_spans(run_dir, [])))
    except Exception as error:
        log.warning("the run could not be summed up: %s: %s", type(error).__name__, error)
        return []


def load_early() -> None:
    """Load what a page takes, pandas and scipy, in a thread: the start of a run waits, and its end does not."""
    threading.Thread(target=importlib.import_module, args=("prl.tools.report.page",), daemon=True).start()


def try_to_write(run_dir: Path) -> None:
    """Write the page of a run that has just ended; a warning where that fails, for the run's own end matters more."""
    try:
        from prl.tools.report.page import write_page  # seconds of imports, which a run needs at its end alone

        write_page(run_dir)
    except Exception as error:
        reason = of_disk(error) or f"{type(error).__name__}: {error}"  # repr has all that a codec was given
        log.warning("the page of the run could not be written (try `prl report %s`): %s", run_dir, reason)
