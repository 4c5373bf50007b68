"""prl's own graders: functions of a reply and its task's answer.

exact        1.0 if reply and answer are the same text but for case, runs of whitespace, a last full stop and the
             way that Unicode composes letters (é is one character or two); else 0.0
numeric      1.0 if the number that the reply gives is the answer's (`prl.envs.tasksets.numbers`); else 0.0
math_verify  1.0 if the library math-verify finds them equal as mathematics, the answer read as LaTeX; else 0.0.
             Decimals are equal to six digits after the point, and to six digits of their own below 0.1
"""

import contextlib
import functools
import logging
import re
import threading
import unicodedata
from collections.abc import Callable
from decimal import Decimal
from itertools import product
from typing import Any

from prl.envs.tasksets.numbers import final_number

QUICK = ("exact", "numeric")
"""Graders that need no process of their own: math_verify may compute for seconds."""
MATH_SECONDS = 5
"""Seconds after which math-verify, reading or comparing, has found two texts unequal: 9^{9^9}."""
MOST_READ = 20_000
"""[characters] The end of a reply, in which math-verify looks for the answer."""
DECIMALS, MOST_DECIMALS = 6, 10_000
"""Digits after the point that are compared: of most numbers, and of the smallest."""
LEAST_DIFFERENCE = 1e-6
"""Numbers that are further apart differ in the digits that are compared."""
BOXED_PERCENT = re.compile(r"(\\boxed\{[^{}%\\]{1,100}+)\\?%\s*+\}")
EXPONENT = re.compile(r"(?<![\w.])[0-9]{1,20}(?:\.[0-9]{1,20})?[eE][-+]?[0-9]{1,3}(?![\w^])")

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
    from math_verify.errors import TimeoutException
    from math_verify.utils import timeout

    # Its time limit is a signal, which only a process's first thread gets: in others the rollout's deadline is left.
    limit = MATH_SECONDS if threading.current_thread() is threading.main_thread() else None
    same = functools.partial(verify, timeout_seconds=limit)
    read = BOXED_PERCENT.sub(r"\1}", in_decimals(reply[-MOST_READ:]))  # in a box the library reads no percent
    for pair in product(expressions(answer), parse(read, parsing_timeout=limit)):
        if same(*pair):
            decimals = decimals_of(pair)
            # The library rounds to six decimals, at which all small numbers are 0.
            fine = decimals == DECIMALS or same(*pair, float_rounding=decimals, numeric_precision=decimals + 3)
            with contextlib.suppress(TimeoutException):
                if fine and not timeout(limit)(differ_exactly)(*pair):
                    return 1.0
    return 0.0


def differ_exactly(one: Any, other: Any) -> bool:
    """Return whether two numbers without decimals differ: 1 - 2^{-100} and 1 - 2^{-101}, alike to any rounding."""
    from sympy import Expr, Float

    exact_numbers = all(isinstance(each, Expr) and each.is_number and not each.has(Float) for each in (one, other))
    if not exact_numbers or one == other:
        return False
    difference = (one - other).doit()
    # 12% equals 12, as the library has it: only what rounding has made alike is looked at.
    return difference.is_zero is False and bool(abs(difference).evalf() < LEAST_DIFFERENCE)


@functools.lru_cache(maxsize=1 << 16)
def expressions(answer: str) -> list[Any]:
    """Return what math-verify reads in an answer; empty if it can read nothing. Loading has a deadline of its own."""
    from math_verify import parse

    marked = re.search(r"\$|\\boxed|\\\(|\\\[", answer)
    answer = in_decimals(answer)
    return parse(answer if marked else f"${answer}$", fallback_mode="no_fallback", parsing_timeout=None)


def in_decimals(text: str) -> str:
    """Return `text` with 1e-07 written out: math-verify takes the e of such a number for Euler's."""
    return EXPONENT.sub(lambda match: format(Decimal(match[0]), "f"), text)


def decimals_of(parsed: tuple[Any, ...]) -> int:
    """Return at how many decimals the smallest number in what math-verify parsed has six digits; at least six."""
    from sympy import floor, log, preorder_traversal

    most = DECIMALS
    for expression in parsed:
        nodes = preorder_traversal(expression)
        for node in nodes:
            if getattr(node, "is_number", False):
                nodes.skip()
                size = abs(node.evalf()).doit()
                if size.is_comparable and 0 < size < 1:
                    most = max(most, DECIMALS - 1 - int(floor(log(size, 10))))
    return min(most, MOST_DECIMALS)


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
