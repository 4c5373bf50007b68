"""Model references: what is one, where they stand, and what is refused before anything starts."""

import copy
import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from prl.base.errors import ConfigError
from prl.config.compose import compose
from prl.config.model_reference import (
    POLICY,
    FrozenModelConfig,
    SourceConfig,
    as_reference,
    check_reference,
    frozen_models,
)

URL = "http://127.0.0.1:8001/v1"


def refused(value, **how):
    with pytest.raises(ConfigError) as caught:
        check_reference(value, "algo.judge", **how)
    return str(caught.value)


def test_a_mapping_of_its_keys_is_a_frozen_model():
    given = {"name": "m", "base_url": URL, "api_key_var": "KEY", "timeout_s": 3.0}
    assert as_reference(given) == as_reference(OmegaConf.create(given)) == FrozenModelConfig(**given)
    assert as_reference({"name": "m"}) == FrozenModelConfig(name="m")


@pytest.mark.parametrize("value", [POLICY, None, "teacher", 3, {"name": "m", "url": URL}, FrozenModelConfig("m", URL)])
def test_anything_else_stays_as_it_came(value):
    assert as_reference(value) is value


def test_source_is_policy_or_a_mapping():
    assert SourceConfig().source == POLICY
    assert SourceConfig(source={"name": "m", "base_url": URL}).source == FrozenModelConfig("m", URL)


@dataclass
class Algorithm:
    """As somebody else would write one."""

    judge: Any = None
    other: Any = POLICY
    name: str = "m"
    sampling: SourceConfig = field(default_factory=SourceConfig)


def test_frozen_models_are_found_by_type():
    judge, source = FrozenModelConfig("m", URL), FrozenModelConfig("n", URL)
    found = dict(frozen_models(Algorithm(judge, sampling=SourceConfig(source=source)), "envs.math.algo"))
    assert found == {"envs.math.algo.judge": judge, "envs.math.algo.sampling.source": source}
    assert found["envs.math.algo.judge"] is judge, "and not a copy"
    assert not list(frozen_models(Algorithm(), "algo"))


def test_what_a_users_class_is_given_may_be_a_frozen_model():
    judge = {"name": "m", "base_url": URL}
    others = {"a": {"name": "m"}, "b": judge | {"url": URL}, "c": [judge], "d": POLICY, "sampling": 0.5}
    expected = {"envs.math.algo.judge": FrozenModelConfig("m", URL), "envs.math.algo.other": FrozenModelConfig()}
    options = {"judge": judge, "other": {"base_url": None}, **others}
    for component in (options, SimpleNamespace(**options)):
        assert dict(frozen_models(component, "envs.math.algo")) == expected


def test_a_reference_of_prls_options_needs_no_address():
    found = dict(frozen_models({"kl": {"coef": 0.1, "reference": {"name": "teacher"}}}, "algo"))
    assert found == {"algo.kl.reference": FrozenModelConfig("teacher")}, "so that the hosted one has its GPUs and cores"
    assert not list(frozen_models({"kl": {"reference": "ema"}}, "algo"))


def test_source_is_found_in_a_node():
    source = {"name": "m", "base_url": URL}
    for sampling in (SourceConfig(source), {"source": source}, OmegaConf.create({"source": source})):
        assert dict(frozen_models({"sampling": sampling}, "algo")) == {
            "algo.sampling.source": FrozenModelConfig("m", URL)
        }


def test_the_policy_and_a_model_with_an_address_are_fine(monkeypatch):
    monkeypatch.setenv("KEY", "s3cret")
    check_reference(POLICY, "algo.judge")
    check_reference(
        FrozenModelConfig("m", [URL, "https://large.example"], api_key_var="KEY", timeout_s=0.5), "algo.judge"
    )


@pytest.mark.parametrize("value", [None, "teacher", "Policy", 3, ["policy"], {"name": "m", "url": URL}, {}])
def test_what_is_no_model_is_told_what_one_is(value):
    message = refused(as_reference(value) if value != {} else value)
    assert message.startswith(f"algo.judge={value!r} is not a model reference: write policy, or ")
    assert "name, base_url, api_key_var, timeout_s" in message


NO_URLS = [
    "127.0.0.1:8001",
    "ftp://x",
    "http://h:abc/v1",
    "http://h:65536/v1",
    "http://h:0",
    "http://:80/v1",
    None,
    8001,
]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"name": ""}, "algo.judge.name=''"),
        ({"name": 7}, "algo.judge.name=7"),
        ({"api_key_var": 3}, "algo.judge.api_key_var must be the name of an environment variable"),
        ({"api_key_var": "NO_SUCH_KEY"}, "algo.judge.api_key_var=NO_SUCH_KEY: that environment variable is not set"),
        ({"base_url": None}, "algo.judge is a frozen model without base_url: give it"),
        ({"base_url": []}, "algo.judge is a frozen model without base_url"),
        ({"base_url": "http://bob:secret@h/v1"}, "algo.judge.base_url: a URL has a user or a password in it: write it"),
        *(({"base_url": [URL, url]}, f"algo.judge.base_url={url!r} is not a URL") for url in NO_URLS),
        *(({"timeout_s": value}, "algo.judge.timeout_s must be") for value in ("abc", 0.0, -1.0, math.inf, math.nan)),
    ],
)
def test_what_cannot_work_is_refused_by_its_key(changes, says, monkeypatch):
    monkeypatch.setenv("NO_SUCH_KEY", "")
    assert refused(FrozenModelConfig(**{"name": "m", "base_url": URL} | changes)).startswith(says)


@pytest.mark.parametrize("url", ["http://[::1]:8001/v1", "https://h:65535", "http://h:/v1"])
def test_what_a_request_can_be_sent_to_is_fine(url):
    check_reference(FrozenModelConfig("m", url), "algo.judge")


def test_a_hosted_model_needs_a_name_and_no_address():
    check_reference(FrozenModelConfig("m"), "algo.judge", hosted=True)
    check_reference(FrozenModelConfig("m", api_key_var="NOT_SET_YET"), "algo.judge", hosted=True)
    assert "algo.judge.name" in refused(FrozenModelConfig(), hosted=True)
    assert "algo.judge.timeout_s" in refused(FrozenModelConfig("m", timeout_s=0.0), hosted=True)
    assert "is not a model reference" in refused("teacher", hosted=True)


@pytest.mark.parametrize(("algo", "key"), [("opd", "teacher"), ("sft", "sampling.source")])
def test_teacher_settings_reach_the_algorithm(algo, key):
    settings = ["teacher.name=large", f"teacher.base_url=[{URL},{URL}]"]
    settings += ["teacher.api_key_var=KEY", "teacher.timeout_s=9"]
    config = compose(["run.name=x", f"algo={algo}", "teacher=endpoint", *settings])
    ((where, reference),) = frozen_models(config.algo, "algo")
    assert where == f"algo.{key}" and type(reference) is FrozenModelConfig
    assert reference == FrozenModelConfig("large", [URL, URL], "KEY", 9.0)


def test_own_model_keys_win_over_the_teachers():
    config = compose(["run.name=x", "algo=opd", f"algo.teacher.base_url={URL}", "algo.teacher.name=mine"])
    assert as_reference(config.algo["teacher"]) == FrozenModelConfig("mine", URL)
    assert not config.hosts(as_reference(config.algo["teacher"]))


def test_only_references_without_address_are_hosted():
    config = compose(["run.name=x", "algo=opd"])
    reference = as_reference(config.algo["teacher"])
    assert config.hosts(reference)
    for changes in ({"name": "another"}, {"base_url": URL}):
        other = copy.copy(reference)
        vars(other).update(changes)
        assert not config.hosts(other)
    config.teacher.model = None
    assert not config.hosts(reference)
