"""TensorBoard's event files, read back."""

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from prl.monitors.tensorboard import TensorBoard


def test_step_has_scalars_histograms_and_rollouts(tmp_path, recorded):
    monitor = TensorBoard(table_every=2)
    monitor.start(tmp_path, max_steps=4, run_config={})
    for step in (1, 2):
        recorded(tmp_path, step, reward=0.25 * step)
        monitor.step({"step": step, "loss/mean": 0.5})
    monitor.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"), {"histograms": 0, "tensors": 0})
    events.Reload()
    assert [event.value for event in events.Scalars("loss/mean")] == [0.5, 0.5]
    histograms = events.Histograms("reward/math")
    assert [(each.step, each.histogram_value.sum) for each in histograms] == [(1, 0.25), (2, 0.5)]
    (table,) = events.Tensors("rollouts/text_summary")
    assert table.step == 2 and b"user: 1+1=" in table.tensor_proto.string_val[0]
