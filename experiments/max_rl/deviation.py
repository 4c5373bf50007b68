"""pass@k of max_rl, of grpo and of grpo that divides by the deviation, by seed.

    python experiments/max_rl/deviation.py outputs/exp-max-rl-eval

Reads what `prl eval` has written of the base and of each run, and the config beside each run. The values go to
`deviation.csv` beside this file.
"""

import csv
import json
import sys
from pathlib import Path

from omegaconf import OmegaConf

KS = ("1", "4", "16", "64")


def rows(evaluation: Path) -> list[list[str | float]]:
    """Return variant, seed, and pass@k for each of `KS`, of each target."""
    found = []
    for target in json.loads((evaluation / "result.json").read_text())["targets"]:
        config = OmegaConf.load(Path(target["path"]).parents[1] / "config.yaml")
        algorithm = config.algo._target_.rpartition(".")[2].removesuffix("Algorithm")
        variant = {"SFTDistill": "base", "MaxRL": "max_rl", "GRPO": "grpo"}[algorithm]
        if config.algo.get("normalize"):
            variant += ", divided"
        [scores] = target["envs"]
        found.append([variant, config.seed, *(scores["pass@k"][k]["mean"] for k in KS)])
    return found


if __name__ == "__main__":
    with Path(__file__).with_name("deviation.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["variant", "seed", *KS])
        writer.writerows(rows(Path(sys.argv[1])))
