"""The number that a sweeper optimises, against numbers worked out by hand."""

import contextlib
import json

import pytest

from prl.base.errors import ConfigError, PrlError
from prl.config.schema import OptimizedMetricConfig
from prl.tools.sweep.metric import check_objective, objective, optimized, source_of

LINES = [
    {"step": 0, "eval/a/avg@1": 0.9, "eval/b/avg@1": 0.9},
    {"step": 1, "reward/all/mean": 0.1, "loss/mean": 5.0},
    {"step": 2, "reward/all/mean": 0.2, "loss/mean": 4.0, "eval/a/avg@1": 0.3, "eval/b/avg@1": 0.5},
    {"step": 3, "reward/all/mean": 0.3, "loss/mean": 2.0, "eval/a/errored": 1},
    {"step": 4, "reward/all/mean": 0.6, "loss/mean": 1.0, "eval/a/avg@1": 0.6, "eval/b/avg@1": 0.8},
]


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return tmp_path


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({}, (0.4 + 0.7) / 2),
        ({"last": 1}, 0.7),
        ({"last": 9}, 0.55),  # the evaluation before training does not count
        ({"key": "eval/b/avg@*", "last": 1}, 0.8),
        ({"key": "loss/mean", "last": 3}, (4 + 2 + 1) / 3),
        ({"key": "reward/all/mean"}, 0.45),
    ],
    ids=str,
)
def test_mean_over_what_matches_then_over_the_last_steps(run_dir, options, value):
    assert optimized(run_dir, OptimizedMetricConfig(**options), {}) == pytest.approx(value)


def test_run_without_evaluation_is_compared_by_training_reward(run_dir):
    lines = [{key: value for key, value in line.items() if "eval" not in key} for line in LINES]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert optimized(run_dir, OptimizedMetricConfig(), {}) == pytest.approx(0.45)


@pytest.mark.parametrize(
    ("lines", "key", "says"),
    [
        (LINES, "loss/man", r"optimized_metric.key='loss/man': .* has no such metric; near it are loss/mean"),
        (LINES, "eval/c/*", "has no such metric"),
        ([{"step": 1, "loss/mean": None}], "loss/mean", "not finite"),  # as NaN is written
        ([], None, "has no such metric"),
    ],
)
def test_a_metric_that_is_not_there_is_named(run_dir, lines, key, says):
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(PrlError, match=says):
        optimized(run_dir, OptimizedMetricConfig(key=key), {})


def test_without_a_metrics_file_the_monitor_is_named(tmp_path):
    with pytest.raises(PrlError, match="monitor jsonl"):
        optimized(tmp_path, OptimizedMetricConfig(), {})


def of_source(source, **envs):
    """The config of a run with this source of rollouts, and with another for some envs."""
    algo = {"sampling": {"source": source}}
    own = {name: env and {"weight": 1, "algo": {"sampling": {"source": env}}} for name, env in envs.items()}
    return {"algo": algo, "envs": {"math": {"weight": 1, "algo": None}} | own}


TEACHER = {"name": "large", "base_url": None}
TRAINED = [
    {"step": 1, "reward/all/mean": 0.9, "reward/math/mean": 1.0, "reward/maze/mean": 0.8, "eval/math/avg@1": 0.3}
]


@pytest.mark.parametrize(
    ("config", "metric", "source"),
    [
        (of_source("policy"), "reward/all/mean", ""),
        (of_source("demonstrations"), "reward/all/mean", "demonstrations"),
        (of_source("demonstrations"), "metric/math/answer", "demonstrations"),
        (of_source(TEACHER), "reward/math/mean", "a frozen model"),
        (of_source(TEACHER), "eval/math/avg@1", ""),
        (of_source(TEACHER), "loss/mean", ""),
        (of_source("policy", maze=TEACHER), "reward/all/mean", "a frozen model"),  # of some of its rollouts
        (of_source("policy", maze=TEACHER), "reward/math/mean", ""),
        (of_source(TEACHER, maze="policy"), "reward/maze/mean", ""),
        ({"envs": {"math": {"weight": 0}}, "algo": {"sampling": {"source": TEACHER}}}, "reward/all/mean", ""),
        ({}, "reward/all/mean", ""),
        ({"envs": ["math"], "algo": None}, "reward/all/mean", ""),
        ({"envs": 5}, "reward/all/mean", ""),
    ],
)
def test_whose_rewards_a_metric_has(config, metric, source):
    assert source_of(config, metric) == source


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({}, 0.3),
        ({"key": "reward/*/mean"}, 1.0),  # of the env whose rollouts the policy samples
        ({"key": "reward/all/mean"}, None),
        ({"key": "reward/maze/*"}, None),
    ],
)
def test_rewards_of_a_source_are_no_objective(options, value):
    config, options = of_source("policy", maze=TEACHER), OptimizedMetricConfig(**options)
    if value is not None:
        assert objective(TRAINED, options, config) == value
        return
    with pytest.raises(PrlError, match="those of a frozen model, not the policy's: evaluate the run"):
        objective(TRAINED, options, config)


@pytest.mark.parametrize(
    ("every", "key", "refused"),
    [(None, None, True), (5, None, False), (5, "reward/all/mean", True), (None, "loss/mean", False)],
)
def test_a_run_that_will_have_no_objective_is_refused(every, key, refused):
    config = of_source("demonstrations") | {"orchestrator": {"eval": {"every": every}}}
    with pytest.raises(ConfigError, match="demonstrations") if refused else contextlib.nullcontext():
        check_objective(OptimizedMetricConfig(key=key), config)
