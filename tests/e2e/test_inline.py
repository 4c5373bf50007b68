"""A run in one process: `engine=transformers`, and the trainer in a thread."""

import json
import os
import signal
import statistics
import threading
from importlib.machinery import SourceFileLoader
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.slow

SHORT = ("max_steps=2", "orchestrator.batch_size=16", "orchestrator.eval.every=null")


GAP = SourceFileLoader("bench_gap", str(Path(__file__).parents[2] / "scripts" / "bench_gap")).load_module()


def left_threads():
    names = ("prl-trainer", "prl-engine", "prl-teacher")
    return [thread for thread in threading.enumerate() if thread.name.startswith(names)]


def test_debug_fast_learns_on_policy_and_starts_nothing(inline):
    before = psutil.Process().children(recursive=True)
    run = inline("debug=fast", "trainer.token_export=true")
    assert run.status == 0, run.stderr
    rewards = run.column("reward/all/mean")
    assert len(rewards) == 10 and statistics.mean(rewards[-3:]) > statistics.mean(rewards[:3]) + 0.15
    gaps = GAP.differences(run.dir)
    assert len(gaps) > 1000 and GAP.kl_sample_train(gaps)[1] < 1e-9
    assert max(run.column("logprob_gap/mean")) < 1e-5 and set(run.column("off_policy/max")) == {0.0}
    assert psutil.Process().children(recursive=True) == before
    assert [path.name for path in (run.dir / "logs").iterdir()] == ["orchestrator.log"]
    assert (run.dir / "checkpoints" / "step_000010" / "model.safetensors").exists()
    assert left_threads() == []


def test_the_gap_by_hand(tmp_path):
    """d is .1, -.3 and .2 over two files; a token that was not sampled counts nothing."""
    for rank, line in enumerate(
        [
            {"mask": [0, 1, 1], "inference_logprobs": [0.0, -1.0, -2.0], "trainer_logprobs": [-5.0, -1.1, -1.7]},
            {"mask": [1], "inference_logprobs": [-0.5], "trainer_logprobs": [-0.7]},
        ]
    ):
        path = tmp_path / "tokens" / "step_000001" / f"rank_{rank}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(line) + "\n")
    assert GAP.kl_sample_train(GAP.differences(tmp_path)) == pytest.approx((0.0, 0.14 / 6), abs=1e-12)


def test_it_repeats_itself(inline):
    one, two = (inline("debug=fast", "max_steps=3", name=name) for name in ("one", "two"))
    for key in ("reward/all/mean", "grad_norm", "entropy/all/mean"):
        assert one.column(key) == two.column(key)
    other = inline("debug=fast", "max_steps=3", "seed=1", name="other")
    assert other.column("grad_norm") != one.column("grad_norm")


def test_it_runs_ahead_as_with_servers(inline):
    run = inline(*SHORT, "max_steps=5", "orchestrator.max_async_level=1")
    assert run.status == 0, run.stderr
    assert max(run.column("off_policy/max")) == 1.0


LOSS = """
def fails(inputs):
    raise ValueError("no loss for you")
"""


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("loss=custom", "loss._target_=own_loss.fails"), "no loss for you"),
        (("trainer.optim.lr=1e6", "max_steps=20", "trainer.max_grad_norm=1e9"), "gradient's norm is"),
    ],
)
def test_a_trainer_that_fails_ends_the_run_with_its_error(inline, tmp_path, overrides, message):
    (tmp_path / "own_loss.py").write_text(LOSS)
    run = inline(*SHORT, *overrides)
    assert run.status == 1
    assert message in run.stderr and message in run.result["error"] and run.result["status"] == "failed"
    assert left_threads() == []


def test_ctrl_c_ends_it_with_a_checkpoint_and_it_goes_on(inline, tmp_path):
    metrics = tmp_path / "run" / "metrics.jsonl"

    def stop_soon():
        while not (metrics.exists() and metrics.read_text().count("\n") > 3):
            if stopping.wait(0.02):
                return
        os.kill(os.getpid(), signal.SIGINT)

    stopping = threading.Event()
    watcher = threading.Thread(target=stop_soon)
    watcher.start()
    endless = ("orchestrator.batch_size=16", "orchestrator.eval.every=null")
    try:
        run = inline(*endless, "max_steps=1000")
    finally:
        stopping.set()
        watcher.join()
    assert run.status == 130 and run.result["status"] == "stopped", run.stderr
    assert left_threads() == []
    stopped = run.result["steps"]
    again = inline(*endless, f"run.resume={run.dir}", f"max_steps={stopped + 3}")
    assert again.status == 0, again.stderr
    assert [line["step"] for line in again.steps] == list(range(again.steps[-1]["step"] + 1))


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (("engine=default",), "launcher=inline"),
        (("algo=opd", "teacher=local"), "launcher=inline"),
        (("trainer.num_processes=2",), "trainer.num_processes"),
    ],
)
def test_what_needs_a_process_is_refused(inline, overrides, key):
    run = inline(*SHORT, *overrides)
    assert run.status == 2 and key in run.stderr
    assert not run.dir.exists()
