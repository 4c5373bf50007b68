"""Compare the advantages that the loss had, in the token export, with those worked out from the recorded rewards.

    python experiments/custom_credit/check.py <sweep>

Exits with 1 where a token differs. What the loss had is float32, so the tolerance is 1e-6.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path


def lines(folder: Path, pattern: str):
    """The lines of the JSON files of a run."""
    for path in sorted(folder.glob(pattern)):
        yield from map(json.loads, path.read_text().splitlines())


def check(run: Path) -> tuple[int, int, int]:
    """Sequences, sampled tokens, and how many of all tokens differ from the pattern."""
    rewards: dict[int, dict[int, float]] = defaultdict(dict)
    for record in lines(run, "rollouts/*.jsonl"):
        if (record.get("outcome") or {}).get("stage") == "trained":
            rewards[record["group"]][record["rollout"]] = record["reward"]
    sequences = sampled = wrong = 0
    for line in lines(run, "tokens/*/*.jsonl"):
        group = rewards[line["group"]]
        a = group[line["rollout"]] - sum(group.values()) / len(group)
        place = 0
        for on, advantage in zip(line["mask"], line["advantages"], strict=True):
            expected = (a if place % 2 == 0 else a / 2) if on else 0.0
            place += on
            wrong += abs(advantage - expected) > 1e-6
        sequences, sampled = sequences + 1, sampled + place
    return sequences, sampled, wrong


if __name__ == "__main__":
    failed = False
    for run in sorted(path.parent for path in Path(sys.argv[1]).glob("*/result.json")):
        sequences, sampled, wrong = check(run)
        failed |= wrong > 0 or sequences == 0
        print(f"{run.name}: {sequences} sequences, {sampled} sampled tokens, {wrong} tokens with another advantage")
    raise SystemExit(failed)
