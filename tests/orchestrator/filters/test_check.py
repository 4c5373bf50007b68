"""What is refused of the filters before anything starts, and by which key."""

import math
from types import SimpleNamespace

import pytest

from prl.errors import ConfigError
from prl.orchestrator.filters.base import Filter
from prl.orchestrator.filters.check import check_filters
from prl.orchestrator.filters.repetition import RepetitionConfig


def put(config, key, value):
    slot, name, knob = key.removeprefix("filters.").split(".")
    setattr(getattr(config.filters, slot)[name], knob, value)


def refused(config):
    with pytest.raises(ConfigError) as caught:
        check_filters(config.filters)
    return str(caught.value)


@pytest.mark.parametrize("slot", ["pre_batch", "post_batch"])
@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("gibberish.mode", "prob", "='prob': choose one of token, mean_logprob"),
        ("gibberish.token_id_threshold", -1, "must be at least 0, got -1"),
        ("gibberish.logprob_offset", -0.5, "must be at least 0, got -0.5"),
        ("gibberish.logprob_offset", math.nan, "must be at least 0, got nan"),
        ("gibberish.threshold", 0.5, "must be at most 0, got 0.5"),
        ("gibberish.threshold", math.nan, "must be at most 0, got nan"),
        ("repetition.mode", "token", "='token': choose one of prob, ngram"),
        ("repetition.window", 0, "must be at least 1, got 0"),
        ("repetition.n", 0, "must be at least 1, got 0"),
        ("repetition.prob_threshold", 1.0, "must be above 0 and below 1, got 1.0"),
        ("repetition.prob_threshold", 0.0, "must be above 0 and below 1, got 0.0"),
        ("repetition.prob_threshold", math.nan, "must be above 0 and below 1, got nan"),
        ("repetition.threshold", 1.0, "must be from 0 to below 1, got 1.0"),
        ("repetition.threshold", -0.1, "must be from 0 to below 1, got -0.1"),
    ],
)
def test_filter_knobs_out_of_range(config, slot, key, value, says):
    put(config, f"filters.{slot}.{key}", value)
    assert f"filters.{slot}.{key}" in (message := refused(config)) and says in message


def test_filter_knobs_at_their_bounds(config):
    for key, value in (("window", 1), ("n", 1), ("prob_threshold", 1e-9), ("threshold", 0.0), ("mode", "ngram")):
        put(config, f"filters.post_batch.repetition.{key}", value)
    bounds = (("token_id_threshold", 0), ("logprob_offset", 0.0), ("threshold", 0.0), ("mode", "mean_logprob"))
    for key, value in bounds:
        put(config, f"filters.pre_batch.gibberish.{key}", value)
    check_filters(config.filters)


class Short(Filter):
    """Of somebody's own: its knobs are its own to check."""

    @classmethod
    def check(cls, config, where):
        if config.window > 9:
            raise ConfigError(f"{where}.window must be at most 9")

    def matches(self, rollout):
        return False


def test_a_filter_of_ones_own_checks_its_own_knobs(config):
    node = SimpleNamespace(_target_=f"{__name__}.Short", enforce=True, window=-1, mode="odd")
    config.filters.post_batch["short"] = node
    check_filters(config.filters)
    node.window = 10
    assert refused(config) == "filters.post_batch.short.window must be at most 9"
    node.window = "ten"
    assert refused(config).startswith("filters.post_batch.short: Short.check failed: TypeError: ")


class Static(Short):
    @staticmethod
    def check(config, where):
        raise ConfigError(f"{where} is never right")


def test_a_check_that_is_no_class_method_is_run_as_well(config):
    config.filters.pre_batch["static"] = SimpleNamespace(_target_=f"{__name__}.Static", enforce=True)
    assert refused(config) == "filters.pre_batch.static is never right"


def test_a_filter_stands_once_in_a_slot(config):
    config.filters.post_batch["again"] = RepetitionConfig(window=9)
    message = refused(config)
    assert "filters.post_batch.again and filters.post_batch.repetition are both prl.orchestrator.filters.rep" in message


def test_a_filter_without_its_schema_is_told_how_to_get_it(config):
    config.filters.pre_batch["gibberish"] = SimpleNamespace(
        _target_="prl.orchestrator.filters.gibberish.Gibberish", enforce=True
    )
    message = refused(config)
    assert "filters.pre_batch.gibberish: Gibberish reads 'mode', which its config does not have" in message
    assert "+schema/filter@filters.pre_batch.gibberish=<name>" in message


def test_a_filter_is_left_out_with_a_tilde_and_not_by_null(config):
    config.filters.pre_batch["repetition"] = None
    message = refused(config)
    assert message == "filters.pre_batch.repetition=null: to leave the filter out write '~filters.pre_batch.repetition'"
