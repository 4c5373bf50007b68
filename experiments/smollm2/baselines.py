"""What the held-out rewards of SmolLM2 are to be compared with: players that learn nothing, on the 300 held-out tasks.

    python experiments/smollm2/baselines.py

A player of sums gives one answer to all of them, the best there is. A player of `adder` asks rightly, and then draws a
product as often as the problems have it.
"""

from collections import Counter
from itertools import product
from statistics import mean

from experiments.smollm2.adder import AdderConfig, AdderTaskset
from prl.envs.tasksets.integer import grade
from prl.envs.tasksets.math import MathConfig, MathTaskset

TASKS = 300


def best_constant(answers: list[int]) -> tuple[int, float]:
    """Return the answer that earns most if it is given to every sum, and what it earns."""
    earned = {reply: mean(grade(str(reply), answer) for answer in answers) for reply in sorted(set(answers))}
    return max(earned.items(), key=lambda item: item[1])


def never_listens_to_products() -> float:
    """Return the chance of a player of `adder` that asks rightly and then draws a product as the problems have them."""
    factors = range(11, 100)
    counts = Counter(left * right for left, right in product(factors, factors))
    return sum(count**2 for count in counts.values()) / counts.total() ** 2


def demonstrated(products: list[int], heeds: float) -> float:
    """Return the mean reward of the demonstrations of `adder`: digits drawn at random may be right."""
    return heeds + (1 - heeds) * mean(1 / (9 * 10 ** (len(str(value)) - 1)) for value in products)


def main() -> None:
    sums = MathTaskset(MathConfig(split="eval", seed=0, num_tasks=TASKS)).load()
    reply, earned = best_constant([task.data.answer for task in sums])
    print(f"sums: always {reply} {earned:.3f}")
    held_out = AdderTaskset(AdderConfig(split="eval", seed=0, num_tasks=TASKS)).load()
    questions = [task.data.demonstration[0]["content"].split("*") for task in held_out]
    products = [int(left) * int(right) for left, right in questions]
    print(f"adder: never listens {never_listens_to_products():.4f}; demonstrations "
          f"{demonstrated(products, AdderConfig().heeds):.3f}")  # fmt: skip


if __name__ == "__main__":
    main()
