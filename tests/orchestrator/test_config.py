"""Knobs of the orchestrator that contradict each other."""

import typing

import pytest
from annotated_types import Ge, Le, Lt

from prl.errors import ConfigError
from prl.orchestrator.config import EvalConfig, OrchestratorConfig


@pytest.mark.parametrize("sizes", [{"batch_size": None}, {"token_batch_size": 100}])
def test_exactly_one_size_of_a_batch(sizes):
    with pytest.raises(
        ConfigError, match=r"set exactly one of orchestrator\.batch_size and orchestrator\.token_batch_size"
    ):
        OrchestratorConfig(**sizes).check("orchestrator")
    OrchestratorConfig(batch_size=None, token_batch_size=100).check("orchestrator")


@pytest.mark.parametrize(
    ("k", "limit", "refused"), [(1, 0, True), (9, 8, True), (8, 8, False), (1, 1, False), (0, 8, False)]
)
def test_an_age_limit_below_the_async_level_is_refused(k, limit, refused):
    config = OrchestratorConfig(max_async_level=k, max_off_policy_steps=limit)
    if refused:
        with pytest.raises(
            ConfigError, match=rf"x\.max_off_policy_steps={limit} is below x\.max_async_level={k}.*={k} or more"
        ):
            config.check("x")
    else:
        config.check("x")
        assert config.age_limit == (limit if k else 0), "on-policy training allows no age"


@pytest.mark.parametrize(
    ("knobs", "why", "limit"),
    [
        ({"max_async_level": 0}, "max_async_level=0", 0),
        ({"max_async_level": 2, "strict_async_level": True}, "strict_async_level=true", 2),
        ({"max_async_level": 0, "strict_async_level": True}, "strict_async_level=true", 0),
    ],
)
def test_an_age_limit_that_cannot_be_reached_is_refused_and_the_default_fits_any(knobs, why, limit):
    with pytest.raises(ConfigError, match=rf"x\.max_off_policy_steps=4 contradicts x\.{why}.*set it to {limit}"):
        OrchestratorConfig(**knobs, max_off_policy_steps=4).check("x")
    for fits in ({}, {"max_off_policy_steps": limit}):
        config = OrchestratorConfig(**knobs, **fits)
        config.check("x")
        assert config.age_limit == limit


@pytest.mark.parametrize(
    ("cls", "knob", "bounds"),
    [
        (OrchestratorConfig, "group_size", [Ge(1)]),
        (OrchestratorConfig, "max_async_level", [Ge(0)]),
        (OrchestratorConfig, "oversampling_factor", [Ge(1)]),
        (OrchestratorConfig, "batch_timeout_s", [Ge(0.001), Le(1e9)]),
        (OrchestratorConfig, "max_error_share", [Ge(0), Lt(1)]),
        (EvalConfig, "k", [Ge(1)]),
        (EvalConfig, "num_tasks", [Ge(1)]),
    ],
)
def test_bounds_stand_beside_the_knob(cls, knob, bounds):
    assert list(typing.get_type_hints(cls, include_extras=True)[knob].__metadata__) == bounds
