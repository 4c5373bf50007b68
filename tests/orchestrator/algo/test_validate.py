"""What is refused before anything starts: each with its own message, under the key where it stands."""

import re
import warnings
from dataclasses import dataclass
from typing import Annotated

import pytest
from annotated_types import Ge

from prl.compose import compose
from prl.config.build import build
from prl.config.model_reference import FrozenModelConfig, SourceConfig, check_reference, frozen_models
from prl.config.signature import schema_of
from prl.episodes.environment import load_taskset
from prl.errors import ConfigError
from prl.orchestrator.algo.base import Algorithm
from prl.orchestrator.algo.grpo import GRPOAlgorithm
from prl.orchestrator.algo.opd import OPDAlgorithm
from prl.orchestrator.algo.validate import hosted_references, validate_algorithm

FROZEN = "{name:big,base_url:http://h/v1}"


def algorithms_of(config):
    """The algorithm of each env, built and validated as the run would."""
    found = {}
    for name, env in config.envs.items():
        where, node = config.node_of(name, "algo")
        found[name] = build(node, Algorithm, where)
        validate_algorithm(
            found[name],
            where,
            group_size=config.orchestrator.group_size if env.group_size is None else env.group_size,
            temperature=1.0,
            hosts=config.hosts,
            uses_reward_thresholds=False,
            env=name,
        )
    return found


def checked(*overrides):
    config = compose(["run.name=x", *overrides])
    return config, algorithms_of(config)


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
    ("algo=sft algo.sampling.source=policy", "@.sampling.source=policy: imitating its own samples teaches"),
    ("algo=opd algo.teacher=policy", "@.teacher=policy: the KL from the policy to itself is zero"),
    ("algo=opd algo.teacher=null", "@.teacher has no value: OPDAlgorithm needs a frozen model"),
    (
        "algo=opd algo.teacher=bob",
        "@.teacher='bob' is not a model reference: write policy, or a frozen model with name",
    ),
    ("algo=grpo algo.sampling.source=teacher", "@.sampling.source='teacher' is not a model reference"),
    ("algo=sft algo.sampling.source=null", "@.sampling.source=None is not a model reference"),
    ("algo=opd +algo.teacher.nam=x", "algo.teacher.nam"),
    ("algo=opd algo.teacher.name=''", "@.teacher.name='': give the name"),
    ("algo=sft algo.sampling.source.name=''", "@.sampling.source.name='': give the name"),
    ("algo=opd algo.teacher.timeout_s=0", "@.teacher.timeout_s must be a number above 0, got 0"),
    ("algo=opd algo.teacher.timeout_s=inf", "@.teacher.timeout_s="),
    ("algo=opd algo.teacher.timeout_s=nan", "@.teacher.timeout_s="),
    ("algo=opd algo.teacher.name=x", "@.teacher is a frozen model without base_url: give its endpoint, @."),
    ("algo=sft algo.sampling.source.name=x", "@.sampling.source is a frozen model without base_url"),
    ("algo=opd algo.teacher.base_url=[]", "@.teacher is a frozen model without base_url"),
    ("algo=opd algo.teacher.base_url=localhost:8001/v1", "@.teacher.base_url='localhost:8001/v1' is not a URL"),
    (
        "algo=opd algo.teacher.base_url=[http://a,ftp://b]",
        "@.teacher.base_url='ftp://b' is not a URL: write it like http",
    ),
    ("algo=opd algo.teacher.base_url=[3]", "@.teacher.base_url=3 is not a URL"),
    ("algo=sft algo.sampling.source={name:a,base_url:h}", "@.sampling.source.base_url='h' is not a URL"),
    (
        "algo=opd algo.teacher={name:a,base_url:http://h,api_key_var:NOT_SET_BY_ANYBODY}",
        "@.teacher.api_key_var=NOT_SET_BY_ANYBODY: that environment variable is not set",
    ),
    # the KL of an rl algorithm
    (
        "algo=opd algo.kl.coef=0.1",
        "@.kl.coef=0.1: OPDAlgorithm feeds the ref_kl loss, and the KL is added to tokens of",
    ),
    ("algo=opsd algo.kl.coef=2", "@.kl.coef=2: OPSDAlgorithm feeds the ref_kl loss"),
    ("algo=sft algo.kl.coef=1", "@.kl.coef=1: SFTDistillAlgorithm feeds the ce loss"),
    ("algo=grpo algo.kl.coef=-0.1", "@.kl.coef="),
    ("algo=echo algo.kl.coef=inf", "@.kl.coef="),
    ("algo=grpo algo.kl.coef=1 algo.kl.reference=policy", "@.kl.reference='policy', and the KL from the policy to its"),
    ("algo=grpo algo.kl.coef=1 algo.kl.reference=base", "@.kl.reference='base': write initial, or a frozen model with"),
    ("algo=grpo algo.kl.coef=1 algo.kl.reference=null", "@.kl.reference=None: write initial, or a frozen model with"),
    (f"algo=grpo algo.kl.reference={FROZEN}", "@.kl.reference is given, but nothing reads it: @.kl.coef is 0"),
    ("algo=grpo algo.kl.coef=1 algo.kl.reference={name:a}", "@.kl.reference is a frozen model without base_url"),
    ("algo=grpo algo.kl.coef=1 algo.kl.reference={name:a,base_url:h}", "@.kl.reference.base_url='h' is not a URL"),
    # settings
    ("algo=opd algo.max_concurrent=0", "@.max_concurrent="),
    ("algo=opsd algo.max_concurrent=-3", "@.max_concurrent="),
    ("algo=opsd algo.template=look", "@.template must contain {demonstration}"),
    ("algo=opsd algo.renderer=qwen99", "@.renderer: Input tag 'qwen99'"),
    ("algo=grpo algo.length_penalty=chars", "@.length_penalty=chars: "),
    ("algo=echo algo.length_penalty=words", "@.length_penalty=words: "),
    ("algo=grpo algo.completion_weight=-1", "@.completion_weight="),
    ("algo=grpo algo.tool_response_weight=inf", "@.tool_response_weight="),
    ("algo=echo algo.tool_response_weight=nan", "@.tool_response_weight="),
    ("algo=echo +algo.roles.bob.alpha=1", "@.roles.bob: no message has that role; choose from system, user, assistant"),
    ("algo=echo +algo.roles.user.alpha=0", "@.roles.user must be {alpha: <a number above 0>}, got {'alpha': 0.0}"),
    ("algo=echo +algo.roles.user.alpha=-1", "@.roles.user must be {alpha: <a number above 0>}, got {'alpha': -1.0}"),
    (
        "algo=echo +algo.roles.tool.alpha=inf",
        "@.roles.tool.alpha=",
    ),
    (
        "algo=echo +algo.roles.tool.alpha=nan",
        "@.roles.tool.alpha=",
    ),
    ("algo=echo +algo.roles.tool.beta=1", "@.roles.tool must be {alpha: <a number above 0>}, got {'beta': 1.0}"),
    ("algo=echo +algo.roles.tool={}", "@.roles.tool must be {alpha: <a number above 0>}, got {}"),
    ("algo=echo algo.filter._target_=no_such.keep", "@.filter._target_='no_such.keep': "),
    (
        "algo=echo algo.roles={}",
        "@.roles is empty: name at least one role, e.g. +@.roles.tool.alpha=0.1, or choose algo=grpo",
    ),
    (
        "algo=echo +algo.roles.tool.alpha=x",
        "@.roles.tool.alpha=",
    ),
    ("algo=echo algo.filter=keep", "@.filter=keep: "),
    (
        "algo=echo +algo.filter.least=3",
        "@.filter has no _target_",
    ),
    ("algo=custom algo.fn=credit", "@.fn=credit: "),
    (
        "algo=grpo +algo.lenght_penalty=turns",
        "@.lenght_penalty: GRPOAlgorithm has no such option; did you mean @.length_pen",
    ),
    ("algo=max_rl +algo.zzz=1", "@.zzz: MaxRLAlgorithm has no such option; its options: completion_weight, kl, "),
    (
        "algo=custom algo.fn._target_=prl.orchestrator.batcher.Batcher",
        "@.fn=functools.partial(",
    ),
    (
        "algo=custom_class algo._target_=prl.orchestrator.batcher.Batcher",
        "@._target_='prl.orchestrator.batcher.Batcher' is not a subclass of prl.orch",
    ),
]
RL = {
    "grpo": "GRPO",
    "max_rl": "MaxRL",
    "reward": "Reward",
    "echo": "Echo",
    "custom algo.fn._target_=prl.models.model_path": "Custom",
}
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
        algorithms_of(config)
    config.envs["math"].algo, config.algo = config.algo, schema_of(GRPOAlgorithm)()
    with pytest.raises(ConfigError, match=re.escape(message.replace("@", "envs.math.algo"))) as caught:
        algorithms_of(config)
    assert not re.search(r"(?<![\w.])algo\.", str(caught.value)), "a key that is not there"


def test_a_function_has_to_be_named(validated):
    assert refused("algo=custom") == "algo.fn._target_ has no value: give one, algo.fn._target_=<value>"
    for fn in ({"_target_": "???"}, {"_target_": "???", "bonus": 1}):
        with pytest.raises(ConfigError, match="^algo.fn has no _target_"):
            validated({"_target_": "prl.orchestrator.algo.custom.CustomAlgorithm", "fn": fn})
    with pytest.raises(ConfigError, match="^algo.fn has no value: give one, algo.fn=<value>$"):
        validated({"_target_": "prl.orchestrator.algo.custom.CustomAlgorithm"})


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
        ["algo=max_rl", "algo.kl.coef=0.1"],
        ["algo=reward", "algo.kl.coef=1", f"algo.kl.reference={FROZEN}"],
        ["algo=echo", "algo.kl.coef=0.1", "algo.kl.reference={name:teacher}"],
        ["algo=opd", "algo.kl.coef=0"],
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

    def hosted(*overrides):
        config, algorithms = checked(*overrides)
        return hosted_references(algorithms.values(), config.hosts)

    assert hosted(*shared) == [FrozenModelConfig("teacher")], "two envs share it"
    assert hosted(*shared, "+algo@envs.math.algo=sft", f"envs.math.algo.sampling.source={FROZEN}") == [
        FrozenModelConfig("teacher")
    ]
    assert hosted("algo=grpo") == hosted("algo=grpo", "algo.kl.coef=1") == []
    assert hosted("algo.kl.coef=1", "algo.kl.reference={name:teacher}") == [FrozenModelConfig("teacher")]


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


@dataclass(kw_only=True)
class Imitation(Algorithm):
    """A class of the user's own that feeds ce, with a knob and a check."""

    action_loss_type = "ce"
    group_relative = True
    alpha: Annotated[float, Ge(0)] = 0.5

    def check(self, where):
        super().check(where)
        if self.alpha > 1:
            raise ConfigError(f"{where}.alpha is too much")


def test_a_users_own_class_is_checked_by_itself_and_may_sample_from_a_frozen_model(user_package):
    own = ["algo=custom_class", f"algo._target_={user_package(Imitation)}"]
    assert warned(*own, "+algo.alpha=1", f"algo.sampling.source={FROZEN}") == []
    assert warned(*own, "envs.math.group_size=1") == [GROUP_OF_ONE.format("Imitation")]
    assert refused(*own, "+algo.alpha=2") == "algo.alpha is too much"
    assert refused(*own, "+algo.alpha=-1").startswith("algo.alpha=")
    assert refused(*own, "+algo.aplha=1") == "algo.aplha: Imitation has no such option; did you mean algo.alpha?"


@dataclass(kw_only=True)
class Judged(Algorithm):
    """A class of the user's own with a frozen model of its own."""

    judge: FrozenModelConfig | None = None


def test_a_users_own_class_may_name_a_frozen_model(user_package):
    own = ["algo=custom_class", f"algo._target_={user_package(Judged)}"]
    config, algorithms = checked(*own, "+algo.judge={name: ${teacher.name}, base_url: ${teacher.base_url}}")
    assert hosted_references(algorithms.values(), config.hosts) == [FrozenModelConfig("teacher")]
    config, algorithms = checked(*own, f"+algo.judge={FROZEN}")
    assert algorithms["math"].judge.urls == ["http://h/v1"]
    assert list(frozen_models(algorithms["math"], "algo")) == [("algo.judge", algorithms["math"].judge)]
    assert hosted_references(algorithms.values(), config.hosts) == []
    message = refused(*own, "+algo.judge={name: m, base_url: localhost:8001}")
    assert message.startswith("algo.judge.base_url='localhost:8001' is not a URL")
    of_env = ["+algo@envs.math.algo=custom_class", own[1].replace("algo.", "envs.math.algo.", 1)]
    message = refused(*of_env, "+envs.math.algo.judge={name: '', base_url: http://h/v1}")
    assert message.startswith("envs.math.algo.judge.name='': give the name")


def test_both_models_of_an_algorithm_are_found_by_key():
    source, teacher = FrozenModelConfig("a"), FrozenModelConfig("b")
    algorithm = OPDAlgorithm(sampling=SourceConfig(source=source), teacher=teacher)
    assert dict(frozen_models(algorithm, "x")) == {"x.teacher": teacher, "x.sampling.source": source}
    assert dict(frozen_models(GRPOAlgorithm(), "x")) == {}


OPD = {"_target_": "prl.orchestrator.algo.opd.OPDAlgorithm", "teacher": {"name": "big", "base_url": "http://h/v1"}}
OPSD, GRPO, SFT = (
    {"_target_": f"prl.orchestrator.algo.{path}Algorithm"} for path in ("opsd.OPSD", "grpo.GRPO", "sft.SFTDistill")
)
SFT |= {"sampling": {"source": OPD["teacher"]}}


@pytest.mark.parametrize(
    ("node", "temperature", "warns"),
    [
        ({**GRPO, "kl": {"coef": 1.0, "reference": OPD["teacher"]}}, 0.5, True),
        ({**GRPO, "kl": {"coef": 1.0}}, 0.5, False),
        *[(OPD, 0.5, True), (OPSD, 2, True), (OPD, 1.0, False), (GRPO, 0.5, False), (SFT, 0.5, False)],
    ],
)
def test_a_reference_at_another_temperature_than_the_policy_warns(validated, node, temperature, warns):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        validated(node, temperature=temperature)
    said = [str(warning.message) for warning in caught]
    assert [text.startswith(f"envs.math.sampling.temperature={temperature:g}: ") for text in said] == [True] * warns


@pytest.mark.parametrize(
    ("node", "name"),
    [(OPD, "OPD"), (OPSD, "OPSD"), (SFT, "SFTDistill"), (GRPO, None), ({**GRPO, "length_penalty": "turns"}, None)],
)
@pytest.mark.parametrize("thresholds", [True, False])
def test_thresholds_on_rewards_warn_where_the_algorithm_reads_none(validated, node, name, thresholds):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        validated(node, uses_reward_thresholds=thresholds)
    said = [str(warning.message) for warning in caught]
    assert len(said) == bool(name and thresholds)
    for text in said:
        assert text.startswith(
            "env 'math': thresholds on rewards (easy_threshold, hard_threshold, online_difficulty_fil"
        )
        assert text.endswith(f"but {name}Algorithm reads no reward")


def test_a_class_of_ones_own_has_the_kl_too_and_cannot_call_a_knob_so(user_package):
    class Own(Algorithm):
        def score_group(self, group): ...

    class Clashing(Algorithm):
        def __init__(self, *, kl=0.1, **knobs):
            super().__init__(**knobs)
            self.kl = kl

    own, clashing = user_package(Own, Clashing)
    assert checked("algo=custom_class", f"algo._target_={own}", "algo.kl.coef=0.3")[1]["math"].kl.in_trainer
    message = refused("algo=custom_class", f"algo._target_={clashing}")
    assert message.startswith("algo: Clashing has no kl.coef: let its __init__ take **knobs")


def test_a_frozen_source_is_refused_whatever_the_class_checks(user_package):
    class Careless(Algorithm):
        def check(self, where):
            pass

    own = ["algo=custom_class", f"algo._target_={user_package(Careless)}", f"algo.sampling.source={FROZEN}"]
    assert refused(*own).startswith("algo.sampling.source is a frozen model, but Careless feeds the rl loss")


def test_a_component_that_is_not_in_the_table_is_refused(user_package, validated):
    class Entropy(Algorithm):
        action_loss_type = "entropy"

    with pytest.raises(
        ConfigError, match="^algo: Entropy.action_loss_type='entropy': it must be one of rl, ce, ref_kl$"
    ):
        validated({"_target_": user_package(Entropy)})


def test_a_constructor_that_keeps_its_base_class_without_knobs_is_refused(user_package, validated):
    class Forgetful(Algorithm):
        def __init__(self, *, bonus=1.0):
            self.bonus = bonus

    with pytest.raises(ConfigError, match=r"^algo: Forgetful has no sampling.source: let its __init__ take \*\*knobs"):
        validated({"_target_": user_package(Forgetful)})


def test_opsd_warns_where_no_task_has_what_it_is_to_show(validated):
    def warned(taskset, where="algo", **knobs):
        tasks = list(load_taskset(f"prl.envs.{taskset}", {"num_tasks": 3}, taskset))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            validated({**OPSD, **knobs}, where).check_tasks(where, tasks)
        return [str(warning.message) for warning in caught]

    assert warned("math") == []
    (said,) = warned("guess", "envs.guess.algo")
    assert said.startswith("envs.guess.algo.demo_key=demonstration: no task has that field")
    (said,) = warned("math", demo_key="hint")
    assert said.startswith("algo.demo_key=hint: no task has that field")
