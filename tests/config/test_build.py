"""Components from config nodes: what a class takes, in which types, and the key of what is refused."""

import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from prl.base.errors import ConfigError
from prl.config.build import build, maker, name_of, plain, read
from prl.config.compose import typed_config
from prl.config.model_reference import FrozenModelConfig
from prl.config.schema import EnvConfig, TrainConfig
from prl.config.trainer import TrainerConfig

MODULE = """
from collections.abc import Callable
from dataclasses import replace
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal
from annotated_types import Ge, Gt, Lt
from prl.config.model_reference import FrozenModelConfig
from prl.base.errors import ConfigError

if TYPE_CHECKING:
    from nowhere import Unknown

class Base:
    pass

@dataclass
class Place:
    city: str = "here"
    floor: Annotated[int, Ge(0)] = 0
    kind: Literal["flat", "house"] = "flat"

@dataclass(kw_only=True)
class Part(Base):
    n: Annotated[int, Ge(1)] = 3
    share: Annotated[float, Ge(0), Lt(1)] | None = None
    mode: Literal["a", "b"] = "a"
    strict: bool = False
    betas: tuple[float, float] = (0.9, 0.99)
    table: dict[str, float] = field(default_factory=lambda: {"one": 1.0})
    place: Place = field(default_factory=Place)
    teacher: FrozenModelConfig | str | None = None
    fn: Callable[[Any], float] | None = None

    def check(self, where):
        if self.n == 13:
            raise ZeroDivisionError("unlucky")
        if self.n == 14:
            raise ConfigError(f"{where}.n=14")

class Plain(Part):
    def __init__(self, *, bonus: Annotated[float, Gt(0)] = 1.0, **options):
        super().__init__(**options)
        self.bonus = bonus

class Required(Part):
    def __init__(self, *, path: str, late: "Unknown" = None, **options):
        super().__init__(**options)
        self.path, self.late = path, late

class Closed(Part):
    def __init__(self, *, gamma: int = 1):
        super().__init__()

class Fewer(Base):
    def __init__(self, n: int = 5):
        self.n = n

class Open(Base):
    def __init__(self, **settings):
        self.settings = settings

class Live(Base):
    def __init__(self, params, lr: Annotated[float, Gt(0)] = 0.1):
        self.params, self.lr = params, lr

class Raises(Base):
    def __init__(self):
        raise RuntimeError("broken")

@dataclass
class Scorer:
    k: Annotated[int, Ge(0)]
    parts: Any = ()
    def __call__(self, x):
        return x + self.k

class Worse(Scorer):
    pass

class Leaves:  # a trace where it is made
    made = []
    def __init__(self, *args, **options):
        self.made.append(options)

class Scored(Base):
    def __init__(self, *, scorer: Scorer | None = None, by_name: dict[str, Any] | None = None):
        self.scorer, self.by_name = scorer, by_name

def passes(x, **settings: str | int): return settings
def fn(x, scale: float = 1.0, *, extra=0): return x * scale + extra
def none(): pass
async def later(x): return x
"""


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
    """`made(name, **options)`: the component, built as `algo`."""
    return lambda name="Part", **options: build({"_target_": f"users_own.{name}", **options}, own.Base, "algo")


def test_options_are_converted_by_their_annotations(made, own):
    place = {"floor": "2", "kind": "house"}
    part = made(n="4", share=0, betas=[0, 0.5], table={"two": 2}, place=place, strict="yes")
    assert part == own.Part(
        n=4, share=0.0, betas=(0.0, 0.5), table={"two": 2.0}, place=own.Place(floor=2, kind="house"), strict=True
    )
    assert type(part.n) is int and type(part.share) is type(part.table["two"]) is float
    assert made(teacher={"name": "m", "base_url": ["http://a"]}).teacher == FrozenModelConfig("m", ["http://a"])
    assert made(teacher="policy").teacher == "policy"
    assert made("Plain", bonus=2, n=7).bonus == 2.0 and made("Plain", n=7).n == 7
    assert made("Required", path=3, late={"any": 1}).path == "3"
    assert made("Open", any=1).settings == {"any": 1}
    assert made(_partial_=True, _convert_="none") == own.Part()


SCORER = {"_target_": "users_own.Scorer", "k": 3}


@pytest.mark.parametrize(
    ("name", "options", "key"),
    [
        ("Part", {"moed": "a"}, "algo.moed"),
        ("Part", {"n": "x"}, "algo.n"),
        ("Part", {"n": 2.5}, "algo.n"),
        ("Part", {"n": True}, "algo.n=true"),
        ("Part", {"table": {"a": False}}, "algo.table.a=false"),
        ("Part", {"betas": [0.5, True]}, "algo.betas.1=true"),
        ("Part", {"n": None}, "algo.n"),
        ("Part", {"n": 0}, "algo.n"),
        ("Part", {"n": 14}, "algo.n"),
        ("Part", {"n": 13}, "algo: Part.check failed: ZeroDivisionError"),
        ("Part", {"share": 1}, "algo.share"),
        ("Part", {"share": float("nan")}, "algo.share"),
        ("Part", {"mode": "c"}, "algo.mode"),
        ("Part", {"strict": 2}, "algo.strict"),
        ("Part", {"betas": 0.9}, "algo.betas"),
        ("Part", {"table": {"a": "x"}}, "algo.table.a"),
        ("Part", {"place": {"floor": -1}}, "algo.place.floor"),
        ("Part", {"place": {"cty": "x"}}, "algo.place.cty"),
        ("Part", {"place": {"kind": "tent"}}, "algo.place.kind"),
        ("Part", {"fn": 3}, "algo.fn"),
        ("Part", {"fn": {"_target_": "???"}}, "algo.fn has no _target_"),
        ("Part", {"fn": {"_target_": "users_own.gone"}}, "algo.fn._target_"),
        ("Plain", {"bonus": 0}, "algo.bonus"),
        ("Plain", {"n": 0}, "algo.n"),
        ("Plain", {"m": 0}, "algo.m"),
        ("Required", {}, "algo.path has no value"),
        ("Closed", {"share": 0.5}, "algo.share: Closed has no such option; Part has"),
        ("Raises", {}, "algo: making Raises failed: RuntimeError: broken"),
        ("Scored", {"scorer": {**SCORER, "kk": 3}}, "algo.scorer.kk"),
        ("Scored", {"scorer": {**SCORER, "k": -1}}, "algo.scorer.k"),
        ("Scored", {"scorer": {"_target_": "users_own.Fewer"}}, "algo.scorer"),
        ("Scored", {"by_name": {"a": {"_target_": "users_own.Raises"}}}, "algo.by_name.a"),
        ("Mine", {}, "algo._target_"),
        ("fn", {}, "algo._target_"),
        ("Scorer", {"k": 1}, "algo._target_"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(made, name, options, key):
    with pytest.raises(ConfigError) as caught:
        made(name, **options)
    assert str(caught.value).startswith(key) and "\n" not in str(caught.value)


@pytest.mark.parametrize("node", [None, {}, {"n": 3}, {"_target_": None}, {"_target_": "???"}, "x", {"_target_": "a"}])
def test_a_node_that_names_nothing_is_refused(own, node):
    for find in (lambda: build(node, own.Base, "algo"), lambda: maker(node, Callable, "algo")):
        with pytest.raises(ConfigError, match="^algo"):
            find()


def test_a_module_that_cannot_be_imported_is_named_with_its_error(tmp_path, monkeypatch, own):
    (tmp_path / "users_broken.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"^algo\._target_='users_broken\.Thing'.*ZeroDivisionError"):
        build({"_target_": "users_broken.Thing"}, own.Base, "algo")


def test_a_node_inside_is_the_object_that_it_describes(made, own):
    several = made("Scored", scorer=SCORER, by_name={"a": SCORER, "b": [1, {"c": {**SCORER, "parts": [SCORER]}}]})
    assert several.scorer == own.Scorer(3) and several.by_name["b"][1]["c"].parts == [own.Scorer(3)]
    assert made(fn=SCORER).fn(4) == 7
    assert made(fn={"_target_": "users_own.fn", "_partial_": True, "extra": 1}).fn(3) == 4.0
    assert made(fn={"_target_": None, "_partial_": True}).fn is None
    assert made("Open", make={**SCORER, "_partial_": True}).settings["make"](parts=5).parts == 5


@pytest.mark.parametrize("target", ["users_own.Leaves", "not_there.Popen"])
@pytest.mark.parametrize(
    ("name", "key", "wrapped"),
    [
        ("Part", "n", lambda node: node),
        ("Part", "mode", lambda node: node),
        ("Part", "strict", lambda node: [node]),
        ("Part", "mode", lambda node: {"deep": [node]}),
        ("Part", "share", lambda node: node),
        ("Part", "betas", lambda node: [0.9, node]),
        ("Part", "table", lambda node: node),
        ("Part", "table", lambda node: {"one": node}),
        ("Part", "place", lambda node: {"city": node}),
        ("Part", "place", lambda node: {"other": node}),
        ("Part", "place", lambda node: node),
        ("Part", "teacher", lambda node: node),
        ("Part", "teacher", lambda node: {"name": "m", "base_url": [node]}),
        ("Part", "fn", lambda node: node),
        ("Part", "fn", lambda node: [node]),
        ("Part", "fn", lambda node: {"_target_": "users_own.fn", "scale": node}),
        ("Part", "fn", lambda node: {"_target_": "users_own.fn", "x": node}),
        ("Part", "fn", lambda node: {"_target_": "users_own.passes", "any": [node]}),
        ("Plain", "bonus", lambda node: node),
        ("Required", "path", lambda node: node),
        ("Scored", "scorer", lambda node: node),
        ("Scored", "scorer", lambda node: {**SCORER, "k": node}),
        ("Scored", "scorer", lambda node: {"k": node}),
        ("Scored", "by_name", lambda node: node),
    ],
)
def test_no_object_is_made_that_the_options_type_does_not_want(made, own, name, key, wrapped, target):
    with pytest.raises(ConfigError, match=rf"^algo\.{key}"):
        made(name, **{key: wrapped({"_target_": target, "args": ["touch", "file"]})})
    assert own.Leaves.made == []


def test_an_object_is_made_of_a_class_that_the_options_type_names(made, own):
    worse = {"_target_": "users_own.Worse", "k": 1}
    assert type(made("Scored", scorer=worse).scorer) is own.Worse
    assert type(made(fn=worse).fn) is own.Worse and made(teacher={"_target_": name_of(FrozenModelConfig), "name": "m"})
    made("Open", any={"_target_": "users_own.Leaves", "x": 1})
    made("Required", path="p", late={"deep": [{"_target_": "users_own.Leaves"}]})
    assert own.Leaves.made == [{"x": 1}, {}]


# --- functions and live objects ---------------------------------------------------------------------------------------


def test_a_function_with_its_keyword_arguments(own):
    node = {"_target_": "users_own.fn", "_partial_": True, "scale": "2", "extra": 1}
    made = maker(node, Callable, "loss")
    assert made(3) == 7 and name_of(made) == name_of(own.fn) == "users_own.fn"


@pytest.mark.parametrize(
    ("node", "key"),
    [
        ({"_target_": "users_own.fn", "scael": 1}, "loss: users_own.fn"),
        ({"_target_": "users_own.fn", "x": 1}, "loss: users_own.fn"),
        ({"_target_": "users_own.fn", "scale": "x"}, "loss.scale"),
        ({"_target_": "users_own.none"}, "loss: users_own.none"),
        ({"_target_": "users_own.later"}, "loss._target_"),
        ({"_target_": "users_own.Part"}, "loss._target_"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused(own, node, key):
    with pytest.raises(ConfigError) as caught:
        maker(node, Callable, "loss")
    assert str(caught.value).startswith(key)


def test_a_maker_leaves_live_objects_to_its_caller(own):
    node = {"_target_": "users_own.Live", "lr": 3}
    made = maker(node, own.Base, "trainer.optim")(["weights"])
    assert (made.params, made.lr) == (["weights"], 3.0)
    for option, key in (({"lr": 0}, "trainer.optim.lr"), ({"r": 1}, "trainer.optim.r")):
        with pytest.raises(ConfigError, match=f"^{key}"):
            maker({**node, **option}, own.Base, "trainer.optim")


# --- typed values -----------------------------------------------------------------------------------------------------


def test_a_dataclass_is_read_with_its_types_in_any_depth(own):
    part = read(own.Part, {"n": "4", "place": {"floor": 2.0}, "table": {"two": 2}})
    assert part == own.Part(n=4, place=own.Place(floor=2), table={"two": 2.0})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"n": 0}, "config.n=0"),
        ({"n": True}, "config.n=true"),
        ({"place": {"floor": False}}, "config.place.floor=false"),
        ({"moed": "a"}, "config.moed: there is no such key; did you mean config.mode?"),
        ({"place": {"flor": 1}}, "config.place.flor: there is no such key; did you mean config.place.floor?"),
        ({"place": {"floor": -1}}, "config.place.floor=-1"),
        ({"place": "x"}, "config.place=x"),
    ],
)
def test_what_a_dataclass_does_not_take_is_refused(own, given, says):
    with pytest.raises(ConfigError) as caught:
        read(own.Part, given, "config")
    assert str(caught.value).startswith(says)


def test_a_field_without_a_value_is_refused(own):
    with pytest.raises(ConfigError, match=r"^envs\.mine\.taskset has no value"):
        read(EnvConfig, {"weight": 1}, "envs.mine")
    with pytest.raises(ConfigError, match=r"^envs\.mine\.taskset has no value"):
        typed_config(TrainConfig, {"envs": {"mine": {"weight": 1}}})


def test_a_node_of_the_users_class_keeps_its_further_options(tmp_path, monkeypatch):
    (tmp_path / "users_trainer.py").write_text(
        "from prl.trainer.trainer import Trainer\n"
        "class Mine(Trainer):\n"
        "    def __init__(self, *, mine: int, **options): super().__init__(**options)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    node = {"_target_": "users_trainer.Mine", "seq_len": "9", "mine": 1}
    trainer = read(TrainerConfig, node, "trainer")
    assert trainer.seq_len == 9 and plain(trainer)["mine"] == 1
    assert plain(replace(trainer, seq_len=10)) == plain(trainer) | {"seq_len": 10}
    # `max_steps` is no option of a trainer, but given to it.
    for target, name in (
        ("users_trainer.Mine", "mnie"),
        *((TrainerConfig._target_, each) for each in ("mine", "max_steps")),
    ):
        with pytest.raises(ConfigError, match=f"^trainer.{name}: there is no such key"):
            read(TrainerConfig, {"_target_": target, name: 1}, "trainer")
