"""The number that a sweeper optimises, against numbers worked out by hand."""

import json

import pytest

from prl.base.errors import PrlError
from prl.config.schema import OptimizedMetricConfig
from prl.tools.sweep.metric import optimized

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
