"""Pages: one file each, which asks for nothing from outside and in which no text of a run can be anything but text.

Jinja escapes every value. The policy in the page's head lets only the page's own style sheet and script count, by their
hashes; data for the script lies in a block of JSON, which the browser does not run.
"""

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup

TEMPLATES = Path(__file__).parent / "templates"
# What HTML or a script could take for the end of the block, or for the end of a line.
IN_JSON = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}


def render(template: str, *, title: str, script: str = "", **values: Any) -> str:
    """A page as HTML.

    Args:
        template: file in `templates/` that extends `base.html.j2`: blocks `main` and `data`.
        title: of the window.
        script: file in `templates/` that the page runs at its end, or "".
        values: for the template.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style, code = (TEMPLATES / "style.css").read_text(), (TEMPLATES / script).read_text() if script else ""
    return environment.get_template(template).render(
        title=title,
        style=Markup(style),
        style_hash=digest(style),
        script=Markup(code),
        script_hash=digest(code),
        **values,
    )


def digest(text: str) -> str:
    """The source of an inline element in a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def data_block(name: str, value: Mapping[str, Any]) -> Markup:
    """A script element of JSON, with the id `name`. Nothing in it can close the element or open another."""
    text = msgspec.json.encode(value).decode().translate(IN_JSON)
    return Markup(f'<script type="application/json" id="{name}">{text}</script>')
