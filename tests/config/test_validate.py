"""Checks across fields: each refuses one thing, and names its key."""

import copy
import math
import warnings

import pytest
from prepared_run import validated

from prl.base.errors import ConfigError
from prl.config import hardware
from prl.config.build import plain
from prl.config.compose import compose, typed_config
from prl.config.schema import TrainConfig
from prl.launch.components import build_components


def put(config, key, value):
    *path, last = key.split(".")
    for part in path:
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    if isinstance(config, dict):
        config[last] = value
    else:
        setattr(config, last, value)


def check(config):
    """All that is refused before a model or a task is looked at, of a config that was changed since it was read."""
    config = typed_config(TrainConfig, plain(config))
    validated(config)
    build_components(config)


def refused(config):
    with pytest.raises(ConfigError) as caught:
        check(config)
    return str(caught.value)


def test_the_default_config_passes_without_a_warning(config):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(config)


CHOICES = {
    "model.dtype": "bfloat16",
    "trainer.device": "auto",
    "engine.device": "auto",
    "monitor.console.mode": "plain",
}


@pytest.mark.parametrize(("key", "choice"), CHOICES.items())
def test_a_choice_that_does_not_exist_lists_those_that_do(config, key, choice):
    put(config, key, "nope")
    message = refused(config)
    assert message.startswith(f"{key}=nope: ") and choice in message
    put(config, key, choice)
    check(config)


NAN, INF = math.nan, math.inf
DEADLINE = (0, -1.0, 1e-4, 2e9)
OUT_OF_RANGE = {
    "seed": (-1, 2**32),
    "max_steps": (0,),
    "model.max_model_len": (1,),
    "orchestrator.group_size": (0,),
    "orchestrator.batch_size": (0,),
    "orchestrator.max_async_level": (-1,),
    "orchestrator.max_off_policy_steps": (-1,),
    "orchestrator.max_error_share": (-0.1, 1.0, NAN),
    "orchestrator.eval.num_tasks": (0,),
    "orchestrator.eval.k": (0,),
    "orchestrator.eval.every": (0,),
    "orchestrator.eval.sampling.temperature": (-0.1, NAN),
    "orchestrator.batch_timeout_s": DEADLINE,
    "orchestrator.policy_timeout_s": DEADLINE,
    "trainer.num_processes": (0,),
    "trainer.seq_len": (1,),
    "trainer.tokens_per_forward": (0,),
    "trainer.head_chunk": (0,),
    "trainer.max_grad_norm": (0, -1.0),
    "trainer.ready_timeout_s": DEADLINE,
    "trainer.batch_timeout_s": DEADLINE,
    "trainer.optim.lr": (0, -1.0, NAN, INF),
    "trainer.optim.eps": (0, -1.0),
    "trainer.optim.betas": ([0.9],),
    "trainer.optim.weight_decay": (-1.0, NAN),
    "trainer.schedule.warmup_steps": (-1,),
    "trainer.schedule.decay_fraction": (-0.1, 1.1),
    "trainer.schedule.min_ratio": (2.0,),
    "engine.kv_cache_gb": (0, -1.0),
    "engine.gpu_memory_utilization": (0, 1.5),
    "engine.max_num_seqs": (0, 65537),
    "engine.tensor_parallel_size": (0,),
    "engine.port": (0, 70_000),
    "engine.startup_timeout_s": DEADLINE,
    "engine.update_timeout_s": DEADLINE,
    "envs.math.weight": (-1.0, INF),
    "envs.math.timeout_s": (-1.0,),
    "envs.math.group_size": (0,),
    "envs.math.group_timeout_s": (0.0, -1.0, INF, NAN),
    "envs.math.sampling.temperature": (-1.0, 0.0, 0.005, NAN, INF),
    "envs.math.sampling.max_tokens": (0, 512, 513),
    "checkpoint.every": (0,),
    "checkpoint.every_minutes": (0.0, 1e-300, 1e300),
    "checkpoint.grace_s": (-1.0, 1e300),
    "loss.adv_tau": (NAN,),
    "loss.dppo_mask_low": (-0.1, INF),
    "loss.dppo_mask_high": (-0.1, NAN),
    "loss.kl_tau": (-1.0, INF),
    "loss.delta": (0.0, INF),
    "run.name": ("", "..", "a/b", "a\\b"),
}


@pytest.mark.parametrize("key", OUT_OF_RANGE)
def test_a_value_out_of_range_is_refused_by_name(config, key):
    for value in OUT_OF_RANGE[key]:
        changed = copy.deepcopy(config)
        put(changed, key, value)
        message = refused(changed)
        assert key in message and (f"{value}" in message or f"{value!r}" in message)


@pytest.mark.parametrize("value", [0.0, -8.0, NAN])
def test_bounds_of_a_chosen_loss_are_its_own(config, value):
    config.loss = {"_target_": "prl.losses.aipo_loss", "_partial_": True, "delta": value}
    assert "loss.delta" in refused(config)


ALLOWED = {
    "orchestrator.eval.every": (None,),
    "orchestrator.max_error_share": (0.0, 0.999),
    "checkpoint.every": (None,),
    "checkpoint.grace_s": (0.0,),  # stopped without a last checkpoint
    "engine.port": (None,),
    "envs.math.group_timeout_s": (None, 0.5, 7200.0),  # a rollout has 600
    "envs.math.sampling.max_tokens": (511,),  # leaves room for a prompt
    "model.path": ("Qwen/Qwen3-0.6B",),  # left to the hub
}


@pytest.mark.parametrize("key", ALLOWED)
def test_a_value_at_its_bound_is_fine(config, key):
    for value in ALLOWED[key]:
        put(config, key, value)
        check(config)


@pytest.mark.parametrize("option", [("stop", "target", 0.5), ("stop", "patience", 2), ("eval", "keep_best", True)])
def test_what_looks_at_evaluations_is_refused_where_no_env_has_any(config, option):
    node, name, value = option
    put(config, f"orchestrator.{node}.{name}", value)
    validated(config)
    put(config, "envs.math.eval_args", None)
    assert refused(config).startswith(f"orchestrator.{node}.{name} looks at evaluations, and no env has any")


@pytest.mark.parametrize(("name", "value"), [("alpha", 3.0), ("target_modules", ["q_proj"])])
def test_adapters_that_are_described_have_a_rank(config, name, value):
    setattr(config.model.lora, name, value)
    assert refused(config).startswith("model.lora.rank has no value")
    config.model.lora.rank = 2
    validated(config)


def test_adapters_freeze_all_weights_by_themselves(config):
    config.model.freeze = ["embed_tokens"]
    validated(config)
    config.model.lora.rank = 2
    assert refused(config).startswith("model.freeze: with model.lora.rank all weights are frozen")


@pytest.mark.parametrize(("rollouts", "tokens"), [(None, None), (8, 1000)])
def test_exactly_one_batch_size(config, rollouts, tokens):
    config.orchestrator.batch_size, config.orchestrator.token_batch_size = rollouts, tokens
    message = refused(config)
    assert "exactly one of orchestrator.batch_size and orchestrator.token_batch_size" in message


def test_a_token_batch_has_to_hold_something(config):
    config.orchestrator.batch_size, config.orchestrator.token_batch_size = None, 0
    assert "orchestrator.token_batch_size=" in refused(config)
    config.orchestrator.token_batch_size = 999
    check(config)


def test_batch_size_is_divisible_by_the_group_size_of_every_env(config):
    config.orchestrator.batch_size = 22
    assert "orchestrator.batch_size=22 must be divisible by orchestrator.group_size=4" in refused(config)
    config.envs["math"].group_size = 3
    assert "orchestrator.batch_size=22 must be divisible by envs.math.group_size=3" in refused(config)
    config.envs["math"].group_size = 11
    check(config)


@pytest.mark.parametrize("name", ["all", "a/b", "", "a b"])
def test_an_env_name_is_part_of_metric_and_file_names(config, name):
    config.envs[name] = config.envs.pop("math")
    assert "envs" in refused(config) and repr(name) in refused(config)


def test_a_run_needs_an_env(config):
    config.envs = {}
    assert "env=math" in refused(config)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["+algo@envs.math.algo=grpo", "envs.math.algo.completion_weight=-1"], "envs.math.algo.completion_weight"),
        (["envs.math.sampling.temperature=0.001"], "envs.math.sampling.temperature must be at least 0.01"),
        (["sampling.temperature=0.001"], "sampling.temperature must be at least 0.01"),
        (["sampling=greedy"], "sampling.temperature must be at least 0.01"),
        (["+sampling@envs.math.sampling=greedy"], "envs.math.sampling.temperature must be at least 0.01"),
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
        (["+envs.math.models.judge=large"], "envs.math.models.judge='large' is not a model reference"),
        (["+envs.math.models.judge.name=large"], "envs.math.models.judge is a frozen model without base_url"),
        (
            ["+envs.math.models.judge={name: teacher, base_url: nowhere}"],
            "envs.math.models.judge.base_url='nowhere' is",
        ),
        (["+envs.math.models.judge=policy", "envs.math.in_process=false"], "envs.math.models: graders that ask"),
        (["envs.math.weight=0"], "envs.math.weight=0: no env is trained on"),
    ],
)
def test_what_is_an_envs_own_is_checked_under_its_own_key(overrides, key):
    assert key in refused(compose(["run.name=x", *overrides]))


def test_rows_that_cut_the_longest_rollouts_are_warned_of(config):
    assert config.trainer.seq_len == config.model.max_model_len, "they follow the model"
    config.trainer.seq_len = 256
    with pytest.warns(UserWarning, match="trainer.seq_len=256 cuts samples: model.max_model_len=512"):
        check(config)


def test_a_model_brings_the_rate_that_suits_it():
    assert compose(["run.name=x"]).trainer.optim["lr"] == 4e-4
    large = compose(["run.name=x", "model=hf", "model.path=some/model"])
    assert large.trainer.optim["lr"] == 1e-6 and large.trainer.seq_len == large.model.max_model_len == 4096
    assert compose(["run.name=x", "trainer.optim.lr=0.1"]).trainer.optim["lr"] == 0.1


def test_thresholds_on_rewards_warn_where_no_reward_is_read(config):
    distilled = compose(["run.name=x", "algo=opd", "curriculum=pools"])
    with pytest.warns(UserWarning, match="OPDAlgorithm reads no reward"):
        check(distilled)


@pytest.mark.parametrize("key", ["trainer.device", "engine.device"])
def test_cuda_needs_a_gpu(config, monkeypatch, key):
    put(config, key, "cuda")
    monkeypatch.setattr(hardware, "listed", lambda: ())
    assert f"{key}=cuda" in refused(config)
    monkeypatch.setattr(hardware, "listed", lambda: (hardware.Gpu("Some GPU", 80 << 30),))
    monkeypatch.setattr(hardware, "has_gpu_packages", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    check(config)


@pytest.mark.parametrize(("algo", "key"), [("opd", "algo.teacher"), ("sft", "algo.sampling.source")])
def test_served_teacher_needs_name_and_address(algo, key):
    served = ["run.name=x", f"algo={algo}", "teacher=endpoint"]
    for missing, given in (("name", ["teacher.base_url=http://h/v1"]), ("base_url", ["teacher.name=big"])):
        message = refused(compose([*served, *given]))
        assert message.startswith(f"teacher.{missing} has no value, and {key} refers to it")
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
