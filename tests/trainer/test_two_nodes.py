"""Ranks on two nodes of a Ray cluster, one of which sees nothing of the run's directory."""

import asyncio
import time
from pathlib import Path

import pytest
from ray_nodes import ray_nodes
from run_processes import wait_until
from safetensors.torch import load_file

from prl.base.checkpoint_folders import part_path
from prl.config.schema import ModelConfig
from prl.launch.local import LocalLauncher
from prl.launch.plan import TrainerSpec
from prl.launch.ray import RayLauncher
from prl.rollouts.messages import StepBatch
from prl.rollouts.packing import pack
from prl.transport.files import FileTransport
from prl.transport.ray import RayTransport
from prl.weights.files import FileWeights
from prl.weights.ray import RayWeights

RANKS, STEPS = 2, 2


def spec_of(run_dir, path, weights):
    payload = {
        "model": {"path": path, "dtype": "float32", "trust_remote_code": False},
        "losses": {"": {"_target_": "prl.losses.default_loss", "_partial_": True}},
        "weights": {"_target_": f"{weights.__module__}.{weights.__name__}"},
        "seed": 0,
        "max_steps": STEPS,
        "references": [],
        "trainer": {"_target_": "prl.trainer.trainer.Trainer", "device": "cpu", "batch_timeout_s": 60.0},
        "resume": None,
    }
    return TrainerSpec(run_dir=run_dir, model=ModelConfig(**payload["model"]), payload=payload, num_processes=RANKS)


def train(launcher, transport, spec, make_sample):
    """Train two steps on both ranks; returns the metrics of each."""
    launcher.start_trainer(spec)
    for step in range(1, STEPS + 1):
        rows, truncated = pack([make_sample(20, 4, seed=8 * step + i) for i in range(6)], 64, RANKS)
        for rank in range(RANKS):
            transport.send_batch(StepBatch(step, rows[rank], truncated), rank)
    metrics = []
    for version in range(STEPS + 1):
        deadline = time.monotonic() + 90
        while (line := transport.receive_metrics(version)) is None:
            launcher.ensure_alive()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        metrics.append({name: value for name, value in line.items() if not name.startswith(("time/", "idle/"))})
    asyncio.run(launcher.finish(60))
    return metrics


@pytest.mark.slow
def test_ranks_on_two_nodes_train_as_on_one_machine(tiny_path, make_sample, tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir(), there.mkdir()
    with LocalLauncher() as launcher:
        expected = train(launcher, FileTransport(here), spec_of(here, tiny_path, FileWeights), make_sample)
    with ray_nodes(token=False) as nodes:
        nodes.add("head", 1)
        nodes.add("other", 1, blind_to=tmp_path)
        for name, value in nodes.environment.items():
            monkeypatch.setenv(name, value)
        spec = spec_of(there, tiny_path, RayWeights)
        with RayLauncher() as launcher:
            launcher.reserve(spec.bundles)
            assert len({node.id for node in launcher.nodes.values()}) == RANKS
            folders = [Path(node.folder) for node in launcher.nodes.values()]
            transport = RayTransport(there)
            metrics = train(launcher, transport, spec, make_sample)
            weights = load_file(transport.weights_path(STEPS) / "model.safetensors")
        wait_until(lambda: not nodes.left(), 10, nodes.left)
        wait_until(lambda: not any(folder.exists() for folder in folders), 10, "the nodes' folders go")
    assert metrics == expected
    files = ["model.safetensors", "state/trainer.safetensors"]
    for one, other in [(part_path(here, STEPS) / name, part_path(there, STEPS) / name) for name in files]:
        assert one.read_bytes() == other.read_bytes(), "the checkpoint has come to this machine"
    saved = load_file(part_path(there, STEPS) / "model.safetensors")
    assert weights.keys() == saved.keys() and all(weights[name].equal(saved[name]) for name in saved)
    assert {path.name for path in (there / "logs").iterdir()} == {"trainer.log", "trainer_rank_1.log"}
