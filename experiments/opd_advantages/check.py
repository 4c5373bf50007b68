"""Compare opd with an advantage and without: what was shipped, and what it did.

    python experiments/opd_advantages/check.py <sweep>

Exits with 1 where advantages did not arrive, or a first step (the same weights, the same replies) has another loss or
gradient. Later steps are shown: a last digit that differs may change a reply.
"""

import json
import math
import sys
from pathlib import Path

COMPARED = ("loss/ref_kl", "grad_norm", "reward/all/mean")


def steps(run: Path) -> list[dict]:
    """The metrics of each step."""
    return [line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "grad_norm" in line]


def advantages(run: Path) -> int:
    """Tokens of the run with an advantage other than 0."""
    exports = (json.loads(line) for path in run.glob("tokens/*/*.jsonl") for line in path.read_text().splitlines())
    return sum(value != 0 for line in exports for value in line["advantages"] or ())


def same(one: dict, other: dict) -> bool:
    """Whether two steps agree to the float tolerance of a sum in another order."""
    return all(math.isclose(one[name], other[name], rel_tol=1e-4, abs_tol=1e-6) for name in COMPARED)


if __name__ == "__main__":
    failed, sweep = False, Path(sys.argv[1])
    for without in sorted(sweep.glob("*scale=0*")):
        with_advantages = sweep / without.name.replace("scale=0", "scale=1")
        one, other = steps(without), steps(with_advantages)
        shipped = advantages(without), advantages(with_advantages)
        agree = [same(*pair) for pair in zip(one, other, strict=True)]
        failed |= shipped[0] > 0 or shipped[1] == 0 or not agree[0]
        print(f"{without.name}: tokens with an advantage {shipped[0]} and {shipped[1]}; ", end="")
        print(f"the same loss, gradient and reward in {sum(agree)} of {len(agree)} steps")
        for name in COMPARED:
            print(f"  step 1, {name}: {one[0][name]:.8g} without, {other[0][name]:.8g} with")
    raise SystemExit(failed)
