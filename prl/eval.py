"""Evaluate models without training them.

    python -m prl.eval <checkpoint | run | model | endpoint> … [env=name] [k=8] [key=value …]

The others are compared with the first. Results are in a run directory of their own.
"""

import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from prl.base import garbage
from prl.base.terminal import Console
from prl.config.compose import CONF, to_config, typed
from prl.config.evaluation import EvaluationConfig
from prl.config.run_yaml import text_of
from prl.launch import command
from prl.launch.children import leave_none
from prl.launch.signals import run_to_end
from prl.monitors.log import hold_log, log_to
from prl.runs.owner import owned
from prl.runs.run_dir import new_run_dir, recorded, refuse_existing, refuse_other_files
from prl.tools import report
from prl.tools.evaluation.arguments import start

if TYPE_CHECKING:
    from prl.tools.evaluation.play import EvaluationResult

PIPED = 130
"""Width of the table where nothing says how wide it may be, characters."""


def main(config: EvaluationConfig) -> "EvaluationResult":
    """One evaluation, from the config to its `result.json`, whose content is returned.

    Raises ConfigError before anything has started, PrlError when it failed, KeyboardInterrupt when it was stopped.
    """
    began = time.monotonic()
    memory = hold_log()
    run_dir = Path(config.run.dir)
    refuse_other_files(run_dir)
    refuse_existing(run_dir)
    print("reading the tasks", file=sys.stderr, flush=True)
    with garbage.loading():
        from prl.tools.evaluation import play  # verifiers and transformers

        evaluation = play.evaluation_of(config)
    if config.k > 1 and any(env.eval_sampler.temperature == 0 for env in evaluation.envs):
        warnings.warn(f"k={config.k} with temperature 0: all samples of a task get the same replies", stacklevel=2)
    with owned(run_dir):
        new_run_dir(run_dir, text_of(config))
        log_to(run_dir / "logs" / "orchestrator.log", memory)
        print(f"run directory: {run_dir}", file=sys.stderr, flush=True)
        try:
            with recorded(run_dir, evaluation.result, began):
                run_to_end(evaluation.run())
        finally:
            report.try_to_write(run_dir)
    return evaluation.result


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="eval")
def _job(cfg: DictConfig) -> None:
    with command.errors_as_exit_codes():
        config = to_config(EvaluationConfig, cfg, typed(HydraConfig.get()))
        result = main(config)
    from prl.tools.evaluation.table import table

    console = Console()
    (console if console.is_terminal else Console(width=PIPED)).print(table(result))
    print(f"{result.seconds:.0f} s; look at: {config.run.dir}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    leave_none()
    start(_job, sys.argv[1:])
