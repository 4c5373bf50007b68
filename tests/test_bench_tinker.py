"""scripts/bench_tinker without a server: its figures, and that prl's run has the settings of the loop."""

from argparse import Namespace
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

from prl.config.compose import compose

BENCH = SourceFileLoader("bench_tinker", str(Path(__file__).parents[1] / "scripts" / "bench_tinker")).load_module()


def test_figures_leave_the_first_step_out():
    """Steps of 1 and 3 s; in them 1.5 s of waiting on average, in which trainer and engine work for 1.2 s."""
    side = BENCH.Side([9.0, 10.0, 13.0], [0.0, 0.3, 0.6], [7.0, 8.0, 8.5], [8.0, 1.0, 2.0], [4.0, 0.9, 1.5])
    figures = side.figures()
    assert list(figures.values()) == pytest.approx([2.0, 0.75, 0.3, 0.3, 1.5, 1.2, 0.2])
    rows = BENCH.table({"loop": [side, side], "run": [BENCH.Side([1.0, 2.0], [1.0, 1.0], [1.0, 2.0])]}).splitlines()
    assert rows[2] == "| a step, s | 2.000 (2.000 to 2.000) | 1.000 (1.000 to 1.000) |" and rows[-1].endswith("|  |")


def test_the_run_has_the_settings_of_the_loop():
    args = Namespace(steps=7, rollouts=48, group=6, lr=0.003, rank=5, engine="transformers")
    config = compose([*BENCH.settings(args, 3, 0), "run.name=x"])
    orchestrator, optim = config.orchestrator, config.trainer.optim
    assert (config.max_steps, config.seed, config.model.lora.rank, config.model.lora.alpha) == (7, 3, 5, 32)
    assert (orchestrator.batch_size, orchestrator.group_size, orchestrator.max_async_level) == (48, 6, 0)
    assert (optim["lr"], optim["betas"], optim["eps"], optim["weight_decay"]) == (0.003, [0.9, 0.95], 1e-8, 0.0)
    assert (config.loss["_target_"], config.loss["delta"]) == ("prl.losses.aipo_loss", 1e30)
    assert config.sampling["max_tokens"] == BENCH.LONGEST
