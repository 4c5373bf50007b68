"""The table that an evaluation prints."""

from rich.markup import escape
from rich.table import Table

from prl.base.text import safe
from prl.tools.evaluation.play import EvaluationResult
from prl.tools.evaluation.scores import Estimate


def table(result: EvaluationResult) -> Table:
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


def shown_as(estimate: Estimate, sign: str = "", interval: bool = True) -> str:
    """`0.412 [0.350, 0.474]`, the interval on a line of its own."""
    text = f"{estimate.mean:{sign}.3f}"
    if not interval or estimate.low is None:
        return text
    return f"{text}\n\\[{estimate.low:{sign}.3f}, {estimate.high:{sign}.3f}]"
