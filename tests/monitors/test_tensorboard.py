"""TensorBoard's event files, read back."""

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

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
