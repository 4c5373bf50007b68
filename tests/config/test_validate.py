"""Checks across fields: each refuses one thing, and names its key."""

import math
import warnings

import pytest

from prl.config.compose import compose
from prl.config.validate import validate
from prl.errors import ConfigError
from prl.launch.components import build_components
from prl.trainer.config import AIPOLossConfig, DefaultLossConfig


def put(config, key, value):
    *path, last = key.split(".")
    for part in path:
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    setattr(config, last, value)


def check(config):
    """All that is refused before a model or a task is looked at."""
    validate(config)
    build_components(config)


def refused(config):
    with pytest.raises(ConfigError) as caught:
        check(config)
    return str(caught.value)


def test_the_default_config_passes_without_a_warning(config):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(config)


@pytest.mark.parametrize("value", ["nope", ""])
@pytest.mark.parametrize(
    ("key", "choice"),
    [
        ("model.dtype", "bfloat16"),
        ("trainer.device", "auto"),
        ("engine.device", "auto"),
        ("monitor.console.mode", "plain"),
    ],
)
def test_a_choice_that_does_not_exist_lists_those_that_do(config, key, choice, value):
    put(config, key, value)
    message = refused(config)
    assert message.startswith(f"{key}={value}: ") and choice in message
    put(config, key, choice)
    check(config)


AT_LEAST_ONE = [
    "max_steps",
    "orchestrator.group_size",
    "orchestrator.eval.num_tasks",
    "orchestrator.eval.k",
    "trainer.num_processes",
    "trainer.tokens_per_forward",
    "trainer.head_chunk",
    "engine.tensor_parallel_size",
    "orchestrator.eval.every",
    "checkpoint.every",
    "orchestrator.batch_size",
]
AT_LEAST_ZERO = [
    "orchestrator.max_async_level",
    "orchestrator.max_off_policy_steps",
    "trainer.schedule.warmup_steps",
]
ABOVE_ZERO = [
    "trainer.optim.lr",
    "trainer.optim.eps",
    "trainer.max_grad_norm",
    "engine.kv_cache_gb",
    "engine.gpu_memory_utilization",
]
DEADLINES = [
    "orchestrator.batch_timeout_s",
    "orchestrator.policy_timeout_s",
    "trainer.ready_timeout_s",
    "trainer.batch_timeout_s",
    "engine.startup_timeout_s",
    "engine.update_timeout_s",
]


@pytest.mark.parametrize("knob", [("stop", "target", 0.5), ("stop", "patience", 2), ("eval", "keep_best", True)])
def test_what_looks_at_evaluations_is_refused_where_no_env_has_any(config, knob):
    node, name, value = knob
    put(config, f"orchestrator.{node}.{name}", value)
    validate(config)
    put(config, "envs.math.eval_args", None)
    assert refused(config) == (
        f"orchestrator.{node}.{name} looks at evaluations, and no env has any: set envs.math.eval_args, now null"
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, 0) for key in AT_LEAST_ONE),
        ("trainer.seq_len", 1),
        *((key, -1) for key in AT_LEAST_ZERO),
        ("trainer.optim.weight_decay", -1.0),
        *((key, value) for key in ABOVE_ZERO for value in (0, -1.0)),
        *((key, value) for key in DEADLINES for value in (0, -1.0, 1e-4, 2e9)),
        *(("engine.max_num_seqs", value) for value in (0, 65537)),
        ("trainer.optim.weight_decay", math.nan),
        ("trainer.optim.lr", math.nan),
        ("orchestrator.eval.sampling.temperature", -0.1),
        ("orchestrator.eval.sampling.temperature", math.nan),
        ("trainer.schedule.decay_fraction", 1.1),
        ("trainer.schedule.decay_fraction", -0.1),
        ("trainer.schedule.min_ratio", 2.0),
        ("envs.math.sampling.temperature", 0.005),
        ("envs.math.sampling.temperature", math.nan),
        ("envs.math.weight", 0.0),
        ("envs.math.timeout_s", -1.0),
        ("envs.math.group_size", 0),
        *(("envs.math.group_timeout_s", value) for value in (0.0, -1.0, math.inf, math.nan)),
        *(("checkpoint.every_minutes", value) for value in (0.0, 1e-300, 1e300)),
        *(("checkpoint.grace_s", value) for value in (-1.0, 1e300)),
        ("seed", 2**32),
        ("seed", -1),
        ("engine.port", 0),
        ("model.max_model_len", 1),
        *(("orchestrator.max_error_share", value) for value in (-0.1, 1.0, 1.5, math.nan)),
    ],
)
def test_a_number_out_of_range_is_refused_by_name(config, key, value):
    put(config, key, value)
    message = refused(config)
    assert key in message and f"{value}" in message


@pytest.mark.parametrize(
    "key", ["orchestrator.eval.every", "checkpoint.every", "engine.port", "envs.math.group_timeout_s"]
)
def test_null_is_fine_where_it_means_something(config, key):
    put(config, key, None)
    check(config)


def test_a_run_may_be_stopped_without_a_last_checkpoint(config):
    config.checkpoint.grace_s = 0.0
    check(config)


@pytest.mark.parametrize(("name", "value"), [("alpha", 3.0), ("target_modules", ["q_proj"])])
def test_adapters_that_are_described_have_a_rank(config, name, value):
    setattr(config.model.lora, name, value)
    with pytest.raises(ConfigError, match=f"model.lora.{name}=.* without model.lora.rank"):
        validate(config)
    config.model.lora.rank = 2
    validate(config)


@pytest.mark.parametrize("seconds", [0.5, 600.0, 7200.0])
def test_a_group_may_have_less_time_than_a_rollout_or_more(config, seconds):
    config.envs["math"].timeout_s, config.envs["math"].group_timeout_s = 600.0, seconds
    check(config)


@pytest.mark.parametrize("share", [0.0, 0.999])
def test_no_failure_at_all_may_be_allowed_but_not_every_one(config, share):
    config.orchestrator.max_error_share = share
    check(config)


@pytest.mark.parametrize(("rollouts", "tokens"), [(None, None), (8, 1000)])
def test_exactly_one_batch_size(config, rollouts, tokens):
    config.orchestrator.batch_size, config.orchestrator.token_batch_size = rollouts, tokens
    message = refused(config)
    assert "exactly one of orchestrator.batch_size and orchestrator.token_batch_size" in message


def test_a_token_batch_has_to_hold_something(config):
    config.orchestrator.batch_size, config.orchestrator.token_batch_size = None, 0
    assert "orchestrator.token_batch_size=" in refused(config)
    config.orchestrator.token_batch_size = 5000
    check(config)


def test_batch_size_is_divisible_by_the_group_size_of_every_env(config):
    config.orchestrator.batch_size = 22
    assert "orchestrator.batch_size=22 must be divisible by orchestrator.group_size=4" in refused(config)
    config.envs["math"].group_size = 3
    assert "orchestrator.batch_size=22 must be divisible by envs.math.group_size=3" in refused(config)
    config.envs["math"].group_size = 11
    check(config)
    config.orchestrator.batch_size, config.orchestrator.token_batch_size = None, 999
    check(config)


@pytest.mark.parametrize("temperature", [0.0, 0.005, -1.0, float("nan")])
def test_the_sampling_temperature_has_a_floor(config, temperature):
    config.envs["math"].sampling.temperature = temperature
    assert "envs.math.sampling.temperature" in refused(config)


@pytest.mark.parametrize("name", ["all", "a/b", "", "a b"])
def test_an_env_name_is_part_of_metric_and_file_names(config, name):
    config.envs[name] = config.envs.pop("math")
    assert "envs" in refused(config) and repr(name) in refused(config)


@pytest.mark.parametrize(
    ("loss", "key", "value"),
    [
        (DefaultLossConfig, "dppo_mask_low", -0.1),
        (DefaultLossConfig, "dppo_mask_high", -0.1),
        (DefaultLossConfig, "kl_tau", math.inf),
        (DefaultLossConfig, "dppo_mask_low", math.inf),
        (DefaultLossConfig, "dppo_mask_high", math.nan),
        (DefaultLossConfig, "delta", math.inf),
        (AIPOLossConfig, "delta", math.nan),
        (DefaultLossConfig, "kl_tau", -1.0),
        (DefaultLossConfig, "delta", 0.0),
        (AIPOLossConfig, "delta", -8.0),
    ],
)
def test_loss_knobs_out_of_range(config, loss, key, value):
    config.loss = loss(**{key: value})
    assert f"loss.{key}" in refused(config)


def test_a_run_needs_an_env(config):
    config.envs = {}
    assert "env=math" in refused(config)


@pytest.mark.parametrize("max_tokens", [0, 512, 513])
def test_max_tokens_leaves_room_for_the_prompt(config, max_tokens):
    config.envs["math"].sampling.max_tokens = max_tokens
    message = refused(config)
    assert "envs.math.sampling.max_tokens" in message and f"{max_tokens}" in message
    assert "model.max_model_len=512" in message or max_tokens == 0
    config.envs["math"].sampling.max_tokens = 511
    check(config)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["+algo@envs.math.algo=grpo", "envs.math.algo.completion_weight=-1"], "envs.math.algo.completion_weight"),
        (["envs.math.sampling.temperature=0.001"], "envs.math.sampling.temperature must be at least 0.01"),
        (["sampling.temperature=0.001"], "sampling.temperature must be at least 0.01"),
        (["sampling.top_k=-1"], "sampling.top_k="),
        (["+loss@envs.math.loss=aipo", "envs.math.loss.delta=-1"], "envs.math.loss.delta="),
        (
            ["+loss@envs.math.loss=custom", "envs.math.loss._target_=prl.train.nope"],
            "envs.math.loss._target_='prl.train",
        ),
        (
            ["+curriculum@envs.math.curriculum=pools", "envs.math.curriculum.easy_threshold=0"],
            "envs.math.curriculum.easy_threshold=0",
        ),
        (
            ["+filters@envs.math.filters=default", "envs.math.filters.pre_batch.repetition.n=0"],
            "envs.math.filters.pre_batch.repetition.n=",
        ),
        (["+envs.math.renderer={name: qwen3}"], "envs.math.renderer={'name': 'qwen3'} has no _target_"),
    ],
)
def test_what_is_an_envs_own_is_checked_under_its_own_key(overrides, key):
    assert key in refused(compose(["run.name=x", *overrides]))


def test_rows_that_cut_the_longest_rollouts_are_warned_of(config):
    assert config.trainer.seq_len == config.model.max_model_len, "they follow the model"
    config.trainer.seq_len = 256
    with pytest.warns(UserWarning, match="trainer.seq_len=256 is below model.max_model_len=512"):
        check(config)


def test_a_model_brings_the_rate_that_suits_it():
    assert compose(["run.name=x"]).trainer.optim.lr == 4e-4
    large = compose(["run.name=x", "model=hf", "model.path=some/model"])
    assert large.trainer.optim.lr == 1e-6 and large.trainer.seq_len == large.model.max_model_len == 4096
    assert compose(["run.name=x", "trainer.optim.lr=0.1"]).trainer.optim.lr == 0.1


def test_thresholds_on_rewards_warn_where_no_reward_is_read(config):
    distilled = compose(["run.name=x", "algo=opd", "curriculum=pools"])
    with pytest.warns(UserWarning, match="OPDAlgorithm reads no reward"):
        check(distilled)


@pytest.mark.parametrize("name", ["", "..", "a/b", "a\\b"])
def test_a_run_name_is_one_directory(config, name):
    config.run.name = name
    assert f"run.name={name!r}" in refused(config)


@pytest.mark.parametrize("key", ["trainer.device", "engine.device"])
def test_cuda_needs_a_gpu(config, monkeypatch, key):
    put(config, key, "cuda")
    monkeypatch.setattr("prl.config.gpus.has_gpu", lambda: False)
    assert f"{key}=cuda" in refused(config)
    monkeypatch.setattr("prl.config.gpus.has_gpu", lambda: True)
    check(config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.optim.lr", math.inf),
        ("engine.port", 70_000),
        ("engine.gpu_memory_utilization", 1.5),
        ("envs.math.weight", math.inf),
        ("envs.math.sampling.temperature", math.inf),
        ("trainer.optim.betas", (0.9,)),
        ("loss.adv_tau", math.nan),
    ],
)
def test_values_that_would_fail_only_later(config, key, value):
    put(config, key, value)
    assert key in refused(config)


def test_a_name_on_the_hub_is_left_to_the_hub(config):
    config.model.path = "Qwen/Qwen3-0.6B"
    check(config)


@pytest.mark.parametrize(("algo", "key"), [("opd", "algo.teacher"), ("sft", "algo.sampling.source")])
def test_a_teacher_that_is_served_elsewhere_has_a_name_and_an_address(algo, key):
    served = ["run.name=x", f"algo={algo}", "teacher=endpoint"]
    for missing, given in (
        ("name", []),
        ("name", ["teacher.base_url=http://h/v1"]),
        ("base_url", ["teacher.name=big"]),
    ):
        message = refused(compose([*served, *given]))
        assert message.startswith(f"teacher.{missing} has no value, and {key} refers to it")
        assert "teacher.name=<served name> teacher.base_url=http" in message
    check(compose([*served, "teacher.name=big", "teacher.base_url=http://h/v1"]))
    check(compose([*served, f"{key}.name=mine", f"{key}.base_url=http://h/v1"]))
    check(compose(["run.name=x", "teacher=endpoint"]))  # which nothing refers to


def test_an_engine_open_to_the_network_warns(config):
    config.engine.host = "0.0.0.0"
    with pytest.warns(UserWarning, match=r"engine\.host=0\.0\.0\.0"):
        check(config)


def test_an_envs_own_filters_may_name_one_slot_alone():
    node = "{post_batch: {mine: {_target_: prl.filters.zero_advantage.ZeroAdvantage}}}"
    filters = build_components(compose(["run.name=x", f"+envs.math.filters={node}"])).envs["math"].filters
    assert filters["pre_batch"] == {} and list(filters["post_batch"]) == ["mine"]
