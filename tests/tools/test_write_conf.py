"""The conf files: written from the classes, and up to date."""

import inspect
import pkgutil
from importlib import import_module
from typing import Annotated, Any, Literal

import pytest
import yaml
from annotated_types import Ge, Lt

import prl.losses  # noqa: F401  # the files are the same whatever has been imported
from prl.algorithms.base import Algorithm
from prl.algorithms.grpo import GRPOAlgorithm
from prl.filters.base import Filter
from prl.monitors.base import Monitor
from prl.tools.write_conf import MARK, as_yaml, classes, main, page, type_of


def test_every_file_is_as_it_is_written():
    """To renew them: python -m prl.tools.write_conf"""
    main(["--check"])


def test_every_component_has_a_file():
    described = [cls for cls in classes().values() if inspect.isclass(cls)]
    for base in (Algorithm, Filter, Monitor):
        package = base.__module__.rpartition(".")[0]
        for module in pkgutil.iter_modules(import_module(package).__path__, f"{package}."):
            own = [
                cls
                for cls in vars(import_module(module.name)).values()
                if getattr(cls, "__module__", "") == module.name
            ]
            components = [cls for cls in own if inspect.isclass(cls) and issubclass(cls, base)]
            assert all(any(issubclass(other, cls) for other in described) for cls in components)


def test_what_is_written_by_hand_stays_and_is_not_written_again(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(f"# Mine.\nlength_penalty: turns\n\n{MARK}\nnonsense: 1\n")
    text = page(file, "algo/grpo", GRPOAlgorithm)
    assert text.startswith(f"# Mine.\nlength_penalty: turns\n\n{MARK}\n")
    found = yaml.safe_load(text)
    assert found["length_penalty"] == "turns" and "nonsense" not in found
    assert found["completion_weight"] == GRPOAlgorithm.completion_weight == 1.0
    assert found["kl"]["coef"] == 0.0 and found["kl"]["reference"] == "initial"


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (int, "int"),
        (Any, "any"),
        (Annotated[float, Ge(0), Lt(1)], "float ≥ 0, < 1"),
        (Annotated[float, Lt(float("inf"))], "float"),
        (Annotated[int, Ge(1)] | None, "int ≥ 1 or null"),
        (Annotated[int | None, Ge(1)], "int ≥ 1 or null"),
        (Literal["a", "b"], "a, b"),
        (Literal["a"] | None, "a or null"),
        (dict[str, Any], "dict of str, any"),
    ],
)
def test_a_type_in_words(annotation, words):
    assert type_of(annotation) == words


@pytest.mark.parametrize("value", [None, True, "", "a\nb", "${seed}", "???", 0.5, 1e-6, [1, "x"], {}, {"a": [None]}])
def test_a_value_is_read_back_as_it_was(value):
    assert yaml.safe_load(f"key: {as_yaml(value)}") == {"key": value}
