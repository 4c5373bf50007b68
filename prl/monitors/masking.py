"""What looks like a secret, and text without it: for whatever is written to a file, a log or a page.

A secret is known by its name (`api_key`, `DB_PASSWORD`), by its shape (`sk-…`, a URL's password), or as the value of an
environment variable with such a name.
"""

import functools
import os
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
NAME = (
    r"(?:(?<!envs\.)(?i:pass(?:word|wd|phrase|code)|secret|credential|authorization|cookie|jwt"
    r"|(?:api|access|private|signing|encryption|master|account|auth|ssh)[._ -]?key"
    r"|(?:auth|access|api|hf|hub|bearer|refresh|private|github|gitlab|wandb|bot|security)[._ -]?token)(?i:s?)"
    r"|(?<=[A-Z]_)(?:KEY|TOKEN|AUTH|PASS|PW)|(?<=[\"'])token)(?![\w-])"
)
"""How a name ends that only secrets have. `api_key_var` and `token_file`, which say where one is, end otherwise."""
VALUE = r"(?!(?i:none|null|true|false|empty|str|int)\b|\$\{|\*\*\*|$)"
"""Before a value that may be a secret: no reference or type, and nothing that any name may have."""
QUOTE = r"\\*[\"']"
PATTERNS = (
    re.compile(rf"(--[\w-]*{NAME}[ \t]+)(?!-)\S+"),
    re.compile(rf"({NAME}(?:{QUOTE})?\]?[ \t]*[=:][ \t]*({QUOTE})){VALUE}(?:(?!\2).)+"),
    re.compile(rf"({NAME}[ \t]*[=:][ \t]*)(?:\[[^\]\n]*\]?|\{{[^}}\n]*\}}?)"),
    re.compile(rf"({NAME}[ \t]*=[ \t]*){VALUE}[^\s\"',;&}})\[{{=][^\s\"',;&}})]*"),
    re.compile(rf"({NAME}:[ \t]+|{NAME}:){VALUE}[^\s\"',}}\[{{][^\"'\n,}}]*"),
    re.compile(r"([?&](?:key|sig|auth|[\w-]*signature)=|(?<![\w.-])token=)[^\s&]+", re.IGNORECASE),
    re.compile(r"(://)[^/?#\s:@]*:[^/?#\s]+(?=@)"),
    re.compile(r"(\b[Bb]earer )(?=\S*\d)[\w.~+/=-]{8,}"),
    re.compile(
        r"()(?<![A-Za-z\d])(?:sk[-_]|gsk_|hf_|gh[a-z]_|github_pat_|glpat-|xox[a-z]-|nvapi-|npm_|pypi-)"
        r"(?:[A-Za-z\d]+[_-]){,4}?(?:(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z\d]{16,}|[A-Za-z]{24,})[\w-]*"
    ),
    re.compile(r"()(?<![A-Za-z\d])(?:A[KS]IA[\dA-Z]{16}(?![A-Za-z\d])|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]+\.[\w-]*)"),
    re.compile(r"()-----BEGIN [A-Z ]*PRIVATE KEY-----(?s:.*?)(?:-----END [A-Z ]*-----|\Z)"),
)
"""An option, a quoted value, a list or mapping, `name=value`, `name: value` to the end of its line; parameters and the
password of a URL, a header's credentials, keys of services, web tokens, private keys. The first group stays."""
OF_TEXT, OF_CONFIG = 12, 16
"""Characters from which on a text, or a value of a config, is compared with the environment's secrets: a shorter one
may be a word."""


@functools.lru_cache(maxsize=1 << 10)  # each line of a log asks about the whole environment
def has_secret_name(name: str) -> bool:
    """Whether a config key or a variable is called as only secrets are; an env may have any name."""
    return bool(re.search(rf"{NAME}$|(?:^|\.)token$", name)) and not re.search(r"\benvs\.[\w-]+$", name)


def is_secret(name: str, value: str) -> bool:
    """Whether `value`, of a config key or a variable that is called `name`, looks like a secret."""
    return has_secret_name(name) and re.match(VALUE, value) is not None


def _secrets_of_environment(least: int) -> list[str]:
    """The secrets among the environment's values, long ones first."""
    secrets = {value for name, value in os.environ.items() if len(value) >= least and is_secret(name, value)}
    return sorted(secrets, key=len, reverse=True)


def masked_text(text: str) -> str:
    """`text` with `***` for what looks like a secret, and for values of environment variables that do."""
    for value in _secrets_of_environment(OF_TEXT):
        text = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", HIDDEN, text)
    return _without_secrets(text)


def _without_secrets(text: str) -> str:
    for pattern in PATTERNS:
        text = pattern.sub(rf"\g<1>{HIDDEN}", text)
    return text


def masked(value: Any, name: str = "") -> Any:
    """`value`, of the config key `name`, with `***` for what looks like a secret; under such a name, all of it.

    Of a text `key=value`, as arguments of a command line are, the value is that of the key. So is what follows `--key`.
    """
    hides = has_secret_name(name)
    if isinstance(value, Mapping):
        return {key: masked(item, name if hides else f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        flags = [item if re.match(r"--[\w-]+$", str(item)) else name for item in [name, *value]]
        return [masked(item, name if hides else flag) for flag, item in zip(flags, value, strict=False)]
    if value is None or isinstance(value, bool):
        return value
    if is_secret(name, str(value)) or value in _secrets_of_environment(OF_CONFIG):
        return HIDDEN
    if not isinstance(value, str):
        return value
    key, _, given = value.partition("=")
    if re.fullmatch(r"[\w.@/+~-]+", key) and (masked(given.strip("'\""), key) == HIDDEN != given):
        return f"{key}={HIDDEN}"
    return _without_secrets(value)
