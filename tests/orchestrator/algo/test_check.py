"""What is refused before anything starts: each with its own message, under the key where it stands."""

import re
import warnings

import pytest

from prl.compose import compose
from prl.config.model_reference import FrozenModelConfig, check_reference
from prl.episodes.environment import load_taskset
from prl.errors import ConfigError
from prl.orchestrator.algo.base import Algorithm
from prl.orchestrator.algo.check import check_algorithms, check_tasks, hosted_references
from prl.orchestrator.algo.grpo import GRPOConfig

FROZEN = "{name:big,base_url:http://h/v1}"


def checked(*overrides):
    config = compose(["run.name=x", *overrides])
    check_algorithms(config)
    return config


def refused(*overrides):
    with pytest.raises(ConfigError) as caught:
        checked(*overrides)
    return str(caught.value)


def warned(*overrides):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checked(*overrides)
    return [str(warning.message) for warning in caught]


@pytest.fixture
def fn(user_package):
    def credit(group):
        return [0.0 for _ in group]

    return f"algo.fn._target_={user_package(credit)}"


# Overrides of the run's algorithm, and what is said about it; @ stands for the algorithm's key.
REFUSALS = [
    # references
    ("algo=sft algo.sampling.source=policy", "@.sampling.source=policy: to imitate its own samples"),
    ("algo=opd algo.teacher=policy", "@.teacher=policy: the KL from the policy to itself is zero"),
    ("algo=opd algo.teacher=null", "@.teacher has no value: OPDAlgorithm needs a frozen model"),
    ("algo=opd algo.teacher=bob", "@.teacher='bob' is no model: write policy, or a frozen model with name"),
    ("algo=grpo algo.sampling.source=teacher", "@.sampling.source='teacher' is no model"),
    ("algo=sft algo.sampling.source=null", "@.sampling.source=None is no model"),
    ("algo=opd +algo.teacher.nam=x", "'nam': 'x'} is no model: write policy, or"),
    ("algo=opd algo.teacher.name=''", "@.teacher.name='': give the name"),
    ("algo=sft algo.sampling.source.name=''", "@.sampling.source.name='': give the name"),
    ("algo=opd algo.teacher.timeout_s=0", "@.teacher.timeout_s must be a number above 0, got 0"),
    ("algo=opd algo.teacher.timeout_s=inf", "@.teacher.timeout_s must be a number above 0, got inf"),
    ("algo=opd algo.teacher.timeout_s=nan", "@.teacher.timeout_s must be a number above 0, got nan"),
    ("algo=opd algo.teacher.name=x", "@.teacher is a frozen model without base_url: give its endpoint, @."),
    ("algo=sft algo.sampling.source.name=x", "@.sampling.source is a frozen model without base_url"),
    ("algo=opd algo.teacher.base_url=[]", "@.teacher is a frozen model without base_url"),
    ("algo=opd algo.teacher.base_url=localhost:8001/v1", "@.teacher.base_url='localhost:8001/v1' is no URL"),
    ("algo=opd algo.teacher.base_url=[http://a,ftp://b]", "@.teacher.base_url='ftp://b' is no URL: write it like http"),
    ("algo=opd algo.teacher.base_url=[3]", "@.teacher.base_url=3 is no URL"),
    ("algo=sft algo.sampling.source={name:a,base_url:h}", "@.sampling.source.base_url='h' is no URL"),
    (
        "algo=opd algo.teacher={name:a,base_url:http://h,api_key_var:NOT_SET_BY_ANYBODY}",
        "@.teacher.api_key_var=NOT_SET_BY_ANYBODY: that environment variable is not set",
    ),
    # settings
    ("algo=opd algo.max_concurrent=0", "@.max_concurrent must be at least 1, got 0"),
    ("algo=opsd algo.max_concurrent=-3", "@.max_concurrent must be at least 1, got -3"),
    ("algo=opsd algo.template=look", "@.template must say {demonstration}"),
    ("algo=opsd algo.renderer=qwen99", "@.renderer: Input tag 'qwen99'"),
    ("algo=grpo algo.length_penalty=chars", "@.length_penalty='chars': choose tokens, turns or null"),
    ("algo=echo algo.length_penalty=words", "@.length_penalty='words': choose tokens, turns or null"),
    ("algo=grpo algo.completion_weight=-1", "@.completion_weight must be at least 0, got -1.0"),
    ("algo=grpo algo.tool_response_weight=inf", "@.tool_response_weight must be at least 0, got inf"),
    ("algo=echo algo.tool_response_weight=nan", "@.tool_response_weight must be at least 0, got nan"),
    ("algo=echo +algo.roles.bob.alpha=1", "@.roles.bob: no message has that role; choose from system, user, assistant"),
    ("algo=echo +algo.roles.user.alpha=0", "@.roles.user must be {alpha: <a number above 0>}, got {'alpha': 0.0}"),
    ("algo=echo +algo.roles.user.alpha=-1", "@.roles.user must be {alpha: <a number above 0>}, got {'alpha': -1.0}"),
    ("algo=echo +algo.roles.tool.alpha=inf", "@.roles.tool must be {alpha: <a number above 0>}, got {'alpha': inf}"),
    ("algo=echo +algo.roles.tool.alpha=nan", "@.roles.tool must be {alpha: <a number above 0>}, got {'alpha': nan}"),
    ("algo=echo +algo.roles.tool.beta=1", "@.roles.tool must be {alpha: <a number above 0>}, got {'beta': 1.0}"),
    ("algo=echo +algo.roles.tool={}", "@.roles.tool must be {alpha: <a number above 0>}, got {}"),
    ("algo=echo algo.filter._target_=no_such.keep", "@.filter._target_='no_such.keep': No module named 'no_such'"),
    ("algo=custom", "@.fn._target_ has no value: give the dotted path of your function"),
    (
        "algo=custom algo.fn._target_=prl.orchestrator.batcher.Batcher",
        "@.fn._target_='prl.orchestrator.batcher.Batcher' is not a",
    ),
    (
        "algo=custom_class algo._target_=prl.orchestrator.batcher.Batcher",
        "@._target_='prl.orchestrator.batcher.Batcher' is no ",
    ),
    (
        "algo=custom_class algo._target_=prl.orchestrator.algo.grpo.GRPOAlgorithm",
        "@: GRPOAlgorithm reads 'length_penalty', which its config does not have: choose the algorithm whose schema",
    ),
]
RL = {"grpo": "GRPO", "max_rl": "MaxRL", "reward": "Reward", "echo": "Echo", "custom": "Custom"}
REF_KL = {"opd": "OPD", "opsd": "OPSD"}
REFUSALS += [
    (
        f"algo={option} algo.sampling.source={FROZEN}",
        f"@.sampling.source is a frozen model, but {name}Algorithm feeds the {component} loss",
    )
    for component, options in (("rl", RL), ("ref_kl", REF_KL))
    for option, name in options.items()
]


@pytest.mark.parametrize(("overrides", "message"), REFUSALS)
def test_it_is_refused_with_its_own_message_under_the_key_where_it_stands(overrides, message, monkeypatch):
    monkeypatch.delenv("NOT_SET_BY_ANYBODY", raising=False)
    config = compose(["run.name=x", *overrides.split()])
    with pytest.raises(ConfigError, match=re.escape(message.replace("@", "algo"))):
        check_algorithms(config)
    config.envs["math"].algo, config.algo = config.algo, GRPOConfig()
    with pytest.raises(ConfigError, match=re.escape(message.replace("@", "envs.math.algo"))) as caught:
        check_algorithms(config)
    assert not re.search(r"(?<![\w.])algo\.", str(caught.value)), "a key that is not there"


def test_a_class_has_to_be_named():
    assert refused("algo=custom_class") == "algo._target_ has no value: give one, algo._target_=<value>"


def test_an_algorithm_that_no_env_runs_is_not_checked():
    broken = ["algo=opd", "algo.teacher=policy", "env=[math,reverse_text]"]
    checked(*broken, "+algo@envs.math.algo=grpo", "+algo@envs.reverse_text.algo=grpo")
    assert "algo.teacher=policy" in refused(*broken, "+algo@envs.math.algo=grpo"), "reverse_text runs it"


@pytest.mark.parametrize(
    "overrides",
    [
        ["algo=opd", "teacher=local"],
        ["algo=sft", "teacher=local"],
        ["algo=opd", "teacher=local", "teacher.name=renamed", "teacher.api_key_var=NOT_SET_BY_ANYBODY"],
        ["algo=opd", "teacher=endpoint", "teacher.name=big", "teacher.base_url=http://h/v1"],
        ["algo=opd", "teacher=endpoint", "teacher.name=big", "teacher.base_url=[http://a/v1,https://b/v1]"],
        ["algo=opd", f"algo.teacher={FROZEN}"],
        ["algo=sft", f"algo.sampling.source={FROZEN}"],
        ["algo=grpo", "algo.length_penalty=turns", "algo.completion_weight=0"],
    ],
)
def test_what_can_work_passes(overrides):
    checked(*overrides)


def test_a_key_that_is_set_passes(monkeypatch):
    key = ["algo=opd", "algo.teacher.base_url=https://h/v1", "algo.teacher.api_key_var=A_KEY"]
    monkeypatch.setenv("A_KEY", "")
    assert "A_KEY: that environment variable is not set" in refused(*key)
    monkeypatch.setenv("A_KEY", "secret")
    checked(*key)


def test_policy_and_a_reference_that_is_hosted_need_no_url():
    check_reference("policy", "x")
    check_reference(FrozenModelConfig(name="t"), "x", hosted=True)
    with pytest.raises(ConfigError, match="^x is a frozen model without base_url"):
        check_reference(FrozenModelConfig(name="t"), "x")


def test_only_references_to_the_hosted_model_are_hosted():
    shared = ["algo=opd", "env=[math,reverse_text]"]
    assert [r.name for r in hosted_references(checked(*shared))] == ["teacher"]
    mixed = checked(*shared, "+algo@envs.math.algo=sft", f"envs.math.algo.sampling.source={FROZEN}")
    assert hosted_references(mixed) == [mixed.algo.teacher]
    assert hosted_references(checked("algo=grpo")) == []


GROUP_OF_ONE = "env 'math': {} gives a group of one no advantage (group_size=1)"


@pytest.mark.parametrize(("algo", "name"), [("grpo", "GRPO"), ("max_rl", "MaxRL"), ("echo", "Echo")])
@pytest.mark.parametrize("one", ["orchestrator.group_size=1", "envs.math.group_size=1"])
def test_a_group_of_one_warns_where_credit_is_relative_to_it(algo, name, one):
    assert warned(f"algo={algo}", one) == [GROUP_OF_ONE.format(f"{name}Algorithm")]
    assert warned(f"algo={algo}", "envs.math.group_size=2") == []


@pytest.mark.parametrize("algo", ["opd", "opsd", "sft", "reward"])
def test_a_group_of_one_is_fine_where_credit_is_not_relative_to_it(algo):
    assert warned(f"algo={algo}", "orchestrator.group_size=1") == []


def test_a_custom_functions_credit_is_not_taken_to_be_relative(fn):
    assert warned("algo=custom", fn, "orchestrator.group_size=1") == []


def test_each_env_is_judged_by_its_own_group_size_and_algorithm():
    two = ["env=[math,reverse_text]", "orchestrator.group_size=1"]
    assert len(warned(*two)) == 2
    assert warned(*two, "envs.reverse_text.group_size=4") == [GROUP_OF_ONE.format("GRPOAlgorithm")]
    assert warned(*two, "+algo@envs.reverse_text.algo=reward") == [GROUP_OF_ONE.format("GRPOAlgorithm")]


class Imitation(Algorithm):
    """A user's own class that feeds ce, and looks at its settings."""

    action_loss_type = "ce"
    group_relative = True

    @classmethod
    def check(cls, config, where):
        super().check(config, where)
        if config.kwargs["alpha"] > 1:
            raise ConfigError(f"{where}.kwargs.alpha is too much")


def test_a_users_own_class_is_checked_by_itself_and_may_sample_from_a_frozen_model(user_package):
    own = ["algo=custom_class", f"algo._target_={user_package(Imitation)}", "+algo.kwargs.alpha=1"]
    assert warned(*own, f"algo.sampling.source={FROZEN}") == []
    assert warned(*own, "envs.math.group_size=1") == [GROUP_OF_ONE.format("Imitation")]
    assert refused(*own[:-1], "+algo.kwargs.alpha=2") == "algo.kwargs.alpha is too much"


class Judged(Algorithm):
    """A user's own class with a frozen model of its own."""


def test_a_users_own_class_may_name_a_frozen_model(user_package):
    own = ["algo=custom_class", f"algo._target_={user_package(Judged)}"]
    config = checked(*own, "+algo.kwargs.judge={name: ${teacher.name}, base_url: ${teacher.base_url}}")
    assert hosted_references(config) == [config.algo.kwargs["judge"]] == [FrozenModelConfig("teacher")]
    config = checked(*own, f"+algo.kwargs.judge={FROZEN}")
    assert config.algo.kwargs["judge"].urls == ["http://h/v1"] and hosted_references(config) == []
    message = refused(*own, "+algo.kwargs.judge={name: m, base_url: localhost:8001}")
    assert message.startswith("algo.kwargs.judge.base_url='localhost:8001' is no URL")
    of_env = ["+algo@envs.math.algo=custom_class", own[1].replace("algo.", "envs.math.algo.", 1)]
    message = refused(*of_env, "+envs.math.algo.kwargs.judge={name: '', base_url: http://h/v1}")
    assert message.startswith("envs.math.algo.kwargs.judge.name='': give the name")


@pytest.mark.parametrize(
    ("overrides", "warns"),
    [
        (["algo=opd", "algo.sampling.temperature=0.5"], True),
        (["algo=opsd", "algo.sampling.temperature=2"], True),
        (["algo=opd"], False),
        (["algo=grpo", "algo.sampling.temperature=0.5"], False),
        (["algo=sft", "algo.sampling.temperature=0.5"], False),
    ],
)
def test_a_reference_at_another_temperature_than_the_policy_warns(overrides, warns):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_algorithms(compose(["run.name=x", *overrides]))
    said = [str(warning.message) for warning in caught if "temperature" in str(warning.message)]
    assert [text.startswith("algo.sampling.temperature=") and "(env 'math')" in text for text in said] == [True] * warns


def test_a_frozen_source_is_refused_whatever_the_class_checks(user_package):
    class Careless(Algorithm):
        @classmethod
        def check(cls, config, where):
            pass

    config = compose(
        ["run.name=x", "algo=custom_class", f"algo._target_={user_package(Careless)}", f"algo.sampling.source={FROZEN}"]
    )
    with pytest.raises(ConfigError, match="algo.sampling.source is a frozen model, but Careless feeds the rl loss"):
        check_algorithms(config)


def test_opsd_warns_where_no_task_has_what_it_is_to_show():
    def warned(*overrides):
        config = compose(["run.name=x", *overrides])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            check_tasks(
                config,
                {name: list(load_taskset(env.taskset, {"num_tasks": 3}, name)) for name, env in config.envs.items()},
            )
        return [str(warning.message) for warning in caught]

    assert warned("algo=opsd") == warned("algo=grpo", "env=guess") == []
    (said,) = warned("env=[math,guess]", "+algo@envs.guess.algo=opsd")
    assert said.startswith("envs.guess.algo.demo_key=demonstration: no task has that field")
    (said,) = warned("algo=opsd", "algo.demo_key=hint")
    assert said.startswith("algo.demo_key=hint: no task has that field")
