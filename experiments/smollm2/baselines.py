"""The rewards of players of `guess` that learn nothing, exactly, on the pairs that smollm2_guess holds out.

python experiments/smollm2/baselines.py
"""

from functools import cache
from statistics import mean

from prl.envs.tasksets.guess import GuessConfig, GuessTaskset


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


def report(name: str, pairs: list[tuple[int, int]]) -> None:
    """Print the rewards of both players over pairs of range and secret."""
    guesses = {n: n.bit_length() + 1 for n, _ in pairs}
    never_listens = mean(guesses[n] / n for n, _ in pairs)
    at_random = mean(within_bounds(secret, 1, n, guesses[n]) for n, secret in pairs)
    print(f"{name}: {len(pairs)} pairs; never listens, repeats nothing {never_listens:.3f}; at random {at_random:.3f}")


def main() -> None:
    report("all", [(n, secret) for n in range(8, 21) for secret in range(1, n + 1)])
    config = GuessConfig(split="eval", seed=0, max_size=20, slack=1)
    report(
        "held out", [(int(task.data.prompt.split("-")[1]), task.data.secret) for task in GuessTaskset(config).load()]
    )


if __name__ == "__main__":
    main()
