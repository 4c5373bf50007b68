"""Sweeps: a directory of runs, one for each combination of the overrides that vary (`conf/sweep/README.md`)."""

from prl.tools.sweep import command as command
from prl.tools.sweep import job as job
from prl.tools.sweep import naming as naming
