"""The catalogue of metrics, `prl/METRICS.md`: every key that is written is in it, with the right entry."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import prl
import prl.trainer
from prl.orchestrator.config import EvalConfig
from prl.rollouts.rollout import ERROR_KINDS
from prl.wire.components import COMPONENTS

PAGE = (Path(prl.__file__).parent / "METRICS.md").read_text()
TABLES = {
    section.partition("\n")[0]: re.findall(r"^\| `(.+)` \| .+ \| .+ \|$", section, re.MULTILINE)
    for section in PAGE.split("\n### ")[1:]
}
"""The keys that each process writes, as they stand on the page."""
WILDCARDS = {
    "{all,<env>}": r"[^/]+",
    "<env>": r"(?!all/)[^/]+",
    "<kind>": "|".join(ERROR_KINDS).join("()"),
    "<component>": "|".join(COMPONENTS).join("()"),
    "<pool>": "(easy|normal|hard)",
}


def matches(entry, key):
    """Whether `key` is one of the keys that an entry stands for."""
    parts = re.split(r"({all,<env>}|<\w+>)", entry)
    return re.fullmatch("".join(WILDCARDS.get(p, ".+" if p[:1] == "<" else re.escape(p)) for p in parts), key)


def metric_of(key):
    """The entry of a key, the most specific one; None for a key that is not on the page."""
    found = [entry for entries in TABLES.values() for entry in entries if matches(entry, key)]
    return max(found, key=lambda entry: len(re.sub(r"{all,<env>}|<\w+>", "", entry)), default=None)


@pytest.mark.parametrize(
    ("key", "entry"),
    [
        ("reward/all/mean", "reward/{all,<env>}/mean"),
        ("reward/my.env-2/arrived", "reward/{all,<env>}/arrived"),
        ("errors/all/tool_call", "errors/{all,<env>}/<kind>"),
        ("filters/math/is_filtered", "filters/{all,<env>}/is_filtered"),
        ("filters/math/gibberish", "filters/{all,<env>}/<filter>"),
        ("eval/math/avg@16", "eval/<env>/avg@<k>"),
        ("eval/math/correct", "eval/<env>/<metric>"),
        ("metric/math/tools/used", "metric/<env>/<metric>"),
        ("loss/ref_kl", "loss/<component>"),
        ("loss/mean", "loss/mean"),
        ("tokens/trained", "tokens/trained"),
        ("tokens/ce", "tokens/<component>"),
    ],
)
def test_a_key_has_its_entry(key, entry):
    assert metric_of(key) == entry


@pytest.mark.parametrize("key", ["reward/mean", "errors/math/rain", "pool/all/easy", "loss/other", "surprise"])
def test_a_key_that_nobody_declared_has_none(key):
    assert metric_of(key) is None


def test_no_key_is_declared_twice():
    entries = [entry for entries in TABLES.values() for entry in entries]
    assert len(entries) == len(set(entries)) == PAGE.count("\n| `")
    assert set(TABLES) == {"Orchestrator", "Evaluation", "Trainer"} and all(TABLES.values())


def test_every_key_of_a_run_is_in_the_catalogue(run_lines):
    keys = set().union(*run_lines)
    assert not [key for key in keys if metric_of(key) is None]
    expected = {entry for entry in TABLES["Orchestrator"] if entry != "metric/<env>/<metric>"}
    assert not expected - {metric_of(key) for key in keys}, "and nothing else is in it"


@pytest.fixture
async def run_lines(make_env, pool, zero, run_to_end):
    """The lines of a run with two envs, pools, filtering, oversampling, filters in both slots and an evaluation."""
    buffer = {"easy_threshold": 1.0, "online_difficulty_filtering": True}
    envs = [
        make_env(name, held_out=2, buffer=buffer, pre={"zero": zero(False)}, post={"zero": zero(True)}) for name in "ab"
    ]
    return await run_to_end(envs, steps=3, eval=EvalConfig(every=1), oversampling_factor=1.5)


def test_every_metric_that_the_trainer_names_is_in_the_catalogue():
    """String keys of dicts called metrics and arguments of `Totals.add`, read from the source of the trainer."""
    found = set()
    for path in Path(inspect.getfile(prl.trainer)).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("add", "add_count"):
                found |= {arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)}
            if isinstance(node, ast.keyword) and node.arg == "metrics" and isinstance(node.value, ast.Dict):
                found |= {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
    assert {"tokens/trained", "entropy/all/mean", "nll", "is_masked", "ref_kl/is_masked", "is_clipped"} <= found
    assert not [key for key in found if metric_of(key) is None]
