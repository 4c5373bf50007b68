"""What a good player of prl's envs says, and how it slips.

A demonstrator answers `heard`, all that the user or a tool has said so far, after its own replies `said`: with the best
reply if `right` is 1.0, else with that or with one that slips. The second value says whether the reply is to be learnt.
Some are not: they only lead to where the best player never gets by itself, and others do.
"""

import json
import random
import string
from collections.abc import Callable

from prl.envs.tasksets import kuhn_poker
from prl.envs.tasksets.calculator import compute

Reply = tuple[str, bool]
Demonstrator = Callable[[list[str], list[str], float, random.Random], Reply]

DETOUR = 0.25
"""Chance that a reply of the best player is one of a weaker player's, not to be learnt."""
MALFORMED = 0.2
"""Share of the slips in calling a tool that leave a call which cannot be read."""

REMEMBERED = 0.2
"""Share of the slips in guessing that still heed all that was said; the others are any number of the range."""


def other_digit(text: str, rng: random.Random) -> str:
    """`text` with one digit replaced; never by a zero, which would be no number in front of others."""
    place = rng.choice([index for index, char in enumerate(text) if char.isdigit()])
    return text[:place] + rng.choice([digit for digit in "123456789" if digit != text[place]]) + text[place + 1 :]


def calculator(heard: list[str], said: list[str], right: float, rng: random.Random) -> Reply:
    """Call, then repeat what the tool answered. Slips: an answer out of thin air, and digits copied wrongly."""
    problem = heard[0]
    if len(heard) > 1 and not heard[-1].startswith("error"):
        value = heard[-1]
        return (value if rng.random() < right else other_digit(value, rng)), True
    slip = rng.random() >= right
    if slip and rng.random() >= MALFORMED:
        return str(rng.randint(-99, 9999)), True
    expression = problem.removesuffix("=")
    if rng.random() >= right:
        expression = other_digit(expression, rng)
    call = json.dumps({"name": "calculate", "arguments": {"expression": expression}})
    return f"<tool_call>\n{call[:-1] if slip else call}\n</tool_call>", True


def guess(heard: list[str], said: list[str], right: float, rng: random.Random) -> Reply:
    """The middle of what is left. Slips: another number that is left, or any number of the range."""
    size = int(heard[0].split("-")[1])
    low, high = 1, size
    for number, hint in zip(map(int, said), heard[1:], strict=True):
        low, high = (max(low, number + 1), high) if hint == "higher" else (low, min(high, number - 1))
    if low > high:  # said by a player who forgot a hint: nothing to learn from
        return str(rng.randint(1, size)), False
    if right == 1.0 and rng.random() < DETOUR:
        return str(rng.randint(low, high)), False
    if rng.random() < right:
        return str((low + high) // 2), True
    return str(rng.randint(low, high) if rng.random() < REMEMBERED else rng.randint(1, size)), True


def poker(heard: list[str], said: list[str], right: float, rng: random.Random) -> Reply:
    """Kuhn's equilibrium. Slips: any legal action."""
    first = "They" not in heard[0]
    legal = kuhn_poker.ANSWER if "call" in heard[-1] else kuhn_poker.OPEN
    if right == 1.0 and len(heard) == 1 and rng.random() < DETOUR:
        return rng.choice(legal), False
    if rng.random() >= right:
        return rng.choice(legal), True
    act = kuhn_poker.equilibrium(heard[0][0], first, rng)("", legal)
    try:
        act.send(None)
    except StopIteration as done:  # it awaits nothing
        return done.value, True


def sort(heard: list[str], said: list[str], right: float, rng: random.Random) -> Reply:
    """All words so far, sorted. Slips: two neighbours swapped, a word left out, a letter replaced."""
    words = sorted(word for message in heard for word in message.split()[1:])
    detour = right == 1.0 and len(heard) == 1 and rng.random() < DETOUR
    if detour or rng.random() >= right:
        place, slip = rng.randrange(len(words) - 1), rng.choice(("swap", "drop", "letter"))
        if slip == "swap":
            words[place : place + 2] = reversed(words[place : place + 2])
        elif slip == "drop":
            del words[rng.randrange(len(words))]
        else:
            letters = list(words[place])
            letters[rng.randrange(len(letters))] = rng.choice(string.ascii_lowercase)
            words[place] = "".join(letters)
    return " ".join(words), not detour


def chain_sum(heard: list[str], said: list[str], right: float, rng: random.Random) -> Reply:
    """The sum. Slips: off by one or two."""
    answer = compute(heard[0].rpartition(":")[2].removesuffix("="))
    return str(answer if rng.random() < right else answer + rng.choice((-2, -1, 1, 2))), True


DEMONSTRATORS: dict[str, Demonstrator] = {
    "calculator": calculator,
    "guess": guess,
    "alphabet_sort": sort,
    "kuhn_poker": poker,
    "reasoning_gym": chain_sum,
}
