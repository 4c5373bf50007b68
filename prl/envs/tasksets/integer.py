"""Grade a reply that should spell an integer. Standard library only, so that other programs can grade as prl does."""

import re

# `int` alone would also accept other scripts' digits, underscores and "+"; the cap keeps a runaway reply cheap.
INTEGER = re.compile(r"-?[0-9]{1,40}")


def grade(reply: str, answer: int) -> float:
    """Return the reward of `reply` in [0, 1], by the formula of `prl.envs.tasksets.math`.

    Ignores whitespace around it, and leading zeros.
    """
    if not INTEGER.fullmatch(reply.strip()):
        return 0.0
    value = int(reply)
    if value == answer:
        return 1.0
    if (value < 0) != (answer < 0):
        return 0.0
    got, want = str(abs(value)), str(abs(answer))
    hits = sum(a == b for a, b in zip(reversed(got), reversed(want), strict=False))
    return 0.1 * hits / max(len(got), len(want))
