"""A line of metrics, and reading them back."""

import json

import pytest


def make_line(step, **more):
    return {
        "step": step,
        "reward/all/mean": 0.25 * step,
        "loss/mean": -0.5,
        "entropy/all/mean": 1.0,
        "off_policy/mean": 0.5,
        "off_policy/max": 1.0,
        "tokens/generated_per_second": 1234.0,
        "tokens/trained_per_second": 99.0,
        "tokens/generated": 2468.0,
        "tokens/trained": 198.0,
        "time/step": 2.0,
    } | more


@pytest.fixture
def line():
    """`line(step, **more)`: the metrics of a step."""
    return make_line


@pytest.fixture
def read():
    """`read(run_dir)`: the lines of its metrics.jsonl."""
    return lambda run_dir: [json.loads(text) for text in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def started():
    """`started(monitor, run_dir)`: the monitor of a run of four steps, closed with the test."""
    made = []

    def start(monitor, run_dir):
        monitor.start(run_dir, max_steps=4, run_config={"seed": 0})
        made.append(monitor)
        return monitor

    yield start
    for monitor in made:
        monitor.close()
