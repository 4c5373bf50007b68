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
