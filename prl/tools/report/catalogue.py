"""The catalogue of all metrics that a run writes to `metrics.jsonl`.

`<env>` in a key stands for an env's name, and in keys marked `all` also for `all`, all envs together. Other words in
angle brackets stand for names that the env, the filter, the loss component or the user's loss gives. A user's own loss
adds keys of its own, which are not listed.
"""

import re

from prl.monitors.metric_names import QUANTILES, Metric
from prl.orchestrator.metric_catalogue import EVALUATION, ORCHESTRATOR
from prl.rollouts.components import COMPONENTS
from prl.rollouts.rollout import ERROR_KINDS
from prl.trainer.metric_catalogue import TRAINER

CATALOGUE = {"Orchestrator": ORCHESTRATOR, "Evaluation": EVALUATION, "Trainer": TRAINER}
"""By the part of a run that measures."""


def metric_of(key: str) -> Metric | None:
    """The entry of a key, the most specific one; None for a key that is not in the catalogue."""
    entries = [metric for metrics in CATALOGUE.values() for metric in metrics if is_key_of(metric, key)]
    return max(entries, key=lambda metric: len(re.sub(r"<\w+>", "", metric.key)), default=None)


def is_key_of(metric: Metric, key: str) -> bool:
    """Whether `key` is one of the keys that the entry's pattern stands for."""
    patterns = {
        "<env>": "[^/]+" if metric.all else "(?!all/)[^/]+",
        "<kind>": "|".join(ERROR_KINDS),
        "<component>": "|".join(COMPONENTS),
        "<pool>": "easy|normal|hard",
        "<quantile>": "|".join(QUANTILES),
    }
    parts = re.split(r"(<\w+>)", metric.key)
    patterns_of_parts = [f"({patterns.get(part, '.+')})" if part.startswith("<") else re.escape(part) for part in parts]
    return re.fullmatch("".join(patterns_of_parts), key) is not None


def catalogue_markdown() -> str:
    """The catalogue as Markdown tables, one for each part of a run that measures."""
    tables = []
    for title, metrics in CATALOGUE.items():
        rows = [f"| `{metric.key}` | {metric.unit} | {metric.meaning} | {metric.healthy} |" for metric in metrics]
        head = ["| key | unit | meaning | healthy |", "|---|---|---|---|"]
        tables.append("\n".join([f"### {title}", "", *head, *rows]))
    return "\n\n".join(tables) + "\n"


if __name__ == "__main__":  # python -m prl.tools.report.catalogue > prl/METRICS.md
    print(catalogue_markdown(), end="")
