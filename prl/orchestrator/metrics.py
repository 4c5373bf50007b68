"""Metrics of a step, as flat keys for `metrics.jsonl`. `metric_catalogue.py` declares them all."""

import contextlib
import logging
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from prl.orchestrator.filters.base import STAGES, Filters, SlotName
from prl.rollouts.rollout import IN_BATCH, Rollout, Stage
from prl.wire.metric_names import QUANTILES

if TYPE_CHECKING:
    from prl.orchestrator.types import TrainEnv

log = logging.getLogger(__name__)

LARGE_GAP = 0.05  # nats per token; bfloat16 engines stay below it


def mean(values: Iterable[float]) -> float:
    """The mean; 0.0 of no values. Rounded once, at the end: equal values are their own mean, and reach a threshold."""
    values = list(map(float, values))
    if not values:
        return 0.0
    n = len(values)
    with contextlib.suppress(OverflowError, ValueError):  # of sums beyond all floats, and of opposite infinities
        found = math.fsum(values) / n
        # By how much n times it misses the sum: less than n halves of its last place, and no other float is as near.
        if not found or abs(math.fsum(values + [-found] * n)) < n * math.ulp(math.nextafter(found, 0.0)) / 2:
            return found
    return statistics.mean(values)  # in fractions, which takes twenty times as long


def quantiles(values: Iterable[float | None]) -> dict[str, float]:
    """The smallest, the median, the largest and the outer deciles of `values` by name; {} of none.

    Quantiles lie between neighbours linearly. None and what is not finite are left out.
    """
    ordered = sorted(value for value in values if value is not None and math.isfinite(value))
    last, found = len(ordered) - 1, dict[str, float]()
    for name, share in QUANTILES.items() if ordered else ():
        place = last * share
        low = int(place)
        before, after, between = ordered[low], ordered[min(low + 1, last)], place - low
        step = after - before  # counted from the nearer one, so that it is met exactly
        found[name] = float(before + step * between if between < 0.5 else after - step * (1 - between))
    return found


class Numbers(NamedTuple):
    """What the metrics of a batch say of one rollout."""

    reward: float
    length: int
    advantage: float | None
    age: int | None
    truncated: bool


def of_step(
    rollouts: list[Rollout], step: int, envs: "Sequence[TrainEnv]", size_of: Callable[[list[Rollout]], int]
) -> dict[str, float]:
    """Metrics of the rollouts of step `step`, as for `of_batch`; `size_of` says how much of a batch rollouts are."""
    names, filters = [env.name for env in envs], {env.name: env.filters for env in envs}
    return of_batch(rollouts, step) | of_filters(rollouts, filters) | of_mix(rollouts, names, size_of)


def of_part(part: list[Numbers]) -> dict[tuple[str, str], float]:
    """Metrics of rollouts by the beginning and the end of their keys, between which the env's name stands."""
    spread: dict[str, list[float | None]] = {
        "reward": [each.reward for each in part],
        "length": [each.length for each in part],
        "advantage": [each.advantage for each in part],
        "off_policy": [each.age for each in part],
    }
    line = {(begin, f"/{name}"): value for begin, values in spread.items() for name, value in quantiles(values).items()}
    line["reward", "/mean"] = mean(each.reward for each in part)
    line["length", "/mean"] = mean(each.length for each in part)
    line["truncated", ""] = mean(each.truncated for each in part)
    return line


def of_batch(rollouts: list[Rollout], step: int) -> dict[str, float]:
    """Metrics of the rollouts of step `step`: those of its groups, and those that filters dropped before the batch.

    Failed rollouts are left out. Filtered ones count in all numbers except those about the batch in which they had no
    place.
    """
    graded = [rollout for rollout in rollouts if not rollout.failed]
    in_batch = [rollout for rollout in graded if rollout.stage in IN_BATCH]
    parts, numbers = by_env(graded), list[Numbers]()
    line: dict[str, float] = {}
    for env, part in parts.items():
        own = [
            Numbers(r.reward, r.num_completion_tokens, r.mean_advantage, age_of(r, step), r.is_truncated) for r in part
        ]
        numbers += own
        found = of_part(own)
        line |= {f"{begin}/{env}{end}": value for (begin, end), value in found.items()}
        for key in {key: None for rollout in part for key in rollout.metrics}:  # not every rollout has every metric
            values = [rollout.metrics.get(key) or 0.0 for rollout in part]
            line[f"metric/{env}/{key}"] = mean(filter(math.isfinite, values))
    if len(parts) != 1:  # else all is what the only env is
        found = of_part(numbers)
    line |= {f"{begin}/all{end}": value for (begin, end), value in found.items()}
    staleness = [each.age for each in numbers if each.age is not None]
    return (
        line
        | of_tokens(in_batch, step)
        | {
            "off_policy/mean": mean(staleness),
            "off_policy/max": float(max(staleness, default=0)),
            "rollouts/batch": float(len(in_batch)),
            "rollouts/trained": float(count(rollouts, Stage.TRAINED)),
            "rollouts/filtered": float(count(rollouts, Stage.PRE_FILTERED) + count(rollouts, Stage.POST_FILTERED)),
            "time/scoring": mean(rollout.scoring_s for rollout in graded),
        }
    )


def of_mix(rollouts: Iterable[Rollout], names: list[str], size_of: Callable[[list[Rollout]], int]) -> dict[str, float]:
    """The share of each env, 0 too, in what has had a place in a batch, as the size of a batch counts (`size_of`)."""
    parts = by_env(rollout for rollout in rollouts if rollout.stage in IN_BATCH)
    sizes = {name: size_of(parts.get(name, [])) for name in names}
    return {f"batch/{name}/share": size / max(1, sum(sizes.values())) for name, size in sizes.items()}


def of_tokens(rollouts: list[Rollout], step: int) -> dict[str, float]:
    """Ages of the tokens that the live policy sampled in a batch, from the start of their model call.

    That is the age at most: a token of a call that lived through an update may be of a newer version.
    """
    calls = [call for rollout in rollouts for sample in rollout.samples for call in sample.versions]
    tokens = sum(call.stop - call.first for call in calls)
    summed = sum((call.stop - call.first) * (step - 1 - call.start) for call in calls)
    spanning = sum(call.stop - call.first for call in calls if call.start != call.end)
    return {
        "off_policy/token_mean": summed / max(1, tokens),
        "off_policy/token_max": float(max((step - 1 - call.start for call in calls), default=0)),
        "off_policy/token_updated": spanning / max(1, tokens),
    }


def age_of(rollout: Rollout, step: int) -> int | None:
    """Policy updates between the start of a rollout in the batch of `step` and that step; None of a frozen model.

    None as well for one that had no place in the batch.
    """
    if rollout.start_version is None or rollout.stage not in IN_BATCH:
        return None
    return step - 1 - rollout.start_version


def of_filters(rollouts: list[Rollout], filters: Mapping[str, Filters]) -> dict[str, float]:
    """For each slot, the shares of the rollouts it was asked about that it dropped and that its filters matched.

    `pre_filters/...` are shares of all rollouts that neither failed nor were empty, `filters/...` of those that the
    batch was cut from. `is_filtered` is the share dropped, `is_matched` the share that any filter of the slot matched,
    monitoring ones included.

    Args:
        rollouts: Those of the step, as for `of_batch`.
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


def joined(shipped: dict[str, float], trained: dict[str, float], wall_s: float, busy_s: float) -> dict[str, float]:
    """The line of a step: the orchestrator's metrics of its batch, the trainer's, and rates over `wall_s` seconds.

    The engine was at work for `busy_s` of these.
    """
    line = shipped | trained | {"time/step": wall_s, "idle/engine": max(0.0, 1.0 - busy_s / wall_s)}
    if not line["off_policy/max"] and line.get("logprob_gap/mean", 0.0) > LARGE_GAP:
        log.warning(
            "step %d is on-policy, yet sampler and trainer differ by %.3g per token: the engine does not run the "
            "trainer's weights",
            line["step"],
            line["logprob_gap/mean"],
        )
    return line | {f"tokens/{kind}_per_second": line[f"tokens/{kind}"] / wall_s for kind in ("generated", "trained")}


def by_env(rollouts: Iterable[Rollout]) -> dict[str, list[Rollout]]:
    """The rollouts of each env."""
    parts: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        parts.setdefault(rollout.env_name, []).append(rollout)
    return parts


def count(rollouts: Iterable[Rollout], stage: Stage) -> int:
    """How many rollouts left at `stage`."""
    return sum(rollout.stage is stage for rollout in rollouts)


def why_untrained(rollouts: Iterable[Rollout]) -> str:
    """The three most frequent reasons for which rollouts did not train, each with its count."""
    reasons = Counter(
        rollout.outcome.reason
        for rollout in rollouts
        if rollout.outcome is not None and rollout.stage is not Stage.TRAINED
    )
    return ", ".join(f"{reason}: {count}" for reason, count in reasons.most_common(3))
