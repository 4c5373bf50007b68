"""The expected gradient of a group, as a share of the gradient of the log-likelihood of success, exactly.

    python experiments/max_rl/gradient.py

The table goes to `gradient.md` beside this file.

For a task with rewards 0 and 1 and success probability p. Given its reward, the expected score (the gradient of the
log-probability) of a rollout is grad(p) / p after a success and -grad(p) / (1 - p) after a failure. So the expected
gradient is a multiple of grad(p): a sum over the number of successes in the group. That of log p is grad(p) / p.
"""

from collections.abc import Callable, Sequence
from math import comb
from pathlib import Path

from prl.algorithms.advantage import centred, mean_normalized
from prl.tools.report.tables import Table, markdown

Advantages = Callable[[Sequence[float]], Sequence[float]]


def share_of_log_likelihood(advantages: Advantages, p: float, group_size: int) -> float:
    """Return the expected mean over a group of advantage times score, divided by the gradient of log p."""
    total = 0.0
    for successes in range(1, group_size):  # where all or none succeed, the advantages are zero
        failures = group_size - successes
        chance = comb(group_size, successes) * p**successes * (1 - p) ** failures
        given = advantages([1.0] * successes + [0.0] * failures)
        total += chance * (successes * given[0] / p - failures * given[-1] / (1 - p)) / group_size
    return total * p


def main() -> None:
    sizes = (4, 16, 64, 256)
    rows = []
    for p in (0.01, 0.05, 0.2, 0.5):
        shares = [share_of_log_likelihood(mean_normalized, p, size) for size in sizes]
        shares.append(share_of_log_likelihood(centred, p, sizes[-1]))
        rows.append([f"{p:g}", *(f"{share:.3f}" for share in shares)])
    head = ["p", *(f"max_rl, {size}" for size in sizes), f"grpo, {sizes[-1]}"]
    text = markdown(Table(title="Share of the gradient of log p", head=head, rows=rows))
    print(text)
    Path(__file__).with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
