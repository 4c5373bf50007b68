"""What is refused of the filters before anything starts, and by which key."""

import math
from dataclasses import dataclass
from typing import Annotated

import pytest
from annotated_types import Le

from prl.errors import ConfigError
from prl.orchestrator.filters.base import Filter, build_filters
from prl.orchestrator.filters.gibberish import Gibberish
from prl.orchestrator.filters.repetition import Repetition

GIBBERISH = "prl.orchestrator.filters.gibberish.Gibberish"
REPETITION = "prl.orchestrator.filters.repetition.Repetition"
TARGETS = {"gibberish": GIBBERISH, "repetition": REPETITION}


def refused(nodes, slot="filters.post_batch"):
    with pytest.raises(ConfigError) as caught:
        build_filters(nodes, slot)
    return str(caught.value)


@pytest.mark.parametrize("slot", ["filters.pre_batch", "filters.post_batch", "envs.math.filters.pre_batch"])
@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("gibberish.mode", "prob", "=prob: "),
        ("gibberish.token_id_threshold", -1, "="),
        ("gibberish.logprob_offset", -0.5, "="),
        ("gibberish.logprob_offset", math.nan, "="),
        ("gibberish.threshold", 0.5, "="),
        ("gibberish.threshold", math.nan, "="),
        ("repetition.mode", "token", "=token: "),
        ("repetition.window", 0, "="),
        ("repetition.n", 0, "="),
        ("repetition.prob_threshold", 1.0, "="),
        ("repetition.prob_threshold", 0.0, "="),
        ("repetition.prob_threshold", math.nan, "="),
        ("repetition.threshold", 1.0, "="),
        ("repetition.threshold", -0.1, "="),
        ("repetition.enforce", "often", "="),
        ("repetition.enforce", None, "=None"),
        ("repetition.treshold", 0.5, ": Repetition has no such option; did you mean @repetition.threshold?"),
    ],
)
def test_filter_knobs_out_of_range(slot, key, value, says):
    name, knob = key.split(".")
    message = refused({name: {"_target_": TARGETS[name], knob: value}}, slot)
    assert message.startswith(f"{slot}.{key}{says.replace('@', slot + '.')}")


@pytest.mark.parametrize(
    ("name", "mode", "knob", "value", "reader"),
    [
        ("repetition", None, "threshold", 0.4, "ngram"),  # the mode's own default, and the documents' example
        ("repetition", None, "threshold", 0.7, "ngram"),
        ("repetition", "prob", "n", 4, "ngram"),
        ("repetition", "ngram", "window", 3000, "prob"),
        ("repetition", "ngram", "prob_threshold", 0.9, "prob"),
        ("gibberish", None, "threshold", -4.0, "mean_logprob"),
        ("gibberish", "mean_logprob", "token_id_threshold", 0, "token"),
        ("gibberish", "mean_logprob", "logprob_offset", 2.0, "token"),
    ],
)
def test_a_knob_that_the_mode_does_not_read_is_refused_naming_the_mode(name, mode, knob, value, reader):
    where = f"filters.post_batch.{name}"
    node = {"_target_": TARGETS[name], knob: value}
    default = {"repetition": "prob", "gibberish": "token"}[name]
    assert refused({name: node if mode is None else {**node, "mode": mode}}) == (
        f"{where}.{knob}={value}: {where}.mode={mode or default} does not read it; choose {where}.mode={reader}, "
        f"or leave {knob} out"
    )
    build_filters({name: {**node, "mode": reader}}, "filters.post_batch")


def test_filter_knobs_at_their_bounds():
    for mode, knobs in (("prob", {"window": 1, "prob_threshold": 1e-9}), ("ngram", {"n": 1, "threshold": 0.0})):
        (made,) = build_filters({"a": {"_target_": REPETITION, "mode": mode, **knobs}}, "filters.pre_batch").values()
        assert {knob: made.setting(knob) for knob in knobs} == knobs
    for mode, knobs in (
        ("token", {"token_id_threshold": 0, "logprob_offset": 0.0}),
        ("mean_logprob", {"threshold": 0.0}),
    ):
        (made,) = build_filters({"a": {"_target_": GIBBERISH, "mode": mode, **knobs}}, "filters.pre_batch").values()
        assert {knob: made.setting(knob) for knob in knobs} == knobs, "0 is a value, not the default"


def test_the_defaults_of_each_mode():
    repetition, gibberish = Repetition(), Gibberish()
    assert (repetition.enforce, repetition.mode, gibberish.enforce, gibberish.mode) == (False, "prob", False, "token")
    assert [repetition.setting(knob) for knob in ("window", "prob_threshold", "n", "threshold")] == [3000, 0.99, 4, 0.4]
    found = [gibberish.setting(knob) for knob in ("token_id_threshold", "logprob_offset", "threshold")]
    assert found == [100_000, 2.0, -4.0]


@dataclass(kw_only=True)
class Short(Filter):
    """A filter of the user's own, with knobs and a check."""

    window: Annotated[int, Le(9)]
    mode: str = "odd"

    def check(self, where):
        super().check(where)
        if self.mode == "never":
            raise ConfigError(f"{where} is never right")
        if self.mode == "broken":
            raise TypeError("a bug")

    def matches(self, rollout):
        return False


def test_a_filter_of_ones_own_checks_its_own_knobs():
    node = {"_target_": f"{__name__}.Short", "enforce": True, "window": -1}
    (made,) = build_filters({"short": node}, "filters.post_batch").values()
    assert type(made) is Short and (made.enforce, made.window, made.mode) == (True, -1, "odd")
    where = "filters.post_batch.short"
    assert refused({"short": {**node, "window": 10}}).startswith(f"{where}.window=")
    assert refused({"short": {**node, "window": "ten"}}).startswith(f"{where}.window=ten")
    assert refused({"short": {**node, "mode": "never"}}) == f"{where} is never right"
    assert refused({"short": {**node, "mode": "broken"}}).startswith(f"{where}: Short.check failed: TypeError: a bug (")
    del node["window"]
    assert refused({"short": node}) == f"{where}.window has no value: give one, {where}.window=<value>"


class Static(Short):
    @staticmethod
    def check(where):
        raise ConfigError(f"{where} is never right")


def test_a_check_that_is_a_static_method_is_run_as_well():
    nodes = {"static": {"_target_": f"{__name__}.Static", "window": 1}}
    assert refused(nodes) == "filters.post_batch.static is never right"


def test_a_filter_type_stands_once_in_a_slot():
    nodes = {"repetition": {"_target_": REPETITION}, "again": {"_target_": REPETITION, "window": 9}}
    message = refused(nodes, "filters.pre_batch")
    assert message == (
        f"filters.pre_batch.again and filters.pre_batch.repetition are both {REPETITION}: a filter type may stand only "
        "once in a slot"
    )
    build_filters({"a": {"_target_": REPETITION}, "b": {"_target_": GIBBERISH}}, "filters.pre_batch")


def test_a_filter_without_a_schema_has_its_defaults():
    (made,) = build_filters({"gibberish": {"_target_": GIBBERISH, "enforce": True}}, "filters.pre_batch").values()
    assert made == Gibberish(enforce=True)


def test_what_names_no_filter_is_refused_with_its_key():
    where = "filters.post_batch.mine"
    for target in ("prl.orchestrator.batcher.Batcher", "prl.orchestrator.filters.base.apply_filters"):
        says = f"{where}._target_={target!r} is not a subclass of prl.orchestrator.filters.base.Filter"
        assert refused({"mine": {"_target_": target}}) == says
    assert refused({"mine": {"enforce": True}}).startswith(f"{where} has no _target_")
    assert refused({"mine": {"_target_": "prl.orchestrator.filters.base.Filter"}}).startswith(
        f"{where}: making Filter failed"
    )


def test_a_filter_is_left_out_with_a_tilde_and_not_by_null():
    message = refused({"repetition": None}, "filters.pre_batch")
    assert message == "filters.pre_batch.repetition=null: to leave the filter out write '~filters.pre_batch.repetition'"
