"""Refusals and warnings before anything starts: algorithms, filters, buffers and the orchestrator's options."""

import warnings
from pathlib import Path

import pytest
import verifiers.v1 as vf
from prepared_run import planned, validated

from prl.algorithms.base import Algorithm
from prl.base.errors import ConfigError
from prl.config.compose import compose
from prl.config.orchestrator import OrchestratorConfig
from prl.curriculum.pools import TaskCurriculum, write_pools
from prl.filters.base import Filter
from prl.filters.gibberish import Gibberish
from prl.filters.repetition import Repetition
from prl.launch.components import build_components

FROZEN = "{name:big,base_url:http://h/v1}"
FN = "algo.fn._target_=prl.models.model_path"
SLOT, ENV_SLOT = "filters.post_batch", "envs.math.filters.pre_batch"


def hosted(overrides):
    """The names of the servers of frozen models that a run starts."""
    teacher = planned(compose(["run.name=x", *overrides.split()])).teacher
    return [] if teacher is None else [server.served_name for server in teacher.servers]


def components(overrides):
    """Every component of a run, checked."""
    config = compose(["run.name=x", *overrides.split()])
    validated(config)
    return build_components(config)


def warned_by(run, *args):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(*args)
    return [str(warning.message) for warning in caught]


REFUSED = [  # overrides, key that the error names
    ("algo=sft algo.sampling.source=policy", "algo.sampling.source"),
    ("algo=opd algo.teacher=policy", "algo.teacher"),
    ("algo=opd algo.teacher=null", "algo.teacher"),
    ("algo=opd algo.teacher.name=x", "algo.teacher"),
    ("algo=opd algo.teacher.base_url=localhost:8001", "algo.teacher.base_url"),
    (f"algo.sampling.source={FROZEN}", "algo.sampling.source"),
    (f"algo=custom {FN} algo.sampling.source=demonstrations", "algo.sampling.source"),
    ("algo=opd +algo.kl.coef=0.1", "algo.kl: OPDAlgorithm has no such option; it is added to tokens of the rl loss"),
    ("algo.kl.coef=1 algo.kl.reference=policy", "algo.kl.reference"),
    ("algo.kl.coef=1 algo.kl.reference={name:a}", "algo.kl.reference"),
    (f"algo.kl.reference={FROZEN}", "algo.kl.coef is 0"),
    ("algo.kl.divergence=jsd", "algo.kl.divergence is given"),
    ("algo.kl.coef=1 algo.kl.divergence=forward_kl algo.kl.beta=0.3", "algo.kl.beta=0.3"),
    ("algo.kl.coef=1 algo.kl.divergence=reverse_kl algo.kl.top_k=8", "algo.kl.top_k=8"),
    ("algo.kl.coef=1 algo.kl.decay=0.9", "algo.kl.decay=0.9"),
    ("algo.kl.coef=1 algo.kl.reference=ema algo.kl.every=2", "algo.kl.every=2"),
    ("algo=opd algo.top_k=8", "algo.top_k=8"),
    ("algo=opd algo.teacher=ema algo.divergence=jsd algo.top_k=8", "algo.top_k=8"),
    ("algo=opd algo.align=text algo.divergence=jsd", "algo.align=text"),
    ("algo=opd algo.align=text algo.teacher=initial", "algo.align=text"),
    ("algo=opsd algo.align=text", "algo.align=text"),
    ("algo.kl.coef=0.1 algo.kl.align=text", "algo.kl.align=text"),
    (f"algo.kl.reference={FROZEN} algo.kl.align=text", "algo.kl.reference"),
    ("algo=opsd algo.reference=ema algo.divergence=jsd algo.top_k=8", "algo.top_k=8"),
    ("algo=opsd algo.divergence=kl", "algo.divergence"),
    ("algo=opsd algo.template=look", "algo.template"),
    ("algo=opsd algo.renderer=qwen99", "algo.renderer"),
    ("algo.overlong_penalty.max_tokens=9 algo.length_penalty=turns", "length_penalty and overlong_penalty"),
    ("algo.overlong_penalty.buffer=3", "algo.overlong_penalty.buffer=3"),
    ("algo.normalize=each algo.length_penalty=turns", "algo.normalize=each: algo.length_penalty"),
    ("algo.normalize=each algo.overlong_penalty.max_tokens=9", "algo.normalize=each: algo.overlong_penalty"),
    ("algo=reinforce_pp algo.group_baseline=false algo.normalize=std", "algo.normalize=std"),
    ("algo=reinforce_pp algo.group_baseline=false algo.baseline=leave_one_out", "algo.baseline=leave_one_out"),
    ("algo=opd curriculum.replay.share=0.1", "curriculum.replay.share=0.1: groups are replayed for their advantages"),
    (
        "curriculum.replay.share=0.1 orchestrator.max_async_level=0",
        "curriculum.replay.share=0.1: with orchestrator.max",
    ),
    ("curriculum.replay.share=0.1 orchestrator.strict_async_level=true", "curriculum.replay.share=0.1: with orch"),
    ("curriculum.replay.max_uses=2", "curriculum.replay.max_uses"),
    ("curriculum.replay.max_age=2", "curriculum.replay.max_age"),
    ("algo=echo +algo.roles.bob.alpha=1", "algo.roles.bob"),
    ("algo=echo +algo.roles.user.alpha=0", "algo.roles.user"),
    ("algo=echo algo.roles={}", "algo.roles"),
    ("algo=echo +algo.roles.user={alpha:1,tool_names:[look]}", "algo.roles.user.tool_names"),
    ("algo=echo +algo.roles.tool={alpha:1,tool_names:[]}", "algo.roles.tool.tool_names"),
    ("algo=echo +algo.roles.tool={alpha:1,tool_names:look}", "algo.roles.tool.tool_names"),
    ("algo=echo +algo.roles.tool.tool_names=[look]", "algo.roles.tool must be {alpha"),
    ("algo=echo +algo.roles.tool.alpha=much", "algo.roles.tool must be {alpha"),
    ("algo=echo algo.filter=keep", "algo.filter"),
    ("algo=custom", "algo.fn._target_"),
    ("algo=custom algo.fn=credit", "algo.fn"),
    ("algo=custom algo.fn._target_=prl.orchestrator.batcher.Batcher", "algo.fn"),
    ("algo=custom_class", "algo._target_"),
    ("+algo.lenght_penalty=turns", "did you mean algo.length_penalty"),
    ("+algo@envs.math.algo=opd envs.math.algo.teacher=policy", "envs.math.algo.teacher"),
    (f"{SLOT}.gibberish.threshold=-4", f"{SLOT}.gibberish.mode=mean_logprob"),
    (f"{SLOT}.gibberish.mode=mean_logprob {SLOT}.gibberish.token_id_threshold=0", f"{SLOT}.gibberish.mode=token"),
    (f"{SLOT}.repetition.threshold=0.4", f"{SLOT}.repetition.mode=ngram"),
    (f"{SLOT}.repetition=null", f"~{SLOT}.repetition"),
    (f"+filter@{SLOT}.again=repetition", f"{SLOT}.again and {SLOT}.repetition"),
    (f"+filters@envs.math.filters=default {ENV_SLOT}.repetition.n=0", f"{ENV_SLOT}.repetition.n"),
    ("curriculum.easy_threshold=0.5 curriculum.hard_threshold=0.5", "curriculum.hard_threshold"),
    ("curriculum.refresh_every=5", "curriculum.refresh_every=5: set curriculum.easy_fraction"),
    ("curriculum.refresh_every=0 curriculum.easy_fraction=1", "curriculum.refresh_every"),
    (
        "+curriculum@envs.math.curriculum=pools envs.math.curriculum.hard_threshold=2",
        "envs.math.curriculum.easy_threshold",
    ),
    ("orchestrator.batch_size=null", "orchestrator.token_batch_size"),
    ("orchestrator.token_batch_size=100", "orchestrator.batch_size"),
    ("orchestrator.max_off_policy_steps=0", "orchestrator.max_async_level=1"),
    ("orchestrator.max_async_level=9", "orchestrator.max_off_policy_steps=8 is below"),
    ("orchestrator.eval.every=null orchestrator.stop.target=0.9", "orchestrator.stop.target"),
    ("orchestrator.eval.every=null orchestrator.eval.keep_best=true", "orchestrator.eval.keep_best"),
    (
        "orchestrator.eval.mode=beside orchestrator.eval.keep_best=true",
        "orchestrator.eval.keep_best judges one version",
    ),
    ("orchestrator.eval.mode=beside orchestrator.stop.patience=2", "orchestrator.stop.patience judges one version"),
]


@pytest.mark.parametrize(("overrides", "key"), REFUSED)
def test_contradiction_is_refused_by_key(overrides, key):
    with pytest.raises(ConfigError) as caught:
        components(overrides)
    assert key in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        "algo=opd teacher=local",
        "algo=sft teacher=local",
        f"algo=opd algo.teacher={FROZEN}",
        "algo=max_rl algo.kl.coef=0.1",
        f"algo=reward algo.kl.coef=1 algo.kl.reference={FROZEN}",
        f"algo=echo algo.kl.coef=1 algo.kl.reference={FROZEN} algo.kl.divergence=jsd algo.kl.top_k=8 algo.kl.beta=0.1",
        "algo=opd teacher=local algo.divergence=reverse_kl algo.top_k=64",
        "algo.kl.coef=0.1 algo.kl.reference=lagged algo.kl.every=4 sampling.temperature=0.5",
        "algo=opsd algo.reference=ema algo.decay=0.9 algo.divergence=forward_kl",
        "algo=opd algo.teacher=policy +algo@envs.math.algo=grpo",  # that no env runs
        f"{SLOT}.repetition.mode=ngram {SLOT}.repetition.n=1 {SLOT}.repetition.threshold=0.0",
        f"{SLOT}.gibberish.token_id_threshold=0 {SLOT}.gibberish.logprob_offset=0.0",
        "curriculum.easy_threshold=-1 curriculum.refill=true",
        "orchestrator.eval.every=null orchestrator.stop.time_budget_s=5",
    ],
)
def test_settings_that_can_work_pass_without_warning(overrides):
    assert warned_by(components, overrides) == []


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({}, 8),
        ({"max_async_level": 1, "max_off_policy_steps": 1}, 1),
        ({"max_async_level": 0}, 0),
        ({"max_async_level": 2, "strict_async_level": True}, 2),
    ],
)
def test_age_limit_is_exact_where_training_is(options, limit):
    config = OrchestratorConfig(**options)
    config.check("orchestrator")
    assert config.age_limit == limit


ONE = "orchestrator.group_size=1"


@pytest.mark.parametrize(
    ("overrides", "warns"),
    [
        (ONE, "env 'math': GRPOAlgorithm gives a group of one no advantage"),
        ("algo=max_rl envs.math.group_size=1", "env 'math': MaxRLAlgorithm gives a group of one"),
        ("algo=reinforce_pp envs.math.group_size=1", "env 'math': ReinforcePPAlgorithm gives a group of one"),
        (f"algo=echo {ONE} envs.math.group_size=2", None),
        (f"algo=reward {ONE}", None),
        (f"algo=opd teacher=local {ONE}", None),
        (f"algo=custom {FN} {ONE}", None),
        ("algo=opsd sampling.temperature=0.5", "envs.math.sampling.temperature=0.5: OPSDAlgorithm scores"),
        (f"algo.kl.coef=1 algo.kl.reference={FROZEN} sampling.temperature=0.5", "envs.math.sampling.temperature=0.5"),
        ("algo.kl.coef=1 sampling.temperature=0.5", None),
        ("algo=opsd curriculum=odf", "but OPSDAlgorithm reads no reward"),
        ("algo=sft teacher=local curriculum=pools", "but SFTDistillAlgorithm reads no reward"),
        ("algo=opsd", None),
    ],
)
def test_settings_that_make_no_sense_together_warn(overrides, warns):
    messages = [text for text in warned_by(components, overrides) if "token_id_threshold" not in text]
    assert len(messages) == (warns is not None) and all(warns in text for text in messages)


def test_references_to_the_served_teacher_are_hosted_once():
    assert hosted("algo=opd teacher=local env=[math,reverse_text]") == ["teacher"]
    assert hosted(f"algo=opd algo.teacher={FROZEN}") == []
    kl = "teacher=local algo.kl.coef=1 algo.kl.reference={name:teacher}"
    assert hosted(kl) == ["teacher"] and not components(kl).references
    assert components("algo.kl.coef=1").references == ["initial"]


def test_class_without_the_base_class_options_is_refused(user_package):
    class Forgetful(Algorithm):
        def __init__(self, *, bonus=1.0):
            self.bonus = bonus

    class Entropy(Algorithm):
        action_loss_type = "entropy"

    forgetful, entropy = user_package(Forgetful, Entropy)
    for path, names in ((forgetful, "Forgetful has no"), (entropy, "action_loss_type='entropy'")):
        with pytest.raises(ConfigError) as caught:
            components(f"algo=custom_class algo._target_={path}")
        assert names in str(caught.value)


@pytest.mark.parametrize(
    ("cls", "options", "option"),
    [
        (Gibberish, {"token_id_threshold": 63}, "token_id_threshold=63"),  # ids are 0 to 63
        (Gibberish, {"token_id_threshold": 62}, None),
        (Gibberish, {}, None),
        (Gibberish, {"mode": "mean_logprob"}, None),
        (Repetition, {"window": 65}, "window=65"),
        (Repetition, {"window": 64}, None),
        (Repetition, {"mode": "ngram", "n": 65}, "n=65"),
        (Repetition, {}, None),
    ],
)
def test_filter_that_can_match_nothing_warns(cls, options, option):
    made: Filter = cls(**options)
    made.check("filters.pre_batch.x")
    messages = warned_by(lambda: made.attach(vocab_size=64, longest=64))
    assert [text.split()[0] for text in messages] == ([] if option is None else [f"filters.pre_batch.x.{option}"])


# --- pools of an earlier run ------------------------------------------------------------------------------------------


@pytest.fixture
def pools(tmp_path):
    """`pools(envs…)`: a folder in which each env named has a hard task."""

    def save(*envs):
        write_pools(tmp_path, {"easy": [], "hard": [{"env": env, "key": "k", "task": {}} for env in envs]})
        return str(tmp_path)

    return save


def load(**options):
    curriculum = TaskCurriculum(**options)
    curriculum.check("envs.math.curriculum")
    curriculum.load([vf.Task(vf.TaskData(idx=0, prompt="1+1="))], seed=0, env_name="math")


@pytest.mark.parametrize(("keys", "named"), [(["prompt", "promt"], "'promt'"), ([], "")])
def test_hash_keys_must_be_fields_of_the_task(keys, named):
    with pytest.raises(ConfigError, match=rf"^envs\.math\.curriculum\.hash_keys.*{named}"):
        load(hash_keys=keys)


FINE = '{"env": "math", "key": "k", "task": {"prompt": "p"}}\n'


@pytest.mark.parametrize(
    ("line", "keys", "says"),
    [
        ('{"env": "math", "task": {}}', None, "no field 'key'"),
        ('{"env": "math", "key": "k", "task": {"idx": 0}}', ["prompt"], "no field 'prompt'"),
        ('{"env": "math", "key": "k", "task": 3}', ["prompt"], "is no task of a pool"),
        ('{"env": "math"', None, "is no task of a pool"),
        ("3", None, "is no task of a pool"),
    ],
)
@pytest.mark.parametrize("pool", ["easy", "hard"])
def test_bad_line_of_a_pool_is_named_with_file_and_field(pools, pool, line, keys, says):
    folder = pools("math")
    for name in ("easy", "hard"):
        (Path(folder) / f"{name}_examples.jsonl").write_text(FINE + (line if name == pool else ""))
    with pytest.raises(
        ConfigError, match=rf"^envs\.math\.curriculum\.load_from.*{pool}_examples\.jsonl, line 2 .*{says}"
    ):
        load(load_from=folder, hash_keys=keys)


def test_pools_of_other_envs_warn(pools, caplog):
    load(load_from=pools("maths", "sums"))
    assert "is of an env of that name" in caplog.text
    caplog.clear()
    load(load_from=pools("maths", "math"))
    assert "of that name" not in caplog.text
