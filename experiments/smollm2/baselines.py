"""What the held-out rewards of SmolLM2 are to be compared with.

    python experiments/smollm2/baselines.py

The rewards of players of `guess` that learn nothing, exactly, on the pairs that smollm2_guess holds out and on all, and
of players of `adder` on 300 problems that are held out. And the widest interval that each mean can have over tasks:
rewards are from 0 to 1, so a mean m of n tasks has a variance of at most m (1 - m) n / (n - 1). All seeds hold out the
same tasks.
"""

from collections import Counter
from functools import cache
from itertools import product
from math import sqrt
from statistics import mean

from scipy.special import stdtrit

from experiments.smollm2.adder import AdderConfig, AdderTaskset
from prl.envs.tasksets.guess import GuessConfig, GuessTaskset

LEVEL = 0.95
MEANS = {"sums, sft": (0.525, 128), "sums, grpo": (0.352, 128), "game, grpo": (0.778, 15), "game, opd": (0.750, 15)}
"""Held-out reward of the page, and the number of its tasks."""


@cache
def within_bounds(secret: int, low: int, high: int, guesses: int) -> float:
    """Return the chance of a player that guesses at random among the numbers that the answers leave."""
    if not guesses:
        return 0.0
    chances = [
        1.0 if guess == secret
        else within_bounds(secret, guess + 1, high, guesses - 1) if guess < secret
        else within_bounds(secret, low, guess - 1, guesses - 1)
        for guess in range(low, high + 1)
    ]  # fmt: skip
    return mean(chances)


def never_listens(n: int, guesses: int) -> float:
    """Return the chance of a player that guesses at random and repeats nothing."""
    return min(guesses / n, 1.0)


def never_listens_to_products() -> float:
    """Return the chance of a player of `adder` that asks rightly and then draws a product as the problems have them."""
    factors = range(11, 100)
    counts = Counter(left * right for left, right in product(factors, factors))
    return sum(count**2 for count in counts.values()) / counts.total() ** 2


def demonstrated(products: list[int], heeds: float) -> float:
    """Return the mean reward of the demonstrations of `adder`: digits drawn at random may be right."""
    return heeds + (1 - heeds) * mean(1 / (9 * 10 ** (len(str(value)) - 1)) for value in products)


def widest_half(reward: float, tasks: int) -> float:
    """Return half the widest interval over tasks that a mean reward can have: Student's t, 95 %."""
    return stdtrit(tasks - 1, (1 + LEVEL) / 2) * sqrt(reward * (1 - reward) / (tasks - 1))


def report(name: str, pairs: list[tuple[int, int]]) -> None:
    """Print the rewards of both players over pairs of range and secret."""
    guesses = {n: n.bit_length() + 1 for n, _ in pairs}
    without_listening = mean(never_listens(n, guesses[n]) for n, _ in pairs)
    at_random = mean(within_bounds(secret, 1, n, guesses[n]) for n, secret in pairs)
    print(
        f"{name}: {len(pairs)} pairs; never listens, repeats nothing {without_listening:.3f}; at random {at_random:.3f}"
    )


def main() -> None:
    report("all", [(n, secret) for n in range(8, 21) for secret in range(1, n + 1)])
    config = GuessConfig(split="eval", seed=0, max_size=20, slack=1)
    report(
        "held out", [(int(task.data.prompt.split("-")[1]), task.data.secret) for task in GuessTaskset(config).load()]
    )
    held_out = AdderTaskset(AdderConfig(split="eval", seed=0, num_tasks=300)).load()
    questions = [task.data.demonstration[0]["content"].split("*") for task in held_out]
    products = [int(left) * int(right) for left, right in questions]
    print(f"adder: {len(products)} problems; never listens {never_listens_to_products():.4f}; demonstrations "
          f"{demonstrated(products, AdderConfig().heeds):.3f}")  # fmt: skip
    for label, (reward, tasks) in MEANS.items():
        print(f"{label}: {reward:.3f} on {tasks} tasks, over tasks at most ± {widest_half(reward, tasks):.3f}")


if __name__ == "__main__":
    main()
