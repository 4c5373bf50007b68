"""prl's own graders, by hand: which spellings of a number, a text or a formula are the same."""

from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import pytest

from prl.envs.tasksets import graders
from prl.envs.tasksets.graders import exact, math_verify, numeric
from prl.envs.tasksets.numbers import final_number, in_decimal

SPELLINGS = {
    "1500": r"1.5e3 | 1.5E+3 | 15e02 | 1.5 * 10**3 | 1.5 \times 10^{3} | 1.5×10³ | 1.5 x 10^3 | 1,500.0 | $1,500"
    " dollars",
    "0.00001": r"1e-05 | 1e-5 | 10^{-5} | 10⁻⁵ | 0.000010 | .00001 | 1 \cdot 10^{-5}",
    "100000": "10^5 | 1e5 | 1e0005",
    "1/2": r"0.5 | .5 | 2/4 | 1 / 2 | \frac{1}{2} | \dfrac{1}{2} | \tfrac12 | \frac 1 2 | ½ | $\frac{1}{2}$ | 1⁄2 | 1∕2"
    r" | \nicefrac{1}{2} | \displaystyle\frac{1}{2}",
    "-3/4": r"-0.75 | -\frac{3}{4} | \frac{-3}{4} | −3/4 | -¾ | 3/-4",
    "5/2": r"2 1/2 | 2\frac{1}{2} | 2½ | 2.5",
    "3/2000": "1.5×10⁻³ | 1.5e-3",
    "1/3": r"\frac{1}{3} | 2/6",
    "-5": r"−5 | –5 | ‐5 | -5.0 | x = −5 | x = - 5 | -$5 | $-5 | -\$5 | - 5 | minus 5",
    "5": r"+5 | 5. | $5$ | \(5\) | \text{5} | **5** | 5\% | 5% | x = 5 | €5 | 5 °C | 5^\circ | 5 km/h | {5} | (5)"
    r" | \left(5\right) | \approx 5 | ５",
    "72": r"72 km | 72 cm^2 | 72 cm² | 72\text{ cm}^2 | 72 \mathrm{m}^{3} | USD 72 | 72\,\text{km}",
    "10000": r"10,000 | 10，000 | 10_000 | 10 000 | 10,\!000 | 10\,000 | 10{,}000 | 10'000 | 10’000"
    " | 10~000 | 10,000.00",
    "1234567.5": r"1,234,567.5 | 1 234 567.5 | 1\,234\,567.5 | 1{,}234{,}567.5",
}


def pairs_of(table):
    """`(reply, answer)` of each reply in a table by answer."""
    return [(reply, answer) for answer, replies in table.items() for reply in replies.split(" | ")]


BLANKS = [(f"10{blank}000", "10000") for blank in "\u00a0\u2007\u2008\u2009\u202f"]


@pytest.mark.parametrize(("one", "other"), [*pairs_of(SPELLINGS), *BLANKS])
def test_equal_numbers_are_equal_however_they_are_written(one, other):
    for answer, reply in ((one, other), (other, one)):
        assert numeric(reply, answer) == 1.0
        assert numeric(f"I add 3 and 4. \\boxed{{{reply}}} is it, of 9", answer) == 1.0
        assert numeric(f"I add 3 and 4.\n#### {reply}", answer) == 1.0


PIECES = {
    "1e-05": "5",
    "1/2": "2 | 1",
    "0.3333333333333333": "1/3",
    "0.1000000000000000000001": "0.1",
    "-5": "5",
    "8": "−8",
    "30": "it is 5:30",
    "2024": "1/2/2024",
    "2": r"\boxed{(2, 7)} | 3 5/2 | \frac{\sqrt3}{2} | log 2 | 2x | 2024-01-02 | H2O | a/2",
    "7": r"\boxed{(2, 7)}",
    "3": r"\boxed{\frac{\sqrt{3}}{2}} | 1.2.3 | 2\sqrt3 | 1.5×10−3"
    " | It takes 3 hours, so she arrives at 7:30. | From 3 bits we get 2^10.",
    "10": r"\boxed{2^{10}} | 2^10 | 2**10",
    "5": r"\boxed{5\sqrt{2}} | \boxed{5!} | So 5, \boxed{x}",
    "0": "1/0",
    "9": "1e999999999",
    "10000": "10,0000",
    "3/4": r"\frac{3\pi}{4}",
    "4": r"\frac{3\pi}{4} | sqrt(4) | The radius is 4, so the area is $16\pi$.",
    "567": "12,34,567",
    "89": "1.234.567,89",
    "-3": "y = +-3",
    "20": "She pays $20. Final answer: 5x",
}


@pytest.mark.parametrize(("reply", "answer"), [*pairs_of(PIECES), ("", "0")])
def test_a_piece_of_a_number_is_not_the_number(reply, answer):
    assert numeric(reply, answer) == 0.0


LONG = [unit * 50_000 for unit in ("9", "1,", "$", "#", ".", "1 ", "1/", "1e", "\\boxed{", "\\frac{1")]
LONG += ["1e" + "9" * 50_000, "\\frac{" + " " * 100_000, "a" * 100_000 + "^"]
WRONG = (
    "about that many | #### | 1234 #### | #### none, 1234 #### | 1234 or 5 | -1234 | #### -1,234 | $-1234 | -$1234"
    " | 1234.5 | 1234.0000000000000000000000001 | 12345 | 11,234 | 1,2345 | 1,23,4 | 12 34 | 0x4d2 | 1233+1 | 1.234e2"
    " | ١٢٣٤ | .1234 | 1234.5.6 | 12:1234 | __import__('os')"
)


@pytest.mark.parametrize("reply", ["", *WRONG.split(" | "), *LONG], ids=lambda reply: reply[:30])
def test_another_number_or_none_earns_nothing_and_soon(reply):
    assert numeric(reply, "1234") == 0.0


@pytest.mark.parametrize(
    "answer", ["a/2", "\\frac{x}{2}", "log 2", "2x", "GPT4", "(2, 7)", "3 or 4", "x = 2, 3", "5-6"]
)
def test_an_answer_that_is_no_single_number_is_refused(answer):
    assert graders.fault_of(answer, "numeric") is not None


COUNTED = {
    "5": r"#### 5 apples of 7 | 10 - 5 | \boxed{x_1 = 5} | \boxed{4} or rather \boxed{5}"
    " | There are 5 atoms in H2O | 10-5 | x-5 | so it is 5. | #### 5. 6 | That is all of it.5"
    " | f(x).5 | ...5",
    "8": "5 + 3 = 8",
    "100": "In 2024 100 people",
    "72": "so the area is 72 m^2.",
    "18": "She makes **$18** every day. | The total is **$18 per day**. | It is __18__ now"
    " | She had 16 eggs and makes $18! | #### 9 + 9 = 18 | #### $9 * $2 = $18"
    r" | \boxed{\textbf{(B) } 18} | \boxed{(B)\ 18} | \boxed{18 \text{ (dollars)}}"
    r" | \\(\\boxed{18}\\) | Put it in \boxed{}: 18 | \boxed{\color{blue}{18}} | \boxed{\large 18}"
    r" | \boxed{₹18} | \boxed{18^{\text{th}}}",
    "6": r"Cost **$5**, tax **$1**, total **\$6**.",
    "42": "#### 42!",
    "1024": "#### 2^10 = 1024",
    "21": "the 21st",
    "30": "30mins",
    "2.5": "2 and 1/2 cups",
    "1234": r"The answer is $1,234.00. | \boxed{\$1{,}234} | 2000-766 = +1234 | it is 01234."
    r" | \boxed{x = 1000 + 234 = 1234 \text{ pens}}",
    "-5": "-$5 | = -5.0",
    "0.5": r"0.50 | #### .5 | \boxed{.5} | it costs $.50. | 10-.5 | 1 or .5",
    "1000000": "#### 1,000,000",
    ".5": "0.5",
    "-0.5": "-.5 | -$.5",
}


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        *pairs_of(COUNTED),
        ("#### 72\nThat is all, and 3 more lines of talk: 1 2 3", "72"),
        ("#### Step 2: Multiply\n9 * 2 = 18\n\n**Answer: 18**", "18"),
        ("Answer:\n- 18 eggs", "18"),
        ("#### 5\nno, #### 1234", "1234"),
    ],
)
def test_which_number_of_a_reply_counts(reply, answer):
    assert numeric(reply, answer) == 1.0


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (Fraction(1020), "1020"),
        (Fraction(5, 2), "2.5"),
        (Fraction(1, 3), "1/3"),
        (Fraction(10**40 + 1), f"{10**40 + 1}"),
    ],
)
def test_a_number_written_down_is_the_same_number(number, text):
    assert in_decimal(number) == text and final_number(text, alone=True) == number


@pytest.mark.parametrize(
    ("reply", "answer", "reward"),
    [
        ("Paris", "paris", 1.0),
        (" New\n  York. ", "new york", 1.0),
        ("3.5", "3.5", 1.0),
        ("cafe\u0301", "caf\u00e9", 1.0),
        ("CAF\u00c9", "cafe\u0301", 1.0),
        ("\u1100\u1161", "\uac00", 1.0),
        ("stra\u00dfe", "STRASSE", 1.0),
        ("cafe", "caf\u00e9", 0.0),
        ("x2", "x\u00b2", 0.0),
        ("Paris!", "Paris", 0.0),
        ("In Paris", "Paris", 0.0),
        ("", "Paris", 0.0),
    ],
)
def test_exact(reply, answer, reward):
    assert exact(reply, answer) == reward


@pytest.mark.parametrize(
    ("reply", "answer", "reward"),
    [
        ("\\boxed{\\frac{2}{4}}", "\\frac{1}{2}", 1.0),
        ("so $(x+1)^2$", "$x^2 + 2x + 1$", 1.0),
        ("\\boxed{\\{2, 1\\}}", "\\{1, 2\\}", 1.0),
        ("It is 0.5.", "\\boxed{\\frac{1}{2}}", 1.0),
        ("The answer is 12%.", "12", 1.0),
        ("50%", "0.5", 1.0),
        ("\\boxed{x+1}", "x^2 + 2x + 1", 0.0),
        ("\\boxed{2}", "\\frac{1}{2}", 0.0),
        ("\\boxed{\\frac{1}{", "\\frac{1}{2}", 0.0),
        ("", "0", 0.0),
    ],
)
def test_math_verify(reply, answer, reward):
    assert math_verify(reply, answer) == reward


SMALL = {
    "0.0000001": "0.0000004 | 0 | -0.0000001 | 10^{-6} | 1e-8",
    "0.001": "0.0010004",
    "0.02": "0.0200004",
    "0": "0.0000004 | 10^{-9}",
    "1/2004!": "1/2006! | 0",
    "1-1/2^{100}": "1-1/2^{101} | 1",
    "2^{100}/(2^{100}+1)": "2^{101}/(2^{101}+1)",
    "1-1/2024!": "1-1/2023!",
    "2^{-30}": "2^{-31}",
    "e^{-50}": "e^{-51}",
    "3": "3+10^{-9}i",
    "1e-07": "2e-07 | -7+e",
    r"\{0.0000001, 2\}": r"\{0.0000004, 2\}",
    "x=0.0000001": "x=0.0000004",
    r"\begin{pmatrix}0.0000001\\2\end{pmatrix}": r"\begin{pmatrix}0.0000004\\2\end{pmatrix}",
}
EQUAL = {
    "0.0000001": r"0.0000001 | 10^{-7} | 1e-7 | 1E-07 | \frac{1}{10000000} | x=0.0000001",
    "1e-07": r"0.0000001 | 1 \times 10^{-7}",
    "(0.1)^{10}": "10^{-10}",
    "1/3": "0.333333 | 0.3333333333",
    r"\frac{1}{30}": "0.0333333",
    r"\pi": "3.141593",
    "1/2004!": r"\frac{1}{2004!}",
    "1-1/2^{100}": r"1-2^{-100}",
    r"\sqrt{8}": r"2\sqrt{2}",
    r"5\%": r"5\% | 5",
    "0.5": r"\frac{1}{2}",
    "0": r"\cos(\pi/2)",
    r"\{0.0000001, 2\}": r"\{2, 0.0000001\}",
}


@pytest.mark.parametrize(
    ("reply", "answer", "reward"),
    [*((*pair, 0.0) for pair in pairs_of(SMALL)), *((*pair, 1.0) for pair in pairs_of(EQUAL))],
)
def test_math_verify_tells_small_numbers_apart(reply, answer, reward):
    assert math_verify(f"\\boxed{{{reply}}}", answer) == reward


@pytest.mark.parametrize("reply", ["\\boxed{9^{9^9}}", "\\boxed{" + "(" * 3000 + "}"])
def test_what_would_take_math_verify_for_ever_earns_nothing(monkeypatch, reply):
    monkeypatch.setattr(graders, "MATH_SECONDS", 1)
    assert math_verify(reply, "\\frac{1}{2}") == 0.0


def test_math_verify_needs_no_signals():
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(math_verify, "\\boxed{0.25}", "\\frac{1}{4}").result() == 1.0
