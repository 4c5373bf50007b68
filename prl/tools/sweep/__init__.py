"""Sweeps: a directory of runs, one for each combination of the overrides that vary (`conf/sweep/README.md`).

Start with `command.py` (the sweep) and `job.py` (one of its runs).
"""

from prl.tools.sweep import command as command
from prl.tools.sweep import job as job
from prl.tools.sweep import naming as naming
