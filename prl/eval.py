"""Evaluate models without training them.

    python -m prl.eval <checkpoint | run | model | endpoint> … [env=name] [k=8] [key=value …]

The others are compared with the first. Results are in a run directory of their own.
"""

import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.markup import escape
from rich.table import Table

from prl.base.terminal import Console
from prl.base.text import safe
from prl.config.compose import CONF, to_config, typed
from prl.config.evaluation import EvaluationConfig
from prl.config.run_yaml import text_of
from prl.launch import command
from prl.launch.children import leave_none
from prl.launch.signals import run_to_end
from prl.monitors.log import hold_log, log_to
from prl.runs.owner import owned
from prl.runs.run_dir import absolute, new_run_dir, recorded, refuse_existing, refuse_other_files
from prl.tools import report
from prl.tools.evaluation.arguments import start

if TYPE_CHECKING:
    from prl.tools.evaluation.play import EvaluationResult
    from prl.tools.evaluation.scores import Estimate

PIPED = 130
"""Width of the table where nothing says how wide it may be, characters."""


def main(config: EvaluationConfig) -> "EvaluationResult":
    """One evaluation, from the config to its `result.json`, whose content is returned.

    Raises ConfigError before anything has started, PrlError when it failed, KeyboardInterrupt when it was stopped.
    """
    memory = hold_log()
    run_dir = Path(config.run.dir)
    refuse_other_files(run_dir)
    refuse_existing(run_dir)
    from prl.tools.evaluation import play  # verifiers and transformers

    evaluation = play.evaluation_of(config)
    if config.k > 1 and any(env.eval_sampler.temperature == 0 for env in evaluation.envs):
        warnings.warn(f"k={config.k} with temperature 0: all samples of a task get the same replies", stacklevel=2)
    with owned(run_dir):
        new_run_dir(run_dir, text_of(config))
        log_to(run_dir / "logs" / "orchestrator.log", memory)
        print(f"run directory: {run_dir}", file=sys.stderr, flush=True)
        try:
            with recorded(run_dir, evaluation.result):
                run_to_end(evaluation.run())
        finally:
            report.try_to_write(run_dir)
    return evaluation.result


def table(result: "EvaluationResult") -> Table:
    """The result: a row for each target and env; 95 % intervals in brackets."""
    first = result.targets[0]
    k, ks = first.envs[0].k, list(first.envs[0].pass_at)
    shown = Table("target", "env", f"avg@{k}", *(f"pass@{k}" for k in ks), f"avg@{k} − first", "failed")
    tasks = str(first.envs[0].tasks)
    if any(score.tasks != first.envs[0].tasks for score in first.envs):
        tasks = ", ".join(f"{score.tasks} {escape(safe(score.env))}" for score in first.envs)
    shown.caption = (
        f"{tasks} tasks, {k} samples each. [95 % interval over tasks: Student's t]. "
        f"Differences to {escape(safe(first.name))} are paired by task."
    )
    for target in result.targets:
        for score in target.envs:
            passed = [shown_as(score.pass_at[k], interval=k == ks[-1]) for k in ks]
            difference = "" if score.difference is None else shown_as(score.difference, sign="+")
            shown.add_row(
                *(escape(safe(name)) for name in (target.name, score.env)),
                shown_as(score.avg),
                *passed,
                difference,
                f"{score.errored:.1%}" if score.errored else "",
            )
    return shown


def shown_as(estimate: "Estimate", sign: str = "", interval: bool = True) -> str:
    """`0.412 [0.350, 0.474]`, the interval on a line of its own."""
    text = f"{estimate.mean:{sign}.3f}"
    if not interval or estimate.low is None:
        return text
    return f"{text}\n\\[{estimate.low:{sign}.3f}, {estimate.high:{sign}.3f}]"


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="eval")
def _job(cfg: DictConfig) -> None:
    with command.errors_as_exit_codes():
        config = to_config(EvaluationConfig, cfg, typed(HydraConfig.get()))
        config.run.dir = absolute(config.run.dir)
        result = main(config)
    console = Console()
    (console if console.is_terminal else Console(width=PIPED)).print(table(result))
    print(f"{result.seconds:.0f} s; look at: {config.run.dir}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    leave_none()
    start(_job, sys.argv[1:])
