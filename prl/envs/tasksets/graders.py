"""prl's own graders: functions of a reply and its task's answer.

exact        1.0 if reply and answer are the same text but for case, runs of whitespace, a last full stop and the
             way that Unicode composes letters (é is one character or two); else 0.0
numeric      1.0 if the number that the reply gives is the answer's (`prl.envs.tasksets.numbers`); else 0.0
math_verify  1.0 if the library math-verify finds them equal as mathematics, the answer read as LaTeX; else 0.0
"""

import functools
import logging
import re
import threading
import unicodedata
from collections.abc import Callable
from typing import Any

from prl.envs.tasksets.numbers import final_number

QUICK = ("exact", "numeric")
"""Graders that need no process of their own: math_verify may compute for seconds."""
MATH_SECONDS = 5
"""What takes math-verify longer, to read or to compare, is not equal: 9^{9^9}."""

logging.getLogger("math_verify").setLevel(logging.ERROR)  # warns that it has no time limit: a rollout has its own


def normalised(text: str) -> str:
    """Return `text` as the grader `exact` compares it."""
    folded = unicodedata.normalize("NFD", unicodedata.normalize("NFD", text).casefold())
    return " ".join(folded.split()).removesuffix(".").rstrip()


def exact(reply: str, answer: str) -> float:
    """Return 1.0 if reply and answer are the same once normalised, else 0.0."""
    return float(normalised(reply) == normalised(answer))


def numeric(reply: str, answer: str) -> float:
    """Return 1.0 if `reply` gives the number that `answer` gives, else 0.0."""
    number = final_number(reply)
    return float(number is not None and number == final_number(answer, alone=True))


def math_verify(reply: str, answer: str) -> float:
    """Return 1.0 if math-verify finds `reply` equal to `answer`, else 0.0."""
    from math_verify import parse, verify  # imports sympy

    # Its time limit is a signal, which only a process's first thread gets: in others the rollout's deadline is left.
    limit = MATH_SECONDS if threading.current_thread() is threading.main_thread() else None
    return float(verify(expressions(answer), parse(reply, parsing_timeout=limit), timeout_seconds=limit))


@functools.lru_cache(maxsize=1 << 16)
def expressions(answer: str) -> list[Any]:
    """Return what math-verify reads in an answer; empty if it can read nothing. Loading has a deadline of its own."""
    from math_verify import parse

    marked = re.search(r"\$|\\boxed|\\\(|\\\[", answer)
    return parse(answer if marked else f"${answer}$", fallback_mode="no_fallback", parsing_timeout=None)


GRADERS: dict[str, Callable[[str, str], float]] = {"exact": exact, "numeric": numeric, "math_verify": math_verify}


def fault_of(answer: str, grader: object) -> str | None:
    """Return why no reply, or an empty one, would be right for `answer`; None if the answer can be graded."""
    if not normalised(answer):
        return "must not be empty, or a full stop alone"
    if grader == "numeric" and final_number(answer, alone=True) is None:
        return "must be a single number, which grader=numeric needs"
    if grader == "math_verify" and not expressions(answer):
        return "must be mathematics that grader=math_verify can read"
    return None
