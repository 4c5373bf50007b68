"""The number that a text gives as its answer, as an exact fraction.

It is the number in the last `\\boxed{}`, or the first one after the last `####`, whichever comes later; without either,
the last number in the text. A number may have

    a sign               -5, and all of Unicode's dashes
    thousands            10,000  10 000  10'000, with Unicode's spaces and LaTeX's (`10,\\!000`, `10\\,000`, `10{,}000`)
    an exponent          1.5e3  1.5 x 10^3  1.5 \\times 10^{3}
    a denominator        1/2  -3/4  \\frac{1}{2}  1 1/2  ½
    currency and units   $5  5 km  5%  5 cm^2: ignored, so that 50% is 50

Times (17:30), dates, versions (1.2.3) and powers (2^10) are no numbers, nor are their parts.
"""

import re
import unicodedata
from decimal import Decimal
from fractions import Fraction

MARK = re.compile(r"####|\\f?boxed\s*\{([^{}]*)")
SLASH = "\u2044"  # of fractions in one character
CHARACTERS = {
    **dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2014\u2212\ufe63\uff0d"), "-"),
    **dict.fromkeys(map(ord, "\u00a0\u2007\u2008\u2009\u200a\u202f~"), " "),
    **dict.fromkeys(map(ord, "\u00d7\u00b7\u22c5"), "*"),
    **{ord(c): f"\\frac{{{unicodedata.normalize('NFKC', c).replace(SLASH, '}{')}}}" for c in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"},
}
SUPERSCRIPTS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+")
POWER = r"\s*\^\s*(?:\{\s*([-+]?[0-9]+)\s*\}|([-+]?[0-9]+))"
FRACTION, TERM = r"\\[dtc]?frac", r"\s*(?:\{\s*+([-\w.,][-\w., ]*)\}|([0-9]))"
SPELLINGS = {
    r"\\(?:[!()\[\]]|left|right)|\{(?=,\})|(?<=\{,)\}": "",  # {,} is LaTeX's comma between digits
    r"\\(?:[,;: ]|q?quad)": " ",
    r"\\([$%])": r"\1",
    r"\\(?:times|cdot)": "*",
    r"\\(?:text\w*|mathrm|mathbf|mbox)\s*\{([^{}]*)\}": r" \1",
    r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree": "°",
    r"(?<![A-Za-z])([ckdm]?m|s|ft|in|yd|mi|[A-Za-z]{3,})" + POWER: r"\1",  # a unit's
    r"(?<=[0-9])\s*[*x]\s*10" + POWER: r"e\1\2",
    r"(?<![\w.,^])10" + POWER: r"1e\1\2",
    r"(?<=[0-9])\s*" + FRACTION: r" \\frac",  # 2\frac{1}{2} is a mixed number
    FRACTION + TERM + TERM: r"\1\2/\3\4",
    r"(^|[={(#])\s*-\s+(?=[0-9.$])": r"\1-",  # x = - 5
}
"""What is written in several ways, and one of them."""
# A point after a letter, digit or bracket ends a sentence or is one of several; it does not start a number.
UNSIGNED = (
    r"(?:(?:[0-9]{1,3}(?:[, '\u2019][0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![\w).])\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
)
# A minus after a letter, digit or bracket is a subtraction: 10-5.
NUMBER = re.compile(
    r"[_^]\{?\s*[-+]?[0-9.]+"  # an index, or the exponent of something else: passed over
    r"|(?P<part>(?<=[0-9][.:/])|(?<=√)|(?<=sqrt\{))?(?P<sign>(?<![\w).}\]%])[-+])?(?:[$€£¥]\s?)?"
    rf"(?:(?P<whole>[0-9]+) (?=[0-9]+/[0-9]))?(?P<number>{UNSIGNED})(?: ?/ ?(?P<below>-?{UNSIGNED}))?"
    r"(?P<goes_on>(?=\s*\^|[.:/][0-9]))?"
)
# What may stand around an answer's number: words and units, but no other number, bracket or sign of mathematics.
AROUND = re.compile(r"(?:[^\W\dπ]|[\s$€£¥%°'\"\u2019,.;:=≈/&*`])*")
MOST_DIGITS, MOST_EXPONENT_DIGITS = 1000, 3


def final_number(text: str, *, alone: bool = False) -> Fraction | None:
    """Return the number that `text` gives as its answer; None if it gives none.

    With `alone`, also None if more than words and units stand around it: `(2, 7)`, `2x + 1`, `3 or 4`. A `\\boxed{}` is
    always read in this way, behind its last `=`.
    """
    text = plain(text)
    marks = list(MARK.finditer(text))
    tail = text[marks[-1].end() :] if marks else text
    if marks and marks[-1][1] is not None:
        alone, tail = True, marks[-1][1].rpartition("=")[2]
    numbers = [match for match in NUMBER.finditer(tail) if match["number"]]
    if not numbers or (alone and len(numbers) > 1):
        return None
    number = numbers[0 if marks else -1]
    around = (tail[: number.start()], tail[number.end() :])
    if alone and (around[0].endswith("-") or not all(map(AROUND.fullmatch, around))):
        return None
    return value_of(number)


def in_decimal(number: Fraction) -> str:
    """Return a number as text: in decimal where that has an end, else as a fraction."""
    text = format(Decimal(number.numerator) / number.denominator, "f")
    return text if Fraction(text) == number else str(number)


def plain(text: str) -> str:
    """Return `text` with one spelling for each sign, blank, power of ten and fraction."""
    text = SUPERSCRIPTS.sub(lambda match: "^" + unicodedata.normalize("NFKC", match[0]), text)
    text = text.translate(CHARACTERS)
    for pattern, spelling in SPELLINGS.items():
        text = re.sub(pattern, spelling, text)
    return text


def value_of(match: re.Match[str]) -> Fraction | None:
    """Return the exact value of a number; None if it is part of something else or has no value."""
    number = exact_value(match["number"])
    below = exact_value(match["below"] or "1")
    if match["part"] is not None or match["goes_on"] is not None or number is None or not below:
        return None
    value = number / below
    if match["whole"]:
        whole = exact_value(match["whole"])
        if whole is None or not 0 < value < 1:
            return None
        value += whole
    return -value if match["sign"] == "-" else value


def exact_value(digits: str) -> Fraction | None:
    """Return the value of an unsigned number or of `-5`; None for one that takes too long to compute with."""
    mantissa, _, exponent = re.sub("[, '\u2019]", "", digits.lower()).partition("e")
    if len(mantissa) > MOST_DIGITS or len(exponent.lstrip("+-0")) > MOST_EXPONENT_DIGITS:
        return None
    return Fraction(mantissa) * Fraction(10) ** int(exponent or 0)
