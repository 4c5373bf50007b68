"""TensorBoard's event files, read back, or with a writer that only remembers."""

import importlib.machinery
import sys
import types

import pytest

from prl.config.build import build
from prl.errors import ConfigError
from prl.monitors.base import Monitor
from prl.monitors.tensorboard import TensorBoard

NODE = {"_target_": "prl.monitors.tensorboard.TensorBoard"}


class Writer:
    """What torch's SummaryWriter is asked."""

    def __init__(self, log_dir, purge_step=None):
        self.log_dir, self.purge_step, self.scalars, self.calls = log_dir, purge_step, [], []

    def add_scalar(self, tag, value, global_step):
        self.scalars.append((tag, value, global_step))

    def flush(self):
        self.calls.append(("flush", len(self.scalars)))

    def close(self):
        self.calls.append(("close", len(self.scalars)))


@pytest.fixture
def installed(monkeypatch):
    """The package and torch's module for it, which cannot be imported without the package."""
    package = types.ModuleType("tensorboard")
    package.__spec__ = importlib.machinery.ModuleSpec("tensorboard", None)
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "tensorboard", package)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)


@pytest.fixture
def missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)


def test_each_metric_is_a_scalar_of_its_step(installed, tmp_path):
    monitor = build(NODE, Monitor, "monitor.tensorboard")
    monitor.start(tmp_path, max_steps=4, run_config={})
    writer = monitor._writer
    assert writer.log_dir == str(tmp_path / "tensorboard")
    monitor.status("training")
    monitor.step({"step": 0, "eval/math/avg@1": 0.3})
    monitor.step({"step": 1, "reward/all/mean": 0.25, "loss/mean": -0.5})
    assert writer.scalars == [("eval/math/avg@1", 0.3, 0), ("reward/all/mean", 0.25, 1), ("loss/mean", -0.5, 1)]
    monitor.close()
    assert writer.calls == [("flush", 1), ("flush", 3), ("close", 3)], "each step is on disk when it is recorded"


def test_a_step_has_histograms_and_a_table_of_its_rollouts(tmp_path, recorded):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monitor = build(NODE | {"table_every": 2}, Monitor, "monitor.tensorboard")
    monitor.start(tmp_path, max_steps=4, run_config={})
    for step in (1, 2):
        recorded(tmp_path, step, reward=0.25 * step)
        tokens = tmp_path / "tokens" / f"step_{step:06d}" / "rank_0.jsonl"
        tokens.parent.mkdir(parents=True)
        tokens.write_text('{"env": "math", "ratio": [null, 1.0, 1.0]}\n')
        monitor.step({"step": step, "loss/mean": 0.5})
    monitor.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"), {"histograms": 0, "tensors": 0})
    events.Reload()
    assert [event.value for event in events.Scalars("loss/mean")] == [0.5, 0.5]
    histograms = events.Histograms("reward/math")
    assert [(each.step, each.histogram_value.sum) for each in histograms] == [(1, 0.25), (2, 0.5)]
    assert [each.histogram_value.num for each in events.Histograms("log_ratio/math")] == [2, 2]
    (table,) = events.Tensors("rollouts/text_summary")
    assert table.step == 2 and b"user: 1+1=" in table.tensor_proto.string_val[0]


def test_a_missing_package_is_refused_before_anything_starts(missing, tmp_path):
    with pytest.raises(ConfigError) as caught:
        build(NODE, Monitor, "monitor.tensorboard")
    assert str(caught.value) == (
        "monitor.tensorboard needs the package tensorboard, which is not installed: pip install 'prl[tensorboard]'"
    )
    with pytest.raises(ConfigError, match="package tensorboard"):
        TensorBoard().start(tmp_path, max_steps=4, run_config={})


def test_torch_is_not_loaded_until_it_starts():
    assert not {name for name in vars(sys.modules[TensorBoard.__module__]) if "torch" in name.lower()}
