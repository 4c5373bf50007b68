"""Pages and tables of what runs left in their directories. Nothing here starts or changes a run.

Start with `page.py` (of a run) and `sweep.py` (of several); `runs.py` reads a run directory back, `html.py`
makes a page safe.
"""

import logging
from pathlib import Path

from prl.base.errors import of_disk

log = logging.getLogger(__name__)


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


def try_to_write(run_dir: Path) -> None:
    """Write the page of a run that has just ended; a warning where that fails, for the run's own end matters more."""
    try:
        from prl.tools.report.page import write_page  # pandas and matplotlib, which a run needs at its end alone

        write_page(run_dir)
    except Exception as error:
        reason = of_disk(error) or f"{type(error).__name__}: {error}"  # repr has all that a codec was given
        log.warning("the page of the run could not be written (try `prl report %s`): %s", run_dir, reason)
