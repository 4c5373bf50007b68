"""Train a policy by reinforcement learning, distillation or imitation.

    prl train [group=option …] [key=value …]
    prl train -m key=a,b …                      a sweep: a run for each value

options:
  model=tiny                    the policy; any other: model=hf model.path=…
  env=math                      tasks and their grader; env=[math,guess]: both
  algo=grpo                     the algorithm, such as max_rl, opd or sft
  max_steps=200                 training steps
  trainer.optim.lr=…            the peak learning rate; a model has its own
  orchestrator.batch_size=256   rollouts of a step
  orchestrator.group_size=4     rollouts of a task
  sampling.max_tokens=null      the longest reply, in tokens
  monitor=[]                    further trackers: wandb, tensorboard, trackio
  run.name=…                    the run's folder under outputs/

examples:
  prl train run.name=hello
  prl train model=hf model.path=Qwen/Qwen3-0.6B env=gsm8k dry_run=true
  prl train -m algo=grpo,max_rl seed=0,1,2
  prl train experiment=lora                     a recipe: conf/experiment/
  prl train run.resume=outputs/hello            goes on with a run
  prl train run.fork=outputs/hello max_steps=400

dry_run=true starts nothing: it prints the processes and whether they fit.
From Python: prl.train.main(prl.config.compose.compose(["env=math"])).
"""

import multiprocessing.spawn
import sys
from collections.abc import Sequence

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from prl.config.compose import CONF, to_config, typed
from prl.config.hardware import Machine
from prl.config.schema import TrainConfig
from prl.config.validate import validate
from prl.launch import command, resume, run
from prl.launch.children import leave_none
from prl.launch.plan import plan
from prl.launch.shared_engines import launcher_of, may_keep_engines
from prl.monitors.log import hold_log
from prl.runs.result import RunResult
from prl.tools import dry_run, report, sweep


def main(config: TrainConfig, typed_arguments: Sequence[str] = (), *, in_series: bool = False) -> RunResult:
    """One run, from the config to its `result.json`, whose content is returned.

    Raises ConfigError before anything has started, PrlError when the run failed, KeyboardInterrupt when it was stopped.
    A dry run, and one that a queue gets with its `typed_arguments`, end early. Runs `in_series` may share engines.
    """
    # Refuses a script that calls this without `if __name__ == "__main__":`, where a process of graders imports it.
    multiprocessing.spawn.get_preparation_data("prl")
    memory = hold_log()
    keeps = config.sweep.shares(in_series and may_keep_engines(config.launcher, config.weights))
    with launcher_of(config.launcher, keeps_engines=keeps) as launcher:
        machine = Machine(launcher.machine(config.machine))
        validate(config, machine)
        outcome = run.prepare(config, plan(config, machine, keeps_engines=keeps), launcher)
        if isinstance(outcome, RunResult):
            return outcome
        prepared, start = outcome
        if config.dry_run:
            dry_run.show(prepared)
            return RunResult("dry run")
        if launcher.submits:
            launcher.submit(config.run, config.checkpoint.grace_s, typed_arguments)
            return RunResult("submitted")
        report.load_early()
        return run.own(prepared, launcher, start, memory, report.try_to_write)


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")
def _job(cfg: DictConfig) -> float | None:
    """One Hydra job. Returns the optimised metric to a sweeper, None to nobody."""
    job = HydraConfig.get()
    with command.errors_as_exit_codes():
        if job.mode == hydra.types.RunMode.MULTIRUN:
            return sweep.job.run_job(cfg, main)
        config = to_config(TrainConfig, cfg, typed(job))
        result = main(config, sys.argv[1:])
    if result.status == "completed":
        report.sum_up(result, config.run.dir)
    return None


if __name__ == "__main__":
    leave_none()
    with command.errors_as_exit_codes():
        arguments = resume.expanded(sys.argv[1:])
    sweep.command.run(_job, arguments)
