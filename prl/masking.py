"""What looks like a secret, and text without it: for whatever is written to a file, a log or a page."""

import os
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
NAMED = re.compile(
    r"((?:api|access|secret|private|signing|encryption|master|account|auth|ssh)[._ -]?key|secret|pass(?:word|wd|phrase)"
    r"|pwd|jwt|(?-i:_KEY))$|(?:token|auth|authorization|bearer|cookie|credentials?)$",
    re.IGNORECASE,
)
"""How the names of secrets end; `max_tokens`, `token_file` and `api_key_var` end otherwise. Those that are no group are
words of other texts, too."""
RANDOM = re.compile(r"(?=\S*\d)(?=\S*[A-Za-z])[\w.~+/=-]{16,}")
"""What makes a value of any `…_key` a secret: `demo_key=answer` is none."""
PLAIN = re.compile(r"(?i:none|null|true|false)|\$\{.*|[\d.]{,9}|[</~].*|\[\w+\]|\*\*\*", re.DOTALL)
"""No secrets, whatever their name: references to the environment, a tokenizer's tokens and their numbers, paths."""
ASSIGNED = re.compile(r"""([\w.-]+)(["']?\s*[=:]\s*(["']?))(?![\w.-]+["']?\s*[=:])([^\s"',;&{}()\[\]]+)""")
"""`name=value`, `name: value` and `"name": "value"` in a text."""
SHAPES = re.compile(
    r"(?<=://)[^/?#\s]+(?=@)|(?:(?<=\bBearer )|(?<=\bBasic ))[\w.~+/=-]{6,}"
    r"|\b(?:sk-|hf_|gh[a-z]_|github_pat_|glpat-|xox[a-z]-)(?:[\w-]*[a-z0-9]{16,}|(?=[\w-]*\d{3})[\w-]{6,})"
    r"|\b(?:AKIA[0-9A-Z]{16}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]+\.[\w-]*)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*-----|\Z)",
    re.DOTALL | re.IGNORECASE,
)
"""User and password of a URL, a header's credentials, keys of services, JSON Web Tokens, private keys."""


def is_secret(name: str, value: str) -> bool:
    """Whether `value`, of a config key or a variable that is called `name`, looks like a secret."""
    if not value or PLAIN.fullmatch(value):
        return False
    return bool(NAMED.search(name) or (name.lower().endswith("key") and RANDOM.fullmatch(value)))


def masked_text(text: str) -> str:
    """`text` with `***` for what looks like a secret, and for values of environment variables that do."""
    values = {value for name, value in os.environ.items() if len(value) >= 8 and is_secret(name, value)}
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return SHAPES.sub(HIDDEN, ASSIGNED.sub(_assigned, text))


def _assigned(found: re.Match[str]) -> str:
    """An assignment of a text without its secret. `token: word` is rather of a sentence, or of a program."""
    name, between, quote, value = found.groups()
    named = NAMED.search(name)
    unlikely = named and not (named[1] or quote or name.isupper() or re.search(r"\d", value))
    return found[0] if unlikely or not is_secret(name, value) else f"{name}{between}{HIDDEN}"


def masked(value: Any, name: str = "") -> Any:
    """`value`, of the config key `name`, with `***` for what looks like a secret; under such a name, all of it.

    Of a text `key=value`, as arguments of a command line are, the value is that of the key.
    """
    if isinstance(value, Mapping):
        return {key: masked(item, name if NAMED.search(name) else str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [masked(item, name) for item in value]
    if isinstance(value, str | int) and is_secret(name, str(value)):
        return HIDDEN
    if not isinstance(value, str):
        return value
    key, equals, rest = value.partition("=")
    return f"{masked_text(key)}={masked(rest, key)}" if equals else masked_text(value)
