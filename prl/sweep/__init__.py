"""Sweeps: a directory of runs, one for each combination of the overrides that vary (`conf/sweep/README.md`)."""

from prl.sweep import command as command
from prl.sweep import job as job
from prl.sweep import naming as naming
