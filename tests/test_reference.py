"""The config reference: made from the schemas, and up to date."""

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Lt

import prl.trainer.loss  # noqa: F401  # the page is the same whatever has been imported
from prl.compose import CONF, options, schemas
from prl.reference import reference, shown, type_of


def test_the_page_is_the_reference():
    """To renew it: python -m prl.reference > conf/README.md"""
    assert (CONF / "README.md").read_text() == reference()


def test_it_has_every_group_option_and_component():
    page = Path(CONF / "README.md").read_text()
    for group, names in options().items():
        assert f"## `{group}`\n" in page
        assert all(f"`{name}`" in page for name in names)
    assert all(f"`{path.partition('/')[2]}`" in page for path in schemas())
    for key in ("algo.kl.coef", "trainer.optim.lr", "envs.<name>.weight", "filters.<slot>.<name>.enforce", "k"):
        assert f"| `{key}` |" in page


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (int, "int"),
        (Any, "any"),
        (Annotated[float, Ge(0), Lt(1)], "float ≥ 0, < 1"),
        (Annotated[float, Lt(float("inf"))], "float"),
        (Annotated[int, Ge(1)] | None, "int ≥ 1 or null"),
        (Annotated[int | None, Ge(1)], "int ≥ 1 or null"),
        (Annotated[str, Literal["a", "b"]], "`a`, `b`"),
        (Literal["a"] | None, "`a` or null"),
        (dict[str, Any], "dict of str, any"),
    ],
)
def test_a_type_in_words(annotation, words):
    assert type_of(annotation) == words


@pytest.mark.parametrize(
    ("default", "text"), [(None, "`null`"), (True, "`true`"), ("", '`""`'), ("a\nb", '`"a\\nb"`'), (0.5, "`0.5`")]
)
def test_a_default_as_one_types_it(default, text):
    assert shown(default) == text
