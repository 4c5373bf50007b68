"""Tokenizers: of a model's folder, and whether a server's model has one: both turn the same text into tokens."""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prl.base.errors import ConfigError
from prl.base.text import in_one_line
from prl.config.model_folder import local_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PIECES = 64
"""Tokens of the vocabulary whose texts make the probe, evenly spread over it."""
MAX_TOKENS = 200
"""Longest probe."""
SHORT = 64
"""Longest text that a tokenizer remembers, characters."""
REMEMBERED = 256
"""Short texts that a tokenizer remembers."""


@dataclass(frozen=True, slots=True)
class TokenizerProbe:
    """A text with pieces from all over a vocabulary, and its tokens."""

    model: str
    """Whose tokenizer it is, for messages."""
    text: str
    token_ids: list[int]

    @classmethod
    def of(cls, tokenizer: Any, model: str) -> "TokenizerProbe":
        """Make the probe of a tokenizer. Marks added to the vocabulary, such as `<think>`, are part of it."""
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


class Remembering:
    """A tokenizer that encodes each short text once; the rest is as it was.

    Renderers encode the header of the assistant's turn three times for each reply, a tenth of what the orchestrator
    does where replies are short.
    """

    def __init__(self, tokenizer: Any):
        self._whole = tokenizer
        self._once = functools.lru_cache(REMEMBERED)(tokenizer.encode)

    def encode(self, text: Any, *given: Any, **options: Any) -> list[int]:
        if isinstance(text, str) and len(text) <= SHORT:
            return list(self._once(text, *given, **options))
        return list(self._whole.encode(text, *given, **options))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._whole,)

    def __call__(self, *given: Any, **options: Any) -> Any:
        return self._whole(*given, **options)

    def __len__(self) -> int:
        return len(self._whole)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)


def load_tokenizer(path: str, key: str, trust_remote_code: bool = False) -> "PreTrainedTokenizerBase":
    """The tokenizer of a model; `key` names its path in the config, for messages. Raises ConfigError for none."""
    from transformers import AutoTokenizer

    local = local_folder(path) is not None
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=local)
    except Exception as error:  # of transformers, of its Rust part, of the hub
        raise ConfigError(f"{key}={path!r}: no tokenizer here or on the hub ({in_one_line(error)})") from error
