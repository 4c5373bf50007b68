"""Pages: one file each, which asks for nothing from outside and in which no text of a run can be anything but text.

Jinja escapes every value. The policy in the page's head lets only the page's own style sheet and script count, by their
hashes; data for the script lies in a block of JSON, which the browser does not run.
"""

import base64
import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup

from prl.base.text import safe

TEMPLATES = Path(__file__).parent / "templates"
UNSAFE = "<>&"
"""Characters that HTML could take for the end of a block of JSON."""


def render(template: str, *, title: str, scripts: Sequence[str] = (), live: bool = False, **values: Any) -> str:
    """A page as HTML.

    Args:
        template: file in `templates/` that extends `base.html.j2`: blocks `main` and `data`.
        title: of the window.
        scripts: files in `templates/` that the page runs at its end, as one.
        live: the page may ask the server that it came from, and nobody else.
        values: for the template.
    """
    style, code = (
        "".join((TEMPLATES / name).read_text(encoding="utf-8") for name in names) for names in (["style.css"], scripts)
    )
    return fragment(
        template,
        title=title,
        style=Markup(style),
        style_hash=digest(style),
        script=Markup(code),
        script_hash=digest(code),
        live=live,
        **values,
    )


def fragment(template: str, **values: Any) -> str:
    """A template of `templates/` as HTML."""
    return _environment().get_template(template).render(**values)


@functools.cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=lambda value: safe(value) if type(value) is str else value,  # not Markup, which is our own
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def digest(text: str) -> str:
    """The source of an inline element in a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def data_block(name: str, value: Mapping[str, Any]) -> Markup:
    """A script element of JSON, with the id `name`. Nothing in it can close the element or open another."""
    return Markup(f'<script type="application/json" id="{name}">{encoded(value)}</script>')


def encoded(value: Any) -> str:
    """The value as JSON, its texts as `harmless` leaves them, every sign in `UNSAFE` spelt as an escape."""
    text = msgspec.json.encode(harmless(value)).decode()
    for sign in UNSAFE:
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def harmless(value: Any) -> Any:
    """The value with the control characters in its texts and keys written out."""
    if isinstance(value, str):
        return safe(value)
    if isinstance(value, Mapping):
        return {safe(str(key)): harmless(entry) for key, entry in value.items()}
    return [harmless(entry) for entry in value] if isinstance(value, list | tuple) else value


def rounded(value: float | None) -> float | None:
    """A number in the four digits that a page shows."""
    return None if value is None else float(f"{value:.4g}")
