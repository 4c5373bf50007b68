"""prl's own graders, by hand: which spellings of a number, a text or a formula are the same."""

from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import pytest

from prl.envs import graders
from prl.envs.graders import exact, math_verify, numeric
from prl.envs.numbers import final_number, in_decimal

SPELLINGS = {
    "1500": [
        "1.5e3",
        "1.5E+3",
        "15e02",
        "1.5 * 10**3",
        "1.5 \\times 10^{3}",
        "1.5×10³",
        "1.5 x 10^3",
        "1,500.0",
        "$1,500 dollars",
    ],
    "0.00001": ["1e-05", "1e-5", "10^{-5}", "10⁻⁵", "0.000010", ".00001", "1 \\cdot 10^{-5}"],
    "100000": ["10^5", "1e5", "1e0005"],
    "1/2": [
        "0.5",
        ".5",
        "2/4",
        "1 / 2",
        "\\frac{1}{2}",
        "\\dfrac{1}{2}",
        "\\tfrac12",
        "\\frac 1 2",
        "½",
        "$\\frac{1}{2}$",
        "1\u20442",
        "1\u22152",
        "\\nicefrac{1}{2}",
        "\\displaystyle\\frac{1}{2}",
    ],
    "-3/4": ["-0.75", "-\\frac{3}{4}", "\\frac{-3}{4}", "\u22123/4", "-¾", "3/-4"],
    "5/2": ["2 1/2", "2\\frac{1}{2}", "2½", "2.5"],
    "3/2000": ["1.5×10⁻³", "1.5e-3"],
    "1/3": ["\\frac{1}{3}", "2/6"],
    "-5": ["\u22125", "\u20135", "\u20105", "-5.0", "x = \u22125", "x = - 5", "-$5", "$-5", "-\\$5", "- 5", "minus 5"],
    "5": [
        "+5",
        "5.",
        "$5$",
        "\\(5\\)",
        "\\text{5}",
        "**5**",
        "5\\%",
        "5%",
        "x = 5",
        "€5",
        "5 °C",
        "5^\\circ",
        "5 km/h",
        "{5}",
        "(5)",
        "\\left(5\\right)",
        "\\approx 5",
        "\uff15",
    ],
    "72": ["72 km", "72 cm^2", "72 cm²", "72\\text{ cm}^2", "72 \\mathrm{m}^{3}", "USD 72", "72\\,\\text{km}"],
    "10000": [
        *(
            "10,000",
            "10\uff0c000",
            "10_000",
            "10 000",
            "10,\\!000",
            "10\\,000",
            "10{,}000",
            "10'000",
            "10\u2019000",
            "10~000",
            "10,000.00",
        ),
        *(f"10{blank}000" for blank in "\u00a0\u2007\u2008\u2009\u202f"),
    ],
    "1234567.5": ["1,234,567.5", "1 234 567.5", "1\\,234\\,567.5", "1{,}234{,}567.5"],
}
PAIRS = [(answer, reply) for answer, spellings in SPELLINGS.items() for reply in spellings]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_equal_numbers_are_equal_however_they_are_written(one, other):
    for answer, reply in ((one, other), (other, one)):
        assert numeric(reply, answer) == 1.0
        assert numeric(f"I add 3 and 4. \\boxed{{{reply}}} is it, of 9", answer) == 1.0
        assert numeric(f"I add 3 and 4.\n#### {reply}", answer) == 1.0


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("5", "1e-05"),
        ("2", "1/2"),
        ("1", "1/2"),
        ("1/3", "0.3333333333333333"),
        ("0.1", "0.1000000000000000000001"),
        ("5", "-5"),
        ("\u22128", "8"),
        ("it is 5:30", "30"),
        ("1/2/2024", "2024"),
        ("\\boxed{(2, 7)}", "2"),
        ("\\boxed{(2, 7)}", "7"),
        ("\\boxed{\\frac{\\sqrt{3}}{2}}", "3"),
        ("\\boxed{2^{10}}", "10"),
        ("2^10", "10"),
        ("\\boxed{5\\sqrt{2}}", "5"),
        ("1.2.3", "3"),
        ("1/0", "0"),
        ("1e999999999", "9"),
        ("3 5/2", "2"),
        ("10,0000", "10000"),
        ("\\frac{3\\pi}{4}", "3/4"),
        ("\\frac{3\\pi}{4}", "4"),
        ("\\frac{\\sqrt3}{2}", "2"),
        ("log 2", "2"),
        ("2x", "2"),
        ("2\\sqrt3", "3"),
        ("sqrt(4)", "4"),
        ("\\boxed{5!}", "5"),
        ("2**10", "10"),
        ("1.5\u00d710\u22123", "3"),
        ("12,34,567", "567"),
        ("1.234.567,89", "89"),
        ("2024-01-02", "2"),
        ("H2O", "2"),
        ("a/2", "2"),
        ("y = +-3", "-3"),
        ("The radius is 4, so the area is $16\\pi$.", "4"),
        ("It takes 3 hours, so she arrives at 7:30.", "3"),
        ("From 3 bits we get 2^10.", "3"),
        ("She pays $20. Final answer: 5x", "20"),
        ("So 5, \\boxed{x}", "5"),
        ("", "0"),
    ],
)
def test_a_piece_of_a_number_is_not_the_number(reply, answer):
    assert numeric(reply, answer) == 0.0


@pytest.mark.parametrize(
    "answer", ["a/2", "\\frac{x}{2}", "log 2", "2x", "GPT4", "(2, 7)", "3 or 4", "x = 2, 3", "5-6"]
)
def test_an_answer_that_is_no_single_number_is_refused(answer):
    assert graders.fault_of(answer, "numeric") is not None


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("#### 72\nThat is all, and 3 more lines of talk: 1 2 3", "72"),
        ("#### 5 apples of 7", "5"),
        ("5 + 3 = 8", "8"),
        ("10 - 5", "5"),
        ("In 2024 100 people", "100"),
        ("so the area is 72 m^2.", "72"),
        ("\\boxed{x_1 = 5}", "5"),
        ("\\boxed{4} or rather \\boxed{5}", "5"),
        ("She makes **$18** every day.", "18"),
        ("The total is **$18 per day**.", "18"),
        ("Cost **$5**, tax **$1**, total **\\$6**.", "6"),
        ("It is __18__ now", "18"),
        ("She had 16 eggs and makes $18!", "18"),
        ("#### 42!", "42"),
        ("There are 5 atoms in H2O", "5"),
        ("#### Step 2: Multiply\n9 * 2 = 18\n\n**Answer: 18**", "18"),
        ("#### 9 + 9 = 18", "18"),
        ("#### $9 * $2 = $18", "18"),
        ("#### 2^10 = 1024", "1024"),
        ("\\boxed{\\textbf{(B) } 18}", "18"),
        ("\\boxed{(B)\\ 18}", "18"),
        ("\\boxed{18 \\text{ (dollars)}}", "18"),
        ("\\\\(\\\\boxed{18}\\\\)", "18"),
        ("Put it in \\boxed{}: 18", "18"),
        ("\\boxed{\\color{blue}{18}}", "18"),
        ("\\boxed{\\large 18}", "18"),
        ("\\boxed{₹18}", "18"),
        ("\\boxed{18^{\\text{th}}}", "18"),
        ("the 21st", "21"),
        ("30mins", "30"),
        ("Answer:\n- 18 eggs", "18"),
        ("2 and 1/2 cups", "2.5"),
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
        ("\\boxed{x+1}", "x^2 + 2x + 1", 0.0),
        ("\\boxed{2}", "\\frac{1}{2}", 0.0),
        ("\\boxed{\\frac{1}{", "\\frac{1}{2}", 0.0),
        ("", "0", 0.0),
    ],
)
def test_math_verify(reply, answer, reward):
    assert math_verify(reply, answer) == reward


@pytest.mark.parametrize(
    "reply", ["\\boxed{9^{9^9}}", "9**9**9**9", "\\boxed{1000000!}", "\\boxed{" + "(" * 3000 + "}"]
)
def test_what_would_take_math_verify_for_ever_earns_nothing(monkeypatch, reply):
    monkeypatch.setattr(graders, "MATH_SECONDS", 1)
    assert math_verify(reply, "\\frac{1}{2}") == 0.0


def test_math_verify_needs_no_signals():
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(math_verify, "\\boxed{0.25}", "\\frac{1}{4}").result() == 1.0
