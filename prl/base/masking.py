"""Secrets are found and masked in whatever is written to a file, a log or a page."""

import functools
import os
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
EDGE = r"(?:(?<![A-Za-z])|(?![A-Za-z])|(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z]))"
"""Beginning or end of a word in a name: `api_key`, `apiKey`, `APIKey`."""
ELSEWHERE = (
    rf"(?:[\w.-]*{EDGE}(?i:var|file|path|env|name|dir|directory|error|exception|length|count|bits|per_second)(?i:s?)"
    rf"|(?:[\w.-]*\.)?(?:n|num|max|min|total)_\w+|[\w.-]*\bPWD)(?![\w.-])"
)
"""Names that tell where a secret is, `api_key_var` or `token_file`, how many or how long, and names of errors."""
NAME = (
    rf"(?<![\w.-])(?:envs\.[\w-]++(?:\.|(?![\w.-])))?+(?!{ELSEWHERE})[\w.-]*?"
    rf"(?:(?:{EDGE}(?i:pass(?:wd|phrase|code)|pwd|secret|jwt|credential|bearer"
    r"|authorization|cookie|(?:api|access|private|signing|encryption|master|account|auth|ssh)[._ -]?key"
    r"|(?:auth|access|api|hf|hub|bearer|refresh|session|id|private|git(?:hub|lab)|wandb|bot|oauth2?)[._ -]?token)"
    rf"|(?i:password))(?i:s?){EDGE}|[A-Z\d]_(?:KEY|AUTH|TOKEN|PASS|PW)(?![\w-]))[\w.-]*"
)
"""A name that only secrets have; in capitals, as of the environment, any key or token. An env has any name."""
MAYBE = rf"{EDGE}(?i:key|token|auth|pass)s?"
"""Ends of names that others than secrets have, too: `sort_key`, `stop_token`. A value there that looks drawn is
a secret."""
WORD = re.compile(r".{,7}|[a-z]*(?:[A-Z][a-z]+)*\d*[A-Za-z]?|[A-Z]*\d*[A-Z]?|\d+[A-Za-z]*")
PLAIN = (
    r"(?!(?i:none|null|true|false|empty)\s*(?:[^\w\s]|$)|\$\{|\*\*\*|\[\]|\{\}|$"
    r"|(?:str|bytes|int|float|bool|list|dict|tuple|set|Any)\b(?!\w)|[A-Za-z_][\w.]*\()"
)
"""Before what may be a secret: no reference, no type or call of a program, nothing that any name may have."""
ASSIGNED = re.compile(
    rf"((?:{NAME}\\*[\"']?\]?[ \t]*+(?:=(?!=)|,(?=[ \t]*[\"'])|(?P<colon>:(?!:)))[ \t]*+"
    r"(?:[\w.\[\]]+(?: \| [\w.\[\]]+)* = )?+"
    rf"|(?=--){NAME}[ \t]++(?!-))(?P<quote>\\*[\"'])?+){PLAIN}"
    r"(?(quote)(?:(?!(?P=quote))(?:\\.|.))+|(?:\[[^\]\n]*\]?|\{[^}\n]*\}?"
    r"|(?:(?(colon)[^\"'\n,}]|[^\s\"',;&}])|,(?!\s*\\*[\"']?[\w.-]+\\*[\"']?\s*[=:]))+))",
    re.MULTILINE,
)
"""`name=value`, `name: value` (to the end of the line), `name: type = value`, `"name": "value"`, and `--name value`."""
MAYBE_ASSIGNED = re.compile(rf"((?<![\w.-])[\w.-]*{MAYBE}\\*[\"']?[ \t]*[=:][ \t]*\\*[\"']?)([\w.~+/=-]+)")
SHAPES = re.compile(
    r"(?<=://)[^/?#\s:@]*:[^/?#\s]+(?=@)|(?<=\b[Bb]earer )(?=\S*\d)[\w.~+/=-]{8,}"
    r"|([?&](?:key|sig|[\w-]*(?i:signature|-token)|token|auth)=|--token |\b(?i:login|key|password) (?=[\da-f]{40}\b)"
    r"|(?<![\w.])token(?:[\"']: ?[\"']|[=:](?=\w*\d)(?=\w*[A-Za-z])))[\w.~+/=%-]+"
    r"|(?<![A-Za-z\d])(?:(?:sk[-_]|gsk_|hf_|gh[a-z]_|github_pat_|glpat-|xox[a-z]-|nvapi-|pplx-|npm_|pypi-)"
    r"(?:[A-Za-z\d]+[_-]){,4}?(?:(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z\d]{16,}|[A-Za-z]{24,})[\w-]*"
    r"|A[KS]IA[\dA-Z]{16}(?![A-Za-z\d])|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]+\.[\w-]*)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?s:.*?)(?:-----END [A-Z ]*-----|\Z)"
)
"""A URL's user and password, a header's credentials, a URL's parameters, keys of services, web tokens, private keys."""


@functools.lru_cache(maxsize=1 << 10)  # each line of a log asks about the whole environment
def is_secret(name: str, value: str) -> bool:
    """Return whether `value`, of a config key or a variable that is called `name`, looks like a secret."""
    name = re.sub(r"\benvs\.[^.]+", "", name)  # what somebody has called an env
    if re.search(r"(?:^|[.+-])token$", name) and re.fullmatch(r"(?=[^A-Za-z]*+[A-Za-z])[\w.~+/=-]*+", value):
        name = "api_token"
    match = re.search(NAME, name) or (re.search(f"{MAYBE}$", name) and _is_drawn(value))
    return bool(match and re.match(PLAIN, value))


def _is_drawn(value: str) -> bool:
    """Return whether a value looks like random characters, and is no name of words and numbers."""
    if re.fullmatch(r"(?=.*\d)(?=.*[A-Fa-f])([\dA-Fa-f]{16,}|[\dA-Fa-f-]{36})", value):
        return True
    drawn = re.fullmatch(r"(?=.*\d)(?=.*[a-z])(?=.*[A-Z])[\w.~+/=-]{16,}", value)
    return bool(drawn) and not all(map(WORD.fullmatch, re.split(r"[^A-Za-z\d]+", value)))


def _secrets_of_environment() -> list[str]:
    """The secrets among the environment's values, long ones first; a short one may be a word of any text."""
    # Asked anew each time: a component may set a variable while the run is prepared.
    secrets = {value for name, value in os.environ.items() if len(value) >= 12 and is_secret(name, value)}
    return sorted(secrets, key=len, reverse=True)


def masked_text(text: str) -> str:
    """`text` with `***` for what looks like a secret, and for values of environment variables that do."""
    for value in _secrets_of_environment():
        text = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", HIDDEN, text)
    return _without_secrets(text)


def _without_secrets(text: str) -> str:
    for pattern in (SHAPES, ASSIGNED):
        text = pattern.sub(lambda match: (match[1] or "") + HIDDEN, text)
    return MAYBE_ASSIGNED.sub(lambda match: match[1] + HIDDEN if _is_drawn(match[2]) else match[0], text)


def masked(value: Any, name: str = "") -> Any:
    """`value`, of the config key `name`, with `***` for what looks like a secret; under such a name, all of it.

    Of a text `key=value`, as arguments of a command line are, the value is that of the key. So is what follows `--key`.
    """
    if isinstance(value, Mapping):
        return {key: masked(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        # A flag names the argument behind it: `--api-key` and then the key.
        flags = [f".{item}" if re.match(r"--[\w-]+$", str(item)) else "" for item in ["", *value]]
        return [masked(item, name + flag) for flag, item in zip(flags, value, strict=False)]
    if isinstance(value, str | int | float) and _is_hidden(name, str(value)):
        return HIDDEN
    if not isinstance(value, str):
        return value
    key, _, given = value.partition("=")
    if re.fullmatch(r"[\w.@/+~-]+", key) and _is_hidden(key, given.strip("'\"")):
        return f"{key}={HIDDEN}"
    return _without_secrets(value)


def _is_hidden(name: str, value: str) -> bool:
    """Return whether a value of a config is a secret by its name, or the same as one of the environment."""
    return is_secret(name, value) or (_is_drawn(value) and value in _secrets_of_environment())
