"""What a batch says about itself: flat keys for `metrics.jsonl`."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable

from prl.orchestrator.filters import Filters
from prl.rollouts.rollout import Rollout


def mean(values: Iterable[float]) -> float:
    """0.0 where there are none. Rounded once, at the end: thresholds are compared with it, and equal values are their mean."""
    values = list(map(float, values))
    return statistics.mean(values) if values else 0.0


def of_batch(rollouts: list[Rollout], kept: list[Rollout], step: int) -> dict[str, float]:
    """Metrics of the rollouts of step `step`; `kept` are those that train. Errored rollouts count only as errors.

    What a filter dropped counts like any other, except where a number is about the batch in which it has no place.
    """
    fine = [rollout for rollout in rollouts if rollout.error is None]
    line: dict[str, float] = {}
    for name, part in {"all": fine, **by_env(fine)}.items():
        line[f"reward/{name}/mean"] = mean(rollout.reward for rollout in part)
        line[f"length/{name}/mean"] = mean(rollout.num_completion_tokens for rollout in part)
        line[f"truncated/{name}"] = mean(rollout.is_truncated for rollout in part)
    for env, part in by_env(fine).items():
        for key in {key: None for rollout in part for key in rollout.metrics}:  # a grader may record one now and then
            values = [rollout.metrics.get(key) or 0.0 for rollout in part]
            line[f"metric/{env}/{key}"] = mean(filter(math.isfinite, values))
    staleness = [step - 1 - rollout.start_version for rollout in fine if rollout.live and rollout.in_batch]
    line |= {
        "off_policy/mean": mean(staleness),
        "off_policy/max": float(max(staleness, default=0)),
        "rollouts/batch": float(sum(rollout.in_batch for rollout in fine)),
        "rollouts/trained": float(len(kept)),
        "rollouts/filtered": float(sum(rollout.dropped for rollout in fine)),
        "time/scoring": mean(rollout.scoring_s for rollout in fine),
    }
    return line


def of_filters(rollouts: list[Rollout], filters: Filters) -> dict[str, float]:
    """The shares of rollouts that each filter matched first, enforced or not; `is_filtered` is their sum.

    `pre_filters/…` are shares of all rollouts that did not fail, `filters/…` of those of them that the batch was cut
    from: what an enforced `pre_batch` filter dropped is no longer among these.
    """
    fine = [rollout for rollout in rollouts if rollout.error is None]
    left = [rollout for rollout in fine if rollout.in_batch]
    line: dict[str, float] = {}
    for prefix, slot, asked in (("pre_filters", filters.pre_batch, fine), ("filters", filters.post_batch, left)):
        for name, part in {"all": asked, **by_env(asked)}.items():
            found = [getattr(rollout, slot.record) for rollout in part]
            line[f"{prefix}/{name}/is_filtered"] = mean(match is not None for match in found)
            line |= {f"{prefix}/{name}/{key}": mean(match == key for match in found) for key in slot.filters}
    return line


def by_env(rollouts: list[Rollout]) -> dict[str, list[Rollout]]:
    parts: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        parts.setdefault(rollout.env_name, []).append(rollout)
    return parts


def trains(rollout: Rollout, seq_len: int) -> bool:
    """Whether one of its samples has a member token of any loss component, of the `seq_len` tokens that are shipped."""
    for sample in rollout.samples:
        rl = sample.rl_weights or [1.0] * len(sample.mask)
        if any(m and w != 0 for m, w in zip(sample.mask[:seq_len], rl[:seq_len], strict=True)):
            return True
        if any(any(weights[:seq_len]) for weights in (sample.ce_weights, sample.ref_kl_weights) if weights):
            return True
    return False


def why_empty(rollouts: list[Rollout]) -> str:
    """Why nothing of these rollouts trains, most frequent reason first."""
    reasons = Counter(rollout.not_trained_because for rollout in rollouts)
    return ", ".join(f"{reason}: {count}" for reason, count in reasons.most_common(3))
