"""Text that prl did not write, shown to people."""

import re

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""All but newline and tab that moves the cursor, starts a sequence, breaks a line or turns the direction of writing."""


def safe(text: str) -> str:
    """The text with control characters written out, as Python writes them: `\\x1b`."""
    return CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)
