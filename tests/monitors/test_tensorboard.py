"""TensorBoard's event files, read back."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugin_util import markdown_to_safe_html

from prl.monitors.tensorboard import TensorBoard


def test_each_metric_is_a_scalar(tmp_path):
    monitor = TensorBoard()
    monitor.start(tmp_path, max_steps=4, run_config={})
    for step in (1, 2):
        monitor.step({"step": step, "loss/mean": 0.5 * step})
    monitor.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss/mean")] == [(1, 0.5), (2, 1.0)]
    assert events.Tags()["scalars"] == ["loss/mean"]


@pytest.fixture
def events_of(tmp_path, write_rollouts):
    """What TensorBoard reads of a run of 40 steps, of which three were taken."""
    for step in (1, 2, 3):
        write_rollouts(tmp_path, step, 9)
    monitor = TensorBoard()
    config = {
        "seed": 3,
        "trainer": {"optim": {"lr": 1e-3}},
        "envs": {"math": {"args": {"prompt": "a\nb"}}},
        "none": None,
    }
    monitor.start(tmp_path, max_steps=40, run_config=config)
    for step in range(4):
        monitor.step({"step": step})
    monitor.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    return events


def text_of(event):
    return markdown_to_safe_html(event.tensor_proto.string_val[0])


def test_the_config_is_a_text_and_hyperparameters(events_of):
    [event] = events_of.Tensors("config/text_summary")
    assert "seed: 3" in text_of(event) and "lr: 0.001" in text_of(event)
    found = events_of.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"trainer.optim.lr" in found and b"envs.math.args.prompt" in found


def test_eight_rollouts_of_every_other_step_are_texts_that_load_nothing(events_of):
    texts = [tag for tag in events_of.Tags()["tensors"] if tag.startswith("rollouts/")]
    assert len(texts) == 8
    assert [event.step for event in events_of.Tensors("rollouts/0/text_summary")] == [1, 3]
    shown = text_of(events_of.Tensors("rollouts/7/text_summary")[0])
    assert "12+34=[picture abababab]" in shown and "carry" in shown and "add" in shown and "rollout: 7" in shown
    assert "<img" not in shown and "<h1" not in shown and "\x1b" not in shown
