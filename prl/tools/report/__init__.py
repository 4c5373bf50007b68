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
from prl.base.metric_names import SAMPLED, held_out
from prl.runs.result import RunResult

log = logging.getLogger(__name__)


def sum_up(result: RunResult, run_dir: str) -> None:
    """Print what became of a completed run, and where it is to be looked at."""
    rewards = {key: value for key, value in result.metrics.items() if key == SAMPLED} | held_out(result.metrics)
    summary = ", ".join(f"{key} {value:.3f}" for key, value in rewards.items() if value is not None)
    print(f"completed {result.steps} steps in {result.seconds:.0f} s: {summary}", file=sys.stderr)
    overlap = try_to_sum_up(Path(run_dir))
    if overlap:
        print(overlap, file=sys.stderr)
    print(f"look at: {run_dir}", file=sys.stderr, flush=True)


def try_to_sum_up(run_dir: Path) -> str | None:
    """`engine 92 % busy (18 % loading weights), trainer 31 %: generation-bound`; None, with a warning where something
    failed, if not known."""
    try:
        from prl.tools.report.shares import read_spans, shares

        times = shares(read_spans(run_dir, []))
        return None if times is None else times.sentence
    except Exception as error:
        log.warning("the events of the run could not be summed up: %s: %s", type(error).__name__, error)
        return None


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
