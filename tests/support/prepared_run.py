"""A run that is planned and prepared as `python -m prl.train` does it, and not started."""

from pathlib import Path

from prl.config.hardware import Machine
from prl.config.run_yaml import text_of
from prl.config.schema import TrainConfig
from prl.config.validate import validate
from prl.launch.builder import PreparedRun, read_tasks
from prl.launch.components import build_components
from prl.launch.plan import RunPlan, plan
from prl.launch.shared_engines import launcher_of
from prl.runs.run_dir import new_run_dir


def planned(config: TrainConfig) -> RunPlan:
    return plan(config, Machine(config.machine), keeps_engines=config.sweep.shares(False))


def validated(config: TrainConfig) -> None:
    validate(config, Machine(config.machine))


def prepared_run(config: TrainConfig, resume=None) -> PreparedRun:
    with launcher_of(config.launcher, keeps_engines=config.sweep.shares(False)) as launcher:
        run = planned(config)
        launcher.check_plan(run)
        return read_tasks(config, run, build_components(config), launcher.place_of_worker, resume)


def run_dir_of(config: TrainConfig) -> Path:
    """A new run directory that holds this config, as a run has it when it begins."""
    run_dir = Path(config.run.dir)
    new_run_dir(run_dir, text_of(config))
    return run_dir
