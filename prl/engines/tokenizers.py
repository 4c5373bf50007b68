"""Whether a server's model has the policy's tokenizer: both turn the same text into tokens."""

from dataclasses import dataclass
from typing import Any

PIECES = 64
"""Tokens of the vocabulary whose texts make the probe, evenly spread over it."""
MAX_TOKENS = 200
"""Longest probe."""


@dataclass(frozen=True, slots=True)
class TokenizerProbe:
    """A text with pieces from all over the policy's vocabulary, and its tokens."""

    model: str
    """The policy, for messages."""
    text: str
    token_ids: list[int]

    @classmethod
    def of(cls, tokenizer: Any, model: str) -> "TokenizerProbe":
        """Make the probe of a policy's tokenizer. Marks added to the vocabulary, such as `<think>`, are part of it."""
        size = len(tokenizer)
        spread = [tokenizer.decode([number * (size - 1) // (PIECES - 1)]) for number in range(PIECES)]
        added = sorted(tokenizer.get_added_vocab(), key=len)[:PIECES]
        text = "The sum of 12 and 34 is 46."
        for piece in [*spread, *added]:
            if "\ufffd" not in piece and len(_encode(tokenizer, text + piece)) <= MAX_TOKENS:
                text += piece
        return cls(model, text, _encode(tokenizer, text))


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))
