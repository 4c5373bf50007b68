"""Text that prl did not write, shown to people."""

import re

from prl.base.masking import masked_text

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""All but newline and tab that moves the cursor, starts a sequence, breaks a line or turns the direction of writing."""


def safe(text: str) -> str:
    """The text with control characters written out, as Python writes them: `\\x1b`."""
    return CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def as_message(text: str) -> str:
    """The text as a log or a terminal shows it: harmless, without secrets, and with further lines indented.

    None of them begins as a message of prl's does.
    """
    return safe(masked_text(text)).replace("\n", "\n  ")


def in_one_line(error: BaseException | str) -> str:
    """A library's message or a model's reply, which may have many lines, as one."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 400 else f"{text[:400]} …"


def natural(name: str) -> list[tuple[float, str]]:
    """A key that sorts names by the numbers in them: step_9 before step_10, lr=1e-05 before lr=0.0001."""
    parts = re.split(r"(\d+(?:\.\d+)?(?:e[-+]?\d+)?)", name)
    return [(float(part), "") if place % 2 else (-1, part) for place, part in enumerate(parts)]
