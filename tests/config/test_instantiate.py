"""`_target_`: what may be named, and how a refusal reads."""

import sys

import pytest

from prl.config.instantiate import FORBIDDEN, knobs, locate_call, locate_class, with_nodes
from prl.errors import ConfigError
from prl.orchestrator.algo.base import Algorithm
from prl.orchestrator.algo.grpo import GRPOAlgorithm, GRPOConfig
from prl.trainer.config import AIPOLossConfig, CustomLossConfig


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "users_own.py").write_text(
        "from prl.orchestrator.algo.base import Algorithm\n"
        "class Mine(Algorithm): pass\n"
        "def loss(inputs): return inputs\n"
        "from os import system\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "users_own"
    sys.modules.pop("users_own", None)


def test_a_class_of_ours_and_one_of_the_users(user_module):
    assert locate_class("prl.orchestrator.algo.grpo.GRPOAlgorithm", Algorithm, "algo") is GRPOAlgorithm
    assert locate_class(f"{user_module}.Mine", Algorithm, "algo").__name__ == "Mine"


def test_a_function_of_the_users(user_module):
    assert locate_call({"_target_": f"{user_module}.loss"}, "loss")(3) == 3


@pytest.mark.parametrize("module", sorted(FORBIDDEN))
@pytest.mark.parametrize(
    "locate", [lambda t: locate_class(t, Algorithm, "algo"), lambda t: locate_call({"_target_": t}, "algo")]
)
def test_modules_that_turn_strings_into_actions_are_refused(locate, module):
    for target in (f"{module}.run", f"{module}.path.join"):
        with pytest.raises(ConfigError, match=r"algo\._target_=.*give the dotted path"):
            locate(target)


@pytest.mark.parametrize("target", ["eval", "", "GRPOAlgorithm"])
def test_a_bare_name_is_refused(target):
    with pytest.raises(ConfigError, match=r"algo\._target_=.*dotted path"):
        locate_class(target, Algorithm, "algo")


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("no_such_package.Thing", "No module named 'no_such_package'; is the package installed"),
        ("prl.no_such_module.Thing", "No module named 'prl.no_such_module'"),
        ("prl.orchestrator.batcher.Drain", "module prl.orchestrator.batcher has no 'Drain'"),
        ("prl.orchestrator.batcher.Batcher", "Algorithm (see prl.orchestrator.algo.base.Algorithm)"),
        ("prl.config.validate.check", "(see prl.orchestrator.algo.base.Algorithm)"),
        ("prl.orchestrator.algo.base.LossType", "(see prl.orchestrator.algo.base.Algorithm)"),
    ],
)
def test_what_is_no_class_of_the_right_kind_is_refused_by_key_and_name(target, says):
    with pytest.raises(ConfigError) as caught:
        locate_class(target, Algorithm, "envs.math.algo")
    assert f"envs.math.algo._target_={target!r}" in str(caught.value) and says in str(caught.value)


@pytest.mark.parametrize("name", ["system", "Mine", "Algorithm"])
def test_builtins_and_classes_are_no_functions(user_module, name):
    with pytest.raises(ConfigError, match=rf"loss\._target_='users_own\.{name}' is not a Python function"):
        locate_call({"_target_": f"{user_module}.{name}"}, "loss")


def test_knobs_are_everything_but_the_target():
    assert knobs(AIPOLossConfig(delta=3.0)) == {"delta": 3.0}
    assert knobs({"_target_": "x.y", "a": 1}) == {"a": 1}
    assert set(knobs(GRPOConfig())) == {"sampling", "length_penalty", "completion_weight", "tool_response_weight"}


def test_a_node_that_no_schema_describes_is_read_like_any_other():
    config = {"plain": {"a": 1}, "mine": {"_target_": "x.y", "a": {"b": 2}}}
    made = with_nodes(config)
    assert made["plain"] == {"a": 1}
    assert (made["mine"]._target_, made["mine"].a) == ("x.y", {"b": 2}) and knobs(made["mine"]) == {"a": {"b": 2}}
    assert made == with_nodes(config)
    owner = CustomLossConfig(_target_="a.b", kwargs={"_target_": "x.y"})
    assert (
        with_nodes(owner).kwargs._target_ == "x.y"
        and with_nodes({"_target_": "x.y", "not a name": 1})["not a name"] == 1
    )


def test_what_a_function_is_called_with_has_to_fit_it(tmp_path, monkeypatch):
    (tmp_path / "users_calls.py").write_text(
        "def one(inputs, scale=1.0): return inputs * scale\ndef none(): pass\nasync def later(inputs): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert locate_call({"_target_": "users_calls.one", "kwargs": {"scale": 3.0}}, "algo.fn")(2) == 6.0
    assert locate_call({"_target_": "users_calls.one", "scale": 3.0}, "loss")(2) == 6.0
    refused = {
        ("one", ("scael", 1)): r"algo\.fn: users_calls\.one\(inputs, scale=1\.0\) cannot be called: .*'scael'",
        ("one", ("inputs", 1)): "multiple values for argument 'inputs'",
        ("none", None): "cannot be called: too many positional",
        ("later", None): r"algo\.fn\._target_='users_calls\.later' is async",
    }
    for (name, setting), message in refused.items():
        with pytest.raises(ConfigError, match=message):
            locate_call({"_target_": f"users_calls.{name}", "kwargs": dict([setting] if setting else [])}, "algo.fn")
    sys.modules.pop("users_calls", None)


@pytest.mark.parametrize(("code", "says"), [("1 / 0", "ZeroDivisionError: division by zero"), ("def (", "SyntaxError")])
def test_a_module_that_cannot_be_imported_is_named_with_its_error(tmp_path, monkeypatch, code, says):
    (tmp_path / "users_broken.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=rf"algo\._target_='users_broken\.Thing': importing it failed: {says}"):
        locate_class("users_broken.Thing", Algorithm, "algo")
