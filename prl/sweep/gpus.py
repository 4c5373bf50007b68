"""GPUs that Slurm jobs of a sweep ask for: as many as their runs take, where the packages for GPUs are installed."""

import contextlib
import sys
from collections.abc import Iterator

from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from prl.config import hardware
from prl.config.hardware import MachineConfig, assuming
from prl.errors import ConfigError
from prl.launch import specs
from prl.sweep.jobs import config_of_job, overrides_of_jobs

DECIDE = ("algo", "env", "experiment", "inference", "teacher", "trainer.device", "trainer.num_processes")
"""How the config keys begin by which jobs may differ in the GPUs that they take."""
ASKED = ("gpus_per_node", "gpus_per_task", "gres")
"""Settings of submitit's launcher by which the command itself asks for GPUs, or for none."""


def ask_for_gpus(config: DictConfig) -> None:
    """Have the Slurm jobs of a sweep ask for the GPUs of the one that takes most: submitit submits them alike.

    Nothing is changed where the command says how many, and where the engine installed is the one for a CPU.

    Args:
        config: the sweep's, before its first job.
    """
    launcher = config.hydra.launcher
    if not launcher._target_.endswith("submitit_launcher.SlurmLauncher") or not hardware.has_gpu_packages():
        return
    further = " ".join(launcher.additional_parameters)
    if "gpus" in further or "gres" in further or any(launcher[name] is not None for name in ASKED):
        return
    if found := max(taken(config), default=0):
        launcher.gpus_per_node = found
        print(f"each Slurm job asks for hydra.launcher.gpus_per_node={found}", file=sys.stderr, flush=True)


def taken(config: DictConfig) -> Iterator[int]:
    """GPUs that the jobs take, once for those that differ in no key of `DECIDE`: fewer configs than Hydra composes.

    A job whose config is refused says so itself, later.
    """
    for overrides in overrides_of_jobs(config, DECIDE):
        with contextlib.suppress(ConfigError, HydraException, OmegaConfBaseException):
            job = config_of_job(config, overrides)
            with assuming(MachineConfig(gpus=1)):  # a node has some, whether or not the machine of this command does
                yield specs.needs_of(job).least()
