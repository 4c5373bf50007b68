"""The number that a text gives as its answer, as an exact fraction.

It is the number in the last `\\boxed{}`, or the first one after the last `####`, whichever comes later; without either,
the last number in the text. A number may have

    a sign               -5, and all of Unicode's dashes; minus 5
    thousands            10,000  10 000  10'000  10_000, with Unicode's spaces and LaTeX's (`10,\\!000`, `10{,}000`)
    an exponent          1.5e3  1.5 x 10^3  1.5 \\times 10^{3}  1.5 * 10**3
    a denominator        1/2  -3/4  \\frac{1}{2}  1 1/2  ½
    currency and units   $5  5 km  5%  5 cm^2: ignored, so that 50% is 50

A number counts only where it stands free: of 17:30, 1.2.3, 2^10, 5!, 2x, log 2, \\sqrt{4} and 12,34 no part is one.
"""

import functools
import re
import unicodedata
from decimal import Decimal
from fractions import Fraction

NO_NUMBER = "π"
"""Stands for every value that is no number."""
BOX, END = "\x02", "\x03"
"""Stand around what is in a `\\boxed{}`."""
MARK = re.compile(rf"####(?!#)|{BOX}([^{BOX}{END}]*+){END}")
VALUE = re.compile(r"\s*+[^\sA-Za-z#]")
"""Text that begins like an answer, and not like a heading."""
SUPERSCRIPTS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+")
CHARACTERS = str.maketrans(
    "\u2044\u2215\u00d7\u00b7\u22c5\u2219\u2217\u00f7\u2010\u2012\u2013\u2014\u2015\u2212\u2019", "//******------'"
)
UNITS = (
    r"(?:[kcmd]?m|[km]?[gLlW]|[smhVAJN]|ms|hr|lb|oz|ft|in|yd|mi|Hz|[MGkT]B|[ap]m|[A-Za-z]{3,}|°?[CF]|[°%]"
    r"|st|nd|rd|th)"  # of ordinals
)
VALUES = r"pm|mp|pi|tau|phi|theta|alpha|beta|gamma|delta|epsilon|lambda|mu|sigma|omega|infty"
FUNCTIONS = r"(?:sqrt|cbrt|log|ln|lg|exp|(?:arc|a)?(?:sin|cos|tan|cot)h?)"
SPELLINGS = {
    r"\\\\(?=(?:f?boxed|[dt]?frac|text|times|cdot|sqrt)[{ \\\\]|[()\[\]])": r"\\",  # escaped once more
    r"(?<![\w)\]}*])(\*{1,3}|__?)(?=[^\s*_])([^*_\n]*)(?<=\S)\1(?!\w)": r" \2 ",  # Markdown's bold
    r"\\(?:[!()\[\]]|(?:left|right|[bB]igg?[lr]?|(?:display|text|script)style)(?![A-Za-z]))": "",
    r"\\(?:large|Large|LARGE|bf|it|rm)(?![A-Za-z])|\\(?:text)?color\s*\{[^{}]*\}|\\hspace\s*\{[^{}]*\}": " ",
    r"\^\s*+(?:\{\s*+)?(?:\\text\w*+\s*+\{\s*+)?(st|nd|rd|th)\b[\s}]*": r"\1 ",  # 18^{th}
    r"\\(?:begin|end|tag|label)\s*\{[^{}]*\}|\\(?:[,;: ]|q?quad(?![A-Za-z]))|~": " ",
    r"\\\\": "\n",
    r"\{,\}": ",",  # LaTeX's comma between digits
    r"\\([$%#&_])": r"\1",
    r"\\(?:times|cdot|div)(?![A-Za-z])": "*",
    r"\\over(?![A-Za-z])": "/",
    r"\\(?:approx|simeq|sim|cong)(?![A-Za-z])|≈": "=",
    r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree": "°",
    rf"\\(?:{VALUES})(?![A-Za-z])|±|\+/?-(?=\s*[0-9])": NO_NUMBER,
    r"(?<=-)\$ ?": "",
    r"\$": " ",
    r"(?i)\b(?:minus|negative)\s+(?=[0-9.\\])": "-",
}
"""Patterns of what is written in several ways, and the one spelling that replaces each."""
THOUSANDS = re.compile(r"(?<![\w.,'^/])[0-9]{1,3}([, '_])[0-9]{3}(?:\1[0-9]{3})*(?![0-9])")
UNSIGNED = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
ARGUMENT = r"\s*(?:\{([^{}]*)\}|([\wπ]))"
GROUP = re.compile(
    rf"\\(?:[dtcsx]|nice)?(?P<fraction>frac){ARGUMENT}{ARGUMENT}"
    r"|\\f?(?P<box>boxed)\s*\{([^{}]*)\}"
    r"|\\(?P<style>text\w*|emph|math\w+|[fmh]box|bm|boldsymbol|underline)\s*\{([^{}]*)\}"
    r"|\\(?!\w*frac|boxed|fboxed)(?P<command>[A-Za-z]+)\s*+(?:\[[^][\\{}]*\])?(?:\s*+\{[^{}]*\})+"
    r"|\{(?P<braced>[^{}]*)\}|\((?P<bracketed>[^(){}]*)\)"
)
"""A group without another in it."""
MOST_NESTED = 30
FLAT_SPELLINGS = {
    r"\\\\(?=(?:f?boxed|[dt]?frac|text|times|cdot|sqrt)[{ \\\\]|[()\[\]])": r"\\",  # escaped once more
    r"(?<![\w)\]}*])(\*{1,3}|__?)(?=[^\s*_])([^*_\n]*)(?<=\S)\1(?!\w)": r" \2 ",  # Markdown's bold
    r"\\f?boxed\s*\{([^{}]*)": rf"{BOX}\1{END}",  # of a reply that was cut
    r"(?:\\[A-Za-z]+|\w)[({][^)}\n]*": NO_NUMBER,
    rf"(?<![A-Za-z])\\?{FUNCTIONS}(?![A-Za-z])[0-9]*(?:[_^][\w-]+)* *(?:\[[^][]*\]|-?[\w.]+)": NO_NUMBER,
    r"√ *[\w.]*": NO_NUMBER,
    r"(?<=[0-9]) and (?=[0-9]+/[0-9])": " ",  # 2 and 1/2
    r"(?<![A-Za-z])([ckdm]?m|s|ft|in|yd|mi|[A-Za-z]{3,}) ?\^ ?-?[0-9]+": r"\1",  # a unit's power
    r"(?<=[0-9]) *x *(?=[0-9])": "*",
    r"(?<=[\w)\]]) *\*\* *(?=[-\w.\[])": "^",
    r"(?<=[\w)\]%]) *([*/^]) *(?=[-+\w.\[])": r"\1",
    r"(?<=[0-9])\*10\^([-+]?[0-9]+)": r"e\1",
    r"(?<![\w.^*/])10\^([-+]?[0-9]+)": r"1e\1",
    r"(?<=\*)10-[0-9.]+|(?<!\w)[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}(?!\w)": NO_NUMBER,  # 10⁻³ become 10-3; a date
    rf"(?<=[0-9])(?:\.| +)(?=[{NO_NUMBER}xyz]\b)|(?<={NO_NUMBER}) +(?=[0-9])": "",  # 2 x
    rf"(^|[={{(\[#{BOX}])\s*-\s+(?=[0-9.])": r"\1-",  # x = - 5
}
# What touches: letters, digits and signs of mathematics, and between two digits all but a few separators.
TERM = re.compile(
    r"(?P<sign>(?<![\w).}\]%])[-+])?(?P<term>(?:[0-9]+ (?=[0-9]+/[0-9]))?"
    r"(?:[\w*/^!°%\u0300-\u036f\u20d0-\u20ff]|(?<![^\W\d])(?<![).\]}])\.(?=[0-9]|[eE][-+]?[0-9])"
    r"|(?<=[0-9][eE])[-+](?=[0-9])|(?<=[*/^])[-+]|(?<=[0-9])[^-\s+=<>()\[\]{}|;&\"](?=[0-9]))+)"
)
WORD = re.compile(r"[^\W\d_π][^\Wπ]*|[^0-9π]*")
NUMBER = re.compile(
    rf"(?:(?P<whole>[0-9]+) )?(?P<number>{UNSIGNED})(?:/(?P<below>-?{UNSIGNED}))?"
    rf"{UNITS}?(?:/(?:{UNITS}|[A-Za-z]{{2,}}))?\**"
)
# What may stand around an answer's number: words and units, but no other number, bracket or sign of mathematics.
AROUND = re.compile(r"(?:[^\W\dπ]|[\s%°'\",.;:=/&*`])*")
LONE_LETTER = re.compile(rf"(?<![^\W\d_])(?!{UNITS}\b)[A-Za-z](?![^\W\d_]|\s*=)")
MOST_DIGITS, MOST_EXPONENT_DIGITS = 1000, 3


def final_number(text: str, *, alone: bool = False) -> Fraction | None:
    """Return the number that `text` gives as its answer; None if it gives none.

    With `alone`, also None if more than words and units stand around it: `(2, 7)`, `2x + 1`, `3 or 4`. A `\\boxed{}` is
    always read in this way, behind its last `=`.
    """
    text = plain(text)
    marks = marks_in(text)
    tail = text[marks[-1].end() :] if marks else text
    if marks and marks[-1][1] is None:  # #### 9 + 9 = 18
        tail = tail.lstrip().partition("\n")[0].rpartition("=")[2]
    elif marks:
        alone, (before, _, tail) = True, marks[-1][1].rpartition("=")
        if "=" in before and re.search(r"[,;]|\b(?:or|and)\b", before):
            return None
    # In a box `(B)` and `(dollars)` are words; in a sentence `!` is no factorial, and H2O is a word.
    tail = re.sub(r"\[[^][0-9π]*\](?![\w(^*/])", " ", tail) if alone else re.sub(r"!(?!\S)", "", tail)
    terms = [match for match in TERM.finditer(tail) if not WORD.fullmatch(match["term"])]
    if alone:
        return value_of(terms[0]) if len(terms) == 1 and only_words_around(terms[0]) else None
    terms = [term for term in terms if not re.match("[^\\Wπ_0-9]", term["term"])]
    return value_of(terms[0 if marks else -1]) if terms else None


def marks_in(text: str) -> list[re.Match[str]]:
    """Return the marked answers. Markdown's `#### Step 2` above more text is a heading; an empty box marks nothing."""
    last_line = text.rstrip().rfind("\n")
    marks = []
    for mark in MARK.finditer(text):
        if mark[1] is None:
            is_answer = mark.start() > last_line or VALUE.match(text, mark.end()) is not None
        else:
            is_answer = re.search(r"\w", mark[1]) is not None
        if is_answer:
            marks.append(mark)
    return marks


def in_decimal(number: Fraction) -> str:
    """Return a number as text: in decimal where that has an end, else as a fraction."""
    text = format(Decimal(number.numerator) / number.denominator, "f")
    return text if Fraction(text) == number else str(number)


def plain(text: str) -> str:
    """Return `text` with one spelling for each sign, blank, power of ten and fraction, and without groups."""
    text = SUPERSCRIPTS.sub(lambda match: "^{" + unicodedata.normalize("NFKC", match[0]) + "}", text)
    text = re.sub(r"[^\n\t -~]", lambda match: spelt(match[0]), re.sub("(?<=[0-9])(?=[¼-¾⅐-⅞])", " ", text))
    text = respelt(text, SPELLINGS)
    text = THOUSANDS.sub(lambda match: match[0].replace(match[1], ""), text)
    for _ in range(MOST_NESTED):
        text, count = GROUP.subn(opened, text)
        if not count:
            break
    return respelt(text, FLAT_SPELLINGS)


@functools.lru_cache(maxsize=4096)
def spelt(character: str) -> str:
    """Return a character that is not ASCII as numbers are read: ² as ^2, ½ as 1/2, and each dash as -.

    One at a time: to normalise a text of 100,000 accents takes seconds.
    """
    kind, category = unicodedata.decomposition(character).partition(" ")[0], unicodedata.category(character)
    if category in ("Cc", "Cf", "Lo") and kind != "<super>":  # scripts without blanks: 答案是5个
        return f" {character} " if category == "Lo" else " "
    if category == "Sc":  # currencies
        return "$"
    before = {"<super>": "^", "<sub>": "_"}.get(kind, "")
    return before + unicodedata.normalize("NFKC", character).translate(CHARACTERS)


def respelt(text: str, spellings: dict[str, str]) -> str:
    """Return `text` with each pattern replaced, in order."""
    for pattern, spelling in spellings.items():
        text = re.sub(pattern, spelling, text)
    return text


def opened(group: re.Match[str]) -> str:
    """Return what to read for a group in braces or brackets, or a LaTeX command with its arguments."""
    parts = [part for part in group.groups() if part is not None]
    before, after = group.string[: group.start()][-1:], group.string[group.end() :][:1]
    touches = bool(re.fullmatch(r"[\w)\]}]", before))
    if group["box"]:
        return BOX + parts[1] + END
    if group["style"]:
        return f" {parts[1]}"
    if group["fraction"]:
        above, below = (part.strip(" ()") for part in parts[1:])
        if not all(re.fullmatch(rf"-?{UNSIGNED}", part) for part in (above, below)) or (touches and "-" in above):
            return NO_NUMBER
        return f"{' ' * before.isdigit()}{above}/{below}"
    inner = parts[0].strip()
    if group["command"] or (before == "^" and not re.fullmatch("[-+]?[0-9]+", inner)):
        return NO_NUMBER
    if before == "_":
        return "i"
    number = re.fullmatch(rf"[-+]? *{UNSIGNED}(?:/{UNSIGNED})?", inner)
    if touches or (number and re.fullmatch(r"[\w({]", after)):
        return NO_NUMBER
    return inner if number else f"[{inner}]"


def only_words_around(term: re.Match[str]) -> bool:
    """Return whether nothing but words and units stands around a term."""
    around = (term.string[: term.start()], term.string[term.end() :])
    return all(AROUND.fullmatch(text) and not LONE_LETTER.search(text) for text in around)


def value_of(term: re.Match[str]) -> Fraction | None:
    """Return the exact value of a term; None if it is no number, or one without a value."""
    match = NUMBER.fullmatch(term["term"].strip("'"))
    number, below = (exact_value(match["number"]), exact_value(match["below"] or "1")) if match else (None, None)
    if match is None or number is None or not below:
        return None
    value = number / below
    if match["whole"]:
        whole = exact_value(match["whole"])
        if whole is None or not 0 < value < 1:
            return None
        value += whole
    return -value if term["sign"] == "-" else value


def exact_value(digits: str) -> Fraction | None:
    """Return the value of an unsigned number or of `-5`; None for one that takes too long to compute with."""
    mantissa, _, exponent = digits.lower().partition("e")
    if len(mantissa) > MOST_DIGITS or len(exponent.lstrip("+-0")) > MOST_EXPONENT_DIGITS:
        return None
    return Fraction(mantissa) * Fraction(10) ** int(exponent or 0)
