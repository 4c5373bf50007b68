"""A line of metrics, and reading them back."""

import json

import msgspec
import pytest

from prl.rollouts.record_lines import Message, Record, ToolCall


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


HOSTILE = "\x1b[2J![x](http://127.0.0.1/x.png)\n<img src=x onerror=alert(1)>\n\n# 46"


@pytest.fixture
def write_rollouts():
    """`write_rollouts(run_dir, step, count)`: a step's rollout file, whose last line is still being written."""

    def write(run_dir, step, count):
        messages = [
            Message("user", "12+34=", pictures=[(6, "ab" * 32)]),
            Message("assistant", HOSTILE, reasoning="carry", tool_calls=[ToolCall("add", '{"a": 12}')]),
            Message("tool", "46", name="add"),
        ]
        lines = [
            Record(step=step, env="math", group=0, rollout=n, reward=float("nan"), task=3, messages=messages)
            for n in range(count)
        ]
        text = b"\n".join(map(msgspec.json.encode, lines))
        (run_dir / "rollouts").mkdir(parents=True, exist_ok=True)
        (run_dir / "rollouts" / f"step_{step:06d}.jsonl").write_bytes(text + b'\n{"step": 1, "en')

    return write
