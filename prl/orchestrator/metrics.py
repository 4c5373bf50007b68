"""Metrics of a step, as flat keys for `metrics.jsonl`. `prl/METRICS.md` declares them all."""

import logging
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from prl.base.metric_names import QUANTILES
from prl.filters.base import STAGES, Filters, SlotName
from prl.rollouts.rollout import IN_BATCH, Rollout, Stage

if TYPE_CHECKING:
    from prl.orchestrator.types import TrainEnv

log = logging.getLogger(__name__)

LARGE_GAP, LARGE_HALF_GAP = 1e-3, 0.05
"""Nats per token that rounding explains, in float32 and where engine or trainer computes in 16 bits."""


def mean(values: Iterable[float]) -> float:
    """Return the mean; 0.0 of no values. The sum is exact: it does not depend on the order."""
    numbers = list(map(float, values))
    return statistics.fmean(numbers) if numbers else 0.0


def quantiles(values: Iterable[float | None]) -> dict[str, float]:
    """Return the smallest, the median, the largest and the outer deciles of `values` by name; {} of none.

    Quantiles lie between neighbours linearly. None and what is not finite are left out.
    """
    numbers = [value for value in values if value is not None and math.isfinite(value)]
    if not numbers:
        return {}
    return dict(zip(QUANTILES, np.quantile(numbers, list(QUANTILES.values())).tolist(), strict=True))


def take_logged(envs: "Sequence[TrainEnv]") -> dict[str, float]:
    """Return the mean of the values that components have logged under each name since the last call."""
    values: dict[str, list[float]] = {}
    for env in envs:
        filters = [made for slot in env.filters.values() for made in slot.values()]
        for component in (env.algorithm, env.curriculum, *filters):
            for name, logged in component.take_logged().items():
                values.setdefault(f"log/{env.name}/{name}", []).extend(logged)
    return {key: mean(of_key) for key, of_key in values.items()}


def metrics_of_part(name: str, rollouts: list[Rollout], replayed: Sequence[Rollout], step: int) -> dict[str, float]:
    """Return what is counted for each env and for `all`, whose name stands in the keys."""
    spread: dict[str, list[float | None]] = {
        "reward": [rollout.reward for rollout in rollouts],
        "length": [rollout.num_completion_tokens for rollout in rollouts],
        "advantage": [rollout.mean_advantage for rollout in rollouts],
        "off_policy": [age_of(rollout, step) for rollout in (*rollouts, *replayed)],
    }
    line = {f"{key}/{name}/{part}": value for key, of in spread.items() for part, value in quantiles(of).items()}
    return line | {
        f"reward/{name}/mean": mean(rollout.reward for rollout in rollouts),
        f"length/{name}/mean": mean(rollout.num_completion_tokens for rollout in rollouts),
        f"truncated/{name}": mean(rollout.is_truncated for rollout in rollouts),
    }


def metrics_of_batch(rollouts: list[Rollout], step: int, replayed: Sequence[Rollout] = ()) -> dict[str, float]:
    """Return the metrics of the rollouts of `step`: those of its groups, and those that filters dropped before it.

    Failed rollouts are left out. Filtered ones count in all numbers except those about the batch in which they had no
    place. Those that are `replayed`, of earlier batches, count in the ages alone.
    """
    graded = [rollout for rollout in rollouts if not rollout.failed]
    in_batch = [rollout for rollout in graded if rollout.stage in IN_BATCH]
    again = by_env(replayed)
    line = metrics_of_part("all", graded, replayed, step)
    for env, part in by_env(graded).items():
        line |= metrics_of_part(env, part, again.get(env, ()), step)
        for key in {key: None for rollout in part for key in rollout.metrics}:  # not every rollout has every metric
            values = [rollout.metrics.get(key) or 0.0 for rollout in part]
            line[f"metric/{env}/{key}"] = mean(filter(math.isfinite, values))
    ages = [age for age in (age_of(rollout, step) for rollout in (*in_batch, *replayed)) if age is not None]
    return line | {
        "off_policy/mean": mean(ages),
        "off_policy/max": float(max(ages, default=0)),
        "rollouts/batch": float(len(in_batch)),
        "rollouts/trained": float(count(rollouts, Stage.TRAINED)),
        "rollouts/filtered": float(count(rollouts, Stage.PRE_FILTERED) + count(rollouts, Stage.POST_FILTERED)),
        "time/scoring": mean(rollout.scoring_s for rollout in graded),
    }


def shares_of_envs(
    rollouts: Iterable[Rollout], names: list[str], size_of: Callable[[list[Rollout]], int]
) -> dict[str, float]:
    """Return the share of each env, 0 too, in what has had a place in a batch, as the size of a batch counts."""
    parts = by_env(rollout for rollout in rollouts if rollout.stage in IN_BATCH)
    sizes = {name: size_of(parts.get(name, [])) for name in names}
    return {f"batch/{name}/share": size / max(1, sum(sizes.values())) for name, size in sizes.items()}


def age_of(rollout: Rollout, step: int) -> int | None:
    """Return the policy updates between the start of a rollout and the step of its batch; None of a frozen model.

    None as well for one that had no place in the batch.
    """
    if rollout.start_version is None or rollout.stage not in IN_BATCH:
        return None
    return step - 1 - rollout.start_version


def metrics_of_filters(rollouts: list[Rollout], filters: Mapping[str, Filters]) -> dict[str, float]:
    """Return the shares of rollouts that each slot of filters dropped, and that its filters matched.

    `pre_filters/...` are shares of all rollouts that neither failed nor were empty, `filters/...` of those that the
    batch was cut from. `is_filtered` is the share dropped, `is_matched` the share that any filter of the slot matched,
    monitoring ones included.

    Args:
        rollouts: Those of the step, as for `metrics_of_batch`.
        filters: By env.
    """
    asked = [rollout for rollout in rollouts if rollout.stage not in (Stage.FAILED, Stage.EMPTY)]
    cut = [rollout for rollout in asked if rollout.stage is not Stage.PRE_FILTERED]
    line: dict[str, float] = {}
    slots: list[tuple[str, SlotName, list[Rollout]]] = [
        ("pre_filters", "pre_batch", asked),
        ("filters", "post_batch", cut),
    ]
    for prefix, slot, offered in slots:
        names = {env: list(of_env.get(slot, ())) for env, of_env in filters.items()}
        names["all"] = list(dict.fromkeys(name for env_names in names.values() for name in env_names))
        for env, part in {"all": offered, **by_env(offered)}.items():
            matched = Counter(rollout.matched.get(slot) for rollout in part)
            total = max(1, len(part))
            line[f"{prefix}/{env}/is_filtered"] = count(part, STAGES[slot]) / total
            line[f"{prefix}/{env}/is_matched"] = (len(part) - matched[None]) / total
            line |= {f"{prefix}/{env}/{name}": matched[name] / total for name in names[env]}
    return line


def line_of_step(
    shipped: dict[str, float], trained: dict[str, float], wall_s: float, busy_s: float, *, half: bool
) -> dict[str, float]:
    """Return the line of a step: the orchestrator's metrics, the trainer's, and rates over `wall_s` seconds.

    The engine was at work for `busy_s` of these. `half`: engine or trainer computes in 16 bits.
    """
    explained = LARGE_HALF_GAP if half else LARGE_GAP
    line = {**shipped, **trained} | {"time/step": wall_s, "idle/engine": max(0.0, 1.0 - busy_s / wall_s)}
    if not line["off_policy/max"] and line.get("logprob_gap/mean", 0.0) > explained:
        log.warning(
            "step %d is on-policy, yet sampler and trainer differ by %.3g per token, and rounding explains %g: the "
            "engine has other weights or another max_model_len (engine.urls), or runs the model as another one; see "
            "prl/TROUBLESHOOTING.md, Engine and trainer disagree",
            line["step"],
            line["logprob_gap/mean"],
            explained,
        )
    return line | {f"tokens/{kind}_per_second": line[f"tokens/{kind}"] / wall_s for kind in ("generated", "trained")}


def by_env(rollouts: Iterable[Rollout]) -> dict[str, list[Rollout]]:
    """Return the rollouts of each env."""
    parts: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        parts.setdefault(rollout.env_name, []).append(rollout)
    return parts


def count(rollouts: Iterable[Rollout], stage: Stage) -> int:
    """Return the number of rollouts that left at `stage`."""
    return sum(rollout.stage is stage for rollout in rollouts)


def why_untrained(rollouts: Iterable[Rollout]) -> str:
    """Return the three most frequent reasons for which rollouts did not train, each with its count."""
    reasons = Counter(
        rollout.outcome.reason
        for rollout in rollouts
        if rollout.outcome is not None and rollout.stage is not Stage.TRAINED
    )
    return ", ".join(f"{reason}: {count}" for reason, count in reasons.most_common(3))
