"""Components from config nodes: what may be named, which knobs it takes, and how a refusal reads."""

import dataclasses
import sys
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Gt, Le, Lt
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import MISSING, OmegaConf

from prl.config.instantiate import build, checked_knobs, class_of, converted, factory, function, knobs_of, name_of
from prl.config.model_reference import FrozenModelConfig
from prl.config.signature import check_value, parameters, schema_of
from prl.errors import ConfigError
from prl.orchestrator.algo.base import Algorithm
from prl.orchestrator.algo.grpo import GRPOAlgorithm

MODULE = '''
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal
from annotated_types import Ge, Gt, Le, Lt
from prl.config.model_reference import FrozenModelConfig
from prl.errors import ConfigError
from os import system
from threading import Thread

if TYPE_CHECKING:
    from nowhere import Unknown

class Base:
    pass

@dataclass
class Place:
    """A nested dataclass."""
    city: str = "here"
    floor: Annotated[int, Ge(0)] = 0

@dataclass(kw_only=True)
class Part(Base):
    n: Annotated[int, Ge(1)] = 3
    share: Annotated[float, Ge(0), Lt(1)] | None = None
    mode: Literal["a", "b"] = "a"
    by: Literal["x", "y"] | None = None
    betas: Annotated[list[float], Ge(0), Lt(1)] = field(default_factory=lambda: [0.9, 0.99])
    table: dict[str, float] = field(default_factory=lambda: {"one": 1.0})
    maybe: dict[str, dict[str, float]] | None = None
    place: Place = field(default_factory=Place)
    model: FrozenModelConfig | None = None
    teacher: FrozenModelConfig | str | None = None
    fn: Callable[[Any], float] | None = None

    def check(self, where):
        if self.mode == "b" and self.by is None:
            raise ConfigError(f"{where}.mode=b needs {where}.by")
        if self.n == 13:
            raise ZeroDivisionError("unlucky")

class Plain(Part):
    """A normal class with a knob of its own, passing the rest on."""
    def __init__(self, *, bonus: Annotated[float, Gt(0)] = 1.0, **knobs):
        super().__init__(**knobs)
        self.bonus = bonus

class Required(Part):
    def __init__(self, *, path: str, late: "Unknown" = None, least: Annotated[int, Ge(2)] = 2, **knobs):
        super().__init__(**knobs)
        self.path, self.late, self.least = path, late, least

class Fewer(Base):
    def __init__(self, n: int = 5):
        self.n = n

class Open(Base):
    def __init__(self, **settings):
        self.settings = settings

class Live(Base):
    def __init__(self, params, lr: Annotated[float, Gt(0)] = 0.1, *, betas: tuple = (0.9,)):
        self.params, self.lr, self.betas = params, lr, betas

class Raises(Base):
    def __init__(self, message: str = ""):
        raise (ConfigError if message else RuntimeError)(message or "broken")

class Mine:
    pass

@dataclass
class Scorer:
    k: Annotated[int, Ge(0)]
    strict: bool = False
    parts: Any = ()
    def __post_init__(self):
        self.seen, self.lock = [], threading.Lock()
    def check(self, text):  # a method of its own, not a component's
        raise AssertionError
    def __call__(self, x):
        return x + self.k

class Loose:
    def __init__(self, k, **more):
        self.k, self.more = k, more

class Scored(Base):
    def __init__(self, *, scorer: Scorer | None = None, scorers: list[Scorer] = (), n: int = 1,
                 by_name: dict[str, Any] | None = None, either: Mine | Scorer | None = None):
        self.scorer, self.scorers, self.by_name, self.n, self.either = scorer, scorers, by_name, n, either

def scored(x, scorer, *, scale: float = 1.0, strict: bool = False): return scorer(x) * scale

def fn(x, scale=1.0, *, extra=0): return x * scale + extra
def none(): pass
async def later(x): return x
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of the user's own, `users_own`."""
    (tmp_path / "users_own.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    import users_own

    yield users_own
    sys.modules.pop("users_own", None)


@pytest.fixture
def made(own):
    """`made(name, **knobs)`: the component, built as `algo`."""
    return lambda name="Part", **knobs: build({"_target_": f"users_own.{name}", **knobs}, own.Base, "algo")


@pytest.fixture
def refused(made):
    def refuse(name="Part", **knobs):
        with pytest.raises(ConfigError) as caught:
            made(name, **knobs)
        return str(caught.value)

    return refuse


# --- knobs ------------------------------------------------------------------------------------------------------------


def test_a_component_without_knobs_has_its_defaults(made, own):
    assert made() == own.Part()
    assert vars(made("Plain")) == {**vars(own.Part()), "bonus": 1.0}


def test_knobs_are_converted_by_their_annotations(made, own):
    part = made(n=4, share=0, betas=[0, 0.5], table={"two": 2}, maybe={"a": {"b": 1}}, by="x", place={"floor": 2})
    assert part == own.Part(
        n=4, share=0.0, betas=[0.0, 0.5], table={"two": 2.0}, maybe={"a": {"b": 1.0}}, by="x", place=own.Place(floor=2)
    )
    assert all(type(value) is float for value in (part.share, part.betas[0], part.table["two"], part.maybe["a"]["b"]))
    assert (
        type(part.betas) is list and type(part.table) is type(part.maybe["a"]) is dict and type(part.place) is own.Place
    )
    model = {"name": "m", "base_url": ["http://a"]}
    assert made(model=model).model == FrozenModelConfig("m", ["http://a"])
    assert made(teacher=model).teacher == model and made(teacher="policy").teacher == "policy", "no type among several"
    assert made("Plain", bonus=2, n=7).bonus == 2.0
    assert made("Required", path="p", late={"any": ["thing"]}).late == {"any": ["thing"]}
    assert made("Open", any=1, thing={"a": [2]}).settings == {"any": 1, "thing": {"a": [2]}}


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        (
            {"m": 3},
            "algo.m: Part has no such knob; its knobs: "
            + "betas, by, fn, maybe, mode, model, n, place, share, table, teacher",
        ),
        ({"moed": "a"}, "algo.moed: Part has no such knob; did you mean algo.mode?"),
        ({"n": "x"}, "algo.n: Value 'x' of type 'str' could not be converted to Integer"),
        ({"n": 2.5}, "algo.n: Value '2.5' of type 'float' could not be converted to Integer"),
        ({"n": None}, "algo.n: field 'n' is not Optional"),
        ({"n": 0}, "algo.n must be at least 1, got 0"),
        ({"share": 1}, "algo.share must be from 0 to below 1, got 1.0"),
        ({"share": float("nan")}, "algo.share must be from 0 to below 1, got nan"),
        ({"mode": "c"}, "algo.mode='c': choose a or b"),
        ({"by": "z"}, "algo.by='z': choose x, y or null"),
        ({"betas": [0.9, 1.0]}, "algo.betas must be from 0 to below 1, got [0.9, 1.0]"),
        ({"betas": 0.9}, "algo.betas: Invalid value assigned: float is not a ListConfig, list or tuple."),
        ({"table": {"a": "x"}}, "algo.table.a: Value 'x' of type 'str' could not be converted to Float"),
        ({"maybe": {"a": {"b": "x"}}}, "algo.maybe.a.b: Value 'x' of type 'str' could not be converted to Float"),
        ({"maybe": {"a": 3}}, "algo.maybe: Cannot assign int to Dict[str, float]"),
        ({"place": {"floor": -1}}, "algo.place.floor must be at least 0, got -1"),
        ({"place": {"cty": "x"}}, "algo.place.cty: Key 'cty' not in 'Place'"),
        ({"model": {"nam": "x"}}, "algo.model.nam: Key 'nam' not in 'FrozenModelConfig'"),
        ({"mode": "b"}, "algo.mode=b needs algo.by"),
        ({"n": "???"}, "algo.n has no value: give one, algo.n=<value>"),
    ],
)
def test_a_knob_that_cannot_be_is_refused_by_its_key(refused, knobs, message):
    assert refused(**knobs) == message
    assert refused("Plain", **knobs).replace("Plain", "Part").replace("bonus, ", "") == message


def test_bounds_of_a_constructors_own_knobs_hold_as_well(refused):
    assert refused("Plain", bonus=0) == "algo.bonus must be above 0, got 0.0"
    assert refused("Required", path="p", least=1) == "algo.least must be at least 2, got 1", (
        "beside one nobody resolves"
    )
    assert refused("Required") == "algo.path has no value: give one, algo.path=<value>"
    assert refused("Required", path="p", n=0) == "algo.n must be at least 1, got 0"


def test_what_a_component_raises_is_reported_with_its_place(refused):
    message = refused(n=13)
    assert (
        message.startswith("algo: Part.check failed: ZeroDivisionError: unlucky (") and "users_own.py, line" in message
    )
    message = refused("Raises")
    assert message.startswith("algo: Raises cannot be made: RuntimeError: broken (") and "users_own.py, line" in message
    assert refused("Raises", message="its own words") == "its own words"


def test_hydras_own_keys_are_no_knobs(made, own):
    assert made(_partial_=True, _args_=[1], _convert_="none", _recursive_=False) == own.Part()
    assert knobs_of({"_target_": "x.y", "_partial_": True, "a": 1}) == {"a": 1}


# --- what may be named ------------------------------------------------------------------------------------------------


def test_a_class_of_ours_and_one_of_the_users(own):
    assert class_of({"_target_": "prl.orchestrator.algo.grpo.GRPOAlgorithm"}, Algorithm, "algo") is GRPOAlgorithm
    assert class_of({"_target_": "users_own.Plain"}, own.Base, "algo") is own.Plain


@pytest.mark.parametrize("module", ["builtins", "os", "subprocess", "sys", "importlib", "pickle", "webbrowser", "pty"])
@pytest.mark.parametrize("find", [lambda node: build(node, Algorithm, "algo"), lambda node: function(node, "algo")])
def test_modules_that_turn_strings_into_actions_are_refused(find, module):
    for target in (f"{module}.run", f"{module}.path.join"):
        with pytest.raises(ConfigError, match=rf"algo\._target_=.*nothing of {module} may be named"):
            find({"_target_": target})


@pytest.mark.parametrize("target", ["eval", "", "GRPOAlgorithm", "a..b", ".a"])
def test_a_bare_name_is_refused(target):
    with pytest.raises(ConfigError, match=r"algo\._target_=.*dotted path"):
        class_of({"_target_": target}, Algorithm, "algo")


@pytest.mark.parametrize("node", [None, {}, {"n": 3}, {"_target_": None}, {"_target_": "???"}, {"_target_": 3}, "x", 3])
def test_a_node_that_names_nothing_is_refused(node):
    with pytest.raises(
        ConfigError, match="^algo has no _target_: it must name a subclass of prl.orchestrator.algo.base.Alg"
    ):
        build(node, Algorithm, "algo")
    with pytest.raises(ConfigError, match="^loss has no _target_: it must name a function"):
        function(node if isinstance(node, dict) else {}, "loss")


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("no_such_package.Thing", "No module named 'no_such_package'; is the package installed"),
        ("prl.no_such_module.Thing", "No module named 'prl.no_such_module'"),
        ("prl.orchestrator.batcher.Drain", "module prl.orchestrator.batcher has no 'Drain'"),
        ("prl.orchestrator.batcher.Batcher", "is not a subclass of prl.orchestrator.algo.base.Algorithm"),
        ("prl.config.validate.has_gpu", "is not a subclass of prl.orchestrator.algo.base.Algorithm"),
        ("prl.wire.components.COMPONENTS", "is not a subclass of prl.orchestrator.algo.base.Algorithm"),
    ],
)
def test_what_is_not_a_class_of_the_right_kind_is_refused_by_key_and_name(target, says):
    with pytest.raises(ConfigError) as caught:
        build({"_target_": target}, Algorithm, "envs.math.algo")
    assert f"envs.math.algo._target_={target!r}" in str(caught.value) and says in str(caught.value)


@pytest.mark.parametrize(("code", "says"), [("1 / 0", "ZeroDivisionError: division by zero"), ("def (", "SyntaxError")])
def test_a_module_that_cannot_be_imported_is_named_with_its_error(tmp_path, monkeypatch, code, says):
    (tmp_path / "users_broken.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=rf"algo\._target_='users_broken\.Thing': importing it failed: {says}"):
        class_of({"_target_": "users_broken.Thing"}, Algorithm, "algo")


# --- functions --------------------------------------------------------------------------------------------------------


def test_a_function_with_its_keyword_arguments(own, made):
    assert function({"_target_": "users_own.fn"}, "loss")(3) == 3
    assert function({"_target_": "users_own.fn", "_partial_": True, "scale": 2, "extra": 1}, "loss")(3) == 7
    part = made(fn={"_target_": "users_own.fn", "extra": 1})
    assert part.fn(3) == 4.0 and name_of(part.fn) == name_of(own.fn) == "users_own.fn"
    assert made(fn={"_target_": None, "_partial_": True}).fn is None
    assert made(table={"a": 1.0}, teacher={"nested": {"_target_": "users_own.fn"}}).teacher["nested"](2) == 2


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (
            {"_target_": "fn", "scael": 1},
            "@: users_own.fn(x, scale=1.0, *, extra=0) cannot be called: got an unexpected",
        ),
        ({"_target_": "fn", "x": 1}, "@: users_own.fn(x, scale=1.0, *, extra=0) cannot be called: multiple values"),
        ({"_target_": "none"}, "@: users_own.none() cannot be called: too many positional arguments"),
        ({"_target_": "later"}, "@._target_='users_own.later' is async: nothing awaits it"),
        ({"_target_": "system"}, "@._target_='users_own.system' is not a Python function"),
        ({"_target_": "missing"}, "@._target_='users_own.missing': module users_own has no 'missing'"),
        (
            {"_target_": "fn", "scale": {"_target_": "os.system"}},
            "@.scale._target_='os.system': nothing of os may be named",
        ),
    ],
)
def test_what_cannot_be_called_with_one_value_is_refused(refused, node, message):
    node = {**node, "_target_": f"users_own.{node['_target_']}"}
    assert refused(fn=node).startswith(message.replace("@", "algo.fn"))
    with pytest.raises(ConfigError) as caught:
        function(node, "loss")
    assert str(caught.value).startswith(message.replace("@", "loss"))


def test_a_function_that_is_not_named_is_refused(refused):
    assert refused(fn={"_target_": "???"}) == "algo.fn._target_ has no value: give the dotted path of your function"
    message = "algo.fn.least is given, but no function: name it with algo.fn._target_=my.function"
    assert refused(fn={"_target_": None, "_partial_": True, "least": 3}) == message


@pytest.mark.parametrize(
    ("knobs", "key"),
    [
        ({"maybe": {"a": {"_target_": "os.system"}}}, "maybe.a"),
        ({"teacher": {"a": [{"b": {"_target_": "os.system", "command": "true"}}]}}, "teacher.a.b"),
        ({"n": {"_target_": "os.getpid"}}, "n"),
    ],
)
def test_nothing_is_called_from_the_depth_of_a_knob(refused, knobs, key):
    assert refused(**knobs).startswith(f"algo.{key}._target_='os.")


# --- nodes inside ---


def test_a_node_inside_a_component_is_the_object_that_it_describes(made, own):
    scorer = {"_target_": "users_own.Scorer", "k": 3}
    one = made("Scored", scorer=scorer).scorer
    assert type(one) is own.Scorer and one.k == 3 and one.strict is False and one(2) == 5 and one.seen == []
    several = made("Scored", scorers=[scorer, {**scorer, "k": 4}], by_name={"a": scorer, "b": [1, {"c": scorer}]})
    assert [each.k for each in several.scorers] == [3, 4] and several.by_name["b"][0] == 1
    assert several.by_name["a"].k == several.by_name["b"][1]["c"].k == 3
    outer = made("Scored", scorer={**scorer, "strict": "yes", "parts": [scorer]}, either=scorer)
    assert outer.scorer.strict is True and outer.scorer.parts[0].k == 3 and outer.either.k == 3
    later = made("Open", make={"_target_": "users_own.Scorer", "_partial_": True, "strict": 1}).settings["make"]
    assert (later(k=5).k, later(k=5).strict) == (5, True)
    assert vars(made("Open", x={"_target_": "users_own.Loose", "k": 1, "j": [2]}).settings["x"]) == {
        "k": 1,
        "more": {"j": [2]},
    }
    assert made(fn=scorer).fn(4) == 7, "an object that can be called, where a function is wanted"


def test_a_node_inside_a_functions_node_is_an_object_too(own):
    loss = function({"_target_": "users_own.scored", "scorer": {"_target_": "users_own.Scorer", "k": 3}}, "loss")
    assert loss(1) == 4.0
    own_schema = OmegaConf.structured(schema_of(own.Part))
    own_schema._target_, own_schema.mode = "users_own.fn", "a"
    assert function(own_schema, "loss")(3) == 3.0, "knobs of another, at their defaults, are left out"


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"scorer": {"kk": 3}}, ".scorer.kk: Scorer has no such knob; did you mean algo.scorer.k?"),
        ({"scorer": {"k": -1}}, ".scorer.k must be at least 0, got -1"),
        ({"scorer": {"k": "x"}}, ".scorer.k: Value 'x' of type 'str' could not be converted to Integer"),
        ({"scorer": {}}, ".scorer.k has no value"),
        ({"scorer": {"k": 1, "strict": 2}}, ".scorer.strict: Value '2' is not a valid bool"),
        ({"scorer": {"_args_": [1]}}, ".scorer._args_: give the arguments of users_own.Scorer by name"),
        ({"scorers": [{"_target_": "os.system"}]}, ".scorers._target_='os.system': nothing of os may be named"),
        ({"by_name": {"a": {"_target_": "users_own.no"}}}, ".by_name.a._target_='users_own.no': module users_own has"),
        (
            {"by_name": {"a": {"_target_": "users_own.Thread"}}},
            ".by_name.a._target_='users_own.Thread' is a class of th",
        ),
        ({"by_name": {"a": {"_target_": "torch.nn.Linear"}}}, ".by_name.a._target_='torch.nn.Linear': torch is a libr"),
        (
            {"by_name": {"a": {"_target_": "users_own.Raises"}}},
            ".by_name.a: Raises cannot be made: RuntimeError: broken",
        ),
        ({"scorer": {"_target_": "users_own.Mine"}}, ".scorer must be Scorer, got Mine"),
        ({"n": {"k": 3}}, ".n must be int, got Scorer"),
    ],
)
def test_a_node_inside_is_refused_by_its_key(refused, knobs, says):
    knobs = {
        name: {"_target_": "users_own.Scorer", **value} if name in ("scorer", "n") else value
        for name, value in knobs.items()
    }
    assert refused("Scored", **knobs).startswith(f"algo{says}")


def test_an_argument_of_a_function_has_the_type_of_its_annotation(own):
    scored = {"_target_": "users_own.scored", "scorer": 1}
    assert function({**scored, "scale": "2"}, "loss").keywords["scale"] == 2.0
    for knobs, says in (
        ({"scale": "x"}, "loss.scale: Value 'x' of type 'str' could not be converted to Float"),
        ({"strict": -1}, "loss.strict: Value '-1' is not a valid bool"),
    ):
        with pytest.raises(ConfigError, match=f"^{says}"):
            function({**scored, **knobs}, "loss")


# --- live objects -----------------------------------------------------------------------------------------------------


def test_a_factory_leaves_the_live_objects_to_its_caller(own):
    node = {"_target_": "users_own.Live", "lr": 3}
    made = factory(node, own.Base, "trainer.optim")(["weights"])
    assert (made.params, made.lr, made.betas) == (["weights"], 3.0, [0.9])
    assert factory({**node, "params": "???"}, own.Base, "trainer.optim")(params=1).params == 1
    for knob, message in (
        ({"lr": 0}, "lr must be above 0, got 0.0"),
        ({"r": 1}, "r: Live has no such knob; did you mean"),
    ):
        with pytest.raises(ConfigError, match=f"^trainer.optim.{message}"):
            factory({**node, **knob}, own.Base, "trainer.optim")
    with pytest.raises(ConfigError, match="^trainer.optim.params has no value"):
        build(node, own.Base, "trainer.optim")


# --- schemas ----------------------------------------------------------------------------------------------------------


def test_a_schema_holds_the_target_and_every_knob(own):
    node = OmegaConf.structured(schema_of(own.Required))
    assert node._target_ == "users_own.Required" and OmegaConf.is_missing(node, "path")
    assert set(node) == {"_target_", *parameters(own.Required)}
    assert (node.n, node.share, node.betas, node.table) == (3, None, [0.9, 0.99], {"one": 1.0})
    kinds = schema_of(own.Plain).__annotations__
    assert (kinds["n"], kinds["share"], kinds["mode"], kinds["by"]) == (int, float | None, str, str | None)
    assert (kinds["betas"], kinds["model"], kinds["bonus"]) == (list[float], FrozenModelConfig | None, float)
    assert kinds["teacher"] is kinds["fn"] is kinds["maybe"] is Any
    assert schema_of(own.Part, overridable=False).__annotations__["maybe"] == dict[str, dict[str, float]] | None


def test_defaults_are_not_shared(own):
    one, two = (schema_of(own.Part)() for _ in range(2))
    one.betas.append(3), one.table.clear()
    assert (two.betas, two.table) == ([0.9, 0.99], {"one": 1.0})


def test_a_composed_node_is_built_whatever_form_it_has(own):
    config = OmegaConf.create({"algo": OmegaConf.structured(schema_of(own.Plain))})
    config.algo.place = own.Place(city="there")
    config.algo.n = 5
    forms = [config.algo, OmegaConf.to_object(config.algo), OmegaConf.to_container(config.algo)]
    assert [vars(build(form, own.Base, "algo"))["n"] for form in forms] == [5] * 3
    assert all(build(form, own.Base, "algo").place == own.Place(city="there") for form in forms)


def test_interpolations_are_resolved(own):
    config = OmegaConf.create({"n": 9, "algo": {"_target_": "users_own.Part", "n": "${n}"}})
    assert build(config.algo, own.Base, "algo").n == 9


@pytest.mark.parametrize("form", [lambda node: node, OmegaConf.to_object])
def test_a_replaced_target_drops_what_only_the_old_class_took_while_at_its_default(own, form):
    node = OmegaConf.structured(schema_of(own.Part))
    node._target_ = "users_own.Fewer"
    assert build(form(node), own.Base, "algo").n == 3, "a knob that both take stays as the config has it"
    node.mode = "b"
    with pytest.raises(ConfigError, match="^algo.mode: Fewer has no such knob; its knobs: n"):
        build(form(node), own.Base, "algo")
    node = OmegaConf.structured(schema_of(own.Part))
    node._target_ = "users_own.Plain"
    assert vars(build(form(node), own.Base, "algo")) == {**vars(own.Part()), "bonus": 1.0}


def test_a_key_that_was_appended_to_a_typed_node_is_seen(own):
    node = OmegaConf.structured(schema_of(own.Part))
    OmegaConf.set_struct(node, False)
    node = OmegaConf.to_object(node)
    node.bonus = 3
    with pytest.raises(ConfigError, match="^algo.bonus: Part has no such knob"):
        build(node, own.Base, "algo")
    node._target_ = "users_own.Plain"
    assert build(node, own.Base, "algo").bonus == 3.0


# --- bounds -----------------------------------------------------------------------------------------------------------

BOUNDS = [
    ((Ge(1),), "at least 1", [1, 1e9], [0.999]),
    ((Gt(0),), "above 0", [1e-9], [0]),
    ((Le(2),), "at most 2", [2, -5], [2.1]),
    ((Lt(2),), "below 2", [1.9], [2]),
    ((Ge(0), Le(1)), "from 0 to 1", [0, 1], [-0.1, 1.1]),
    ((Ge(0), Lt(1)), "from 0 to below 1", [0, 0.99], [-0.1, 1]),
    ((Gt(0), Lt(1)), "above 0 and below 1", [0.5], [0, 1]),
    ((Gt(0), Le(1)), "above 0 and at most 1", [1, 0.1], [0, 1.01]),
]


@pytest.mark.parametrize(("constraints", "words", "inside", "outside"), BOUNDS)
def test_bounds_and_their_words(constraints, words, inside, outside):
    annotation = Annotated.__class_getitem__((float, *constraints))
    for value in inside:
        check_value(annotation, value, "k")
        check_value(annotation | None, value, "k")
    for value in [*outside, float("nan"), float("inf"), -float("inf")]:
        for kind, held in ((annotation, value), (annotation | None, value), (dict[str, annotation], {"a": value})):
            with pytest.raises(ConfigError) as caught:
                check_value(kind, held, "k")
            assert str(caught.value) == f"k{'.a' if held is not value else ''} must be {words}, got {value}"
    check_value(annotation | None, None, "k")


@given(st.floats(), st.integers(-3, 3), st.integers(-3, 3))
def test_a_bounded_number_passes_exactly_where_it_is_finite_and_inside(value, low, high):
    inside = low <= value < high
    try:
        check_value(Annotated[float, Ge(low), Lt(high)], value, "k")
        assert inside
    except ConfigError:
        assert not inside


def test_choices_beside_other_kinds():
    check_value(Literal["auto"] | int, 3, "k")
    check_value(Literal["auto"] | int, "auto", "k")
    check_value(Literal["auto"] | str, "other", "k")
    check_value(Annotated[int, Ge(1)] | str, "other", "k")
    for kind, value, message in (
        (Literal["auto"] | int, "outo", "k='outo': choose auto"),
        (Literal["auto"] | Annotated[int, Ge(1)], 0, "k must be at least 1, got 0"),
        (Literal["a", "b", "c"], None, "k=None: choose a, b or c"),
        (Annotated[float, Ge(0)], "x", "k must be a number, got 'x'"),
        (list[Literal["a", "b"]], ["a", "c"], "k='c': choose a or b"),
    ):
        with pytest.raises(ConfigError) as caught:
            check_value(kind, value, "k")
        assert str(caught.value) == message


@pytest.mark.parametrize("value", [-1, 2, "-1", "2", 10**30])
def test_an_integer_other_than_0_and_1_is_no_bool(value):
    with pytest.raises(ConfigError, match=r"^k.strict: Value .* is not a valid bool: write true or false"):
        converted({"strict": value}, {"strict": bool}, "k")
    with pytest.raises(ConfigError, match=r"^k must be true or false, got"):
        check_value(bool, value, "k")


@pytest.mark.parametrize(
    ("values", "found"), [([True, 1, "1", "true", "yes", "on", "Y"], True), ([False, 0, "0", "no", "off"], False)]
)
def test_what_yaml_and_hydra_take_for_a_bool_is_one(values, found):
    assert [converted({"x": value}, {"x": bool | None}, "k")["x"] for value in values] == [found] * len(values)


def test_a_dataclass_is_checked_field_by_field():
    @dataclass
    class Inner:
        n: Annotated[int, Ge(1)] = 1

    @dataclass
    class Outer:
        inner: Inner = field(default_factory=Inner)
        many: dict[str, Inner] = field(default_factory=dict)

    check_value(Outer, Outer(), "")
    for outer, key in ((Outer(inner=Inner(0)), "inner.n"), (Outer(many={"x": Inner(0)}), "many.x.n")):
        with pytest.raises(ConfigError, match=f"^{key} must be at least 1, got 0"):
            check_value(Outer, outer, "")


def test_every_component_of_the_project_has_a_schema_that_builds_it():
    from prl.orchestrator.filters.gibberish import Gibberish
    from prl.orchestrator.filters.repetition import Repetition

    for cls in (GRPOAlgorithm, Gibberish, Repetition):
        assert build(schema_of(cls)(), cls, "x") == cls()
        assert MISSING not in dataclasses.asdict(schema_of(cls)()).values()


def test_a_constructor_that_keeps_knobs_from_its_base_class_is_told_how_to_pass_them():
    class Closed(GRPOAlgorithm):
        def __init__(self, *, gamma: int = 1):
            super().__init__()

    with pytest.raises(
        ConfigError, match=r"^algo\.sampling: Closed has no such knob; \w+ has: let __init__ take \*\*knobs"
    ):
        checked_knobs({"_target_": "mine.Closed", "gamma": 2, "sampling": {"source": "policy"}}, Closed, "algo")
