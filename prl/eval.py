"""Evaluate models on held-out tasks without training them.

    prl eval <target> … [group=option …] [key=value …]

A target is a run or a checkpoint of one, a model folder, a model of prl or of
the hub, or the URL of an endpoint. The others are compared with the first.

options:
  env=math                      tasks; by default those of the target's run
  k=8                           samples of each task, for avg@k and pass@k
  num_tasks=64                  held-out tasks of each env
  sampling.temperature=1.0      0 = greedy
  sampling.max_tokens=null      the longest reply, in tokens
  correct_at=1.0                the reward from which an episode is correct
  seed=0                        the seed of sampling
  model.dtype=null              number format; null = the model's own
  engine.urls=[…]               servers that run already
  run.name=…                    the folder of the results under outputs/

examples:
  prl eval tiny env=math
  prl eval tiny outputs/hello k=16
  prl eval outputs/hello/checkpoints/step_000020 env=guess num_tasks=128
  prl eval http://127.0.0.1:8001/v1 endpoint.api_key_var=PRL_TOKEN
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
