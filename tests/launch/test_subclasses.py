"""A user's subclass of a launcher, weights or an engine is treated as the class that it extends."""

import os

import pytest
from prepared_run import planned, validated

from prl.base.errors import ConfigError
from prl.config.compose import compose
from prl.launch.run import prepare
from prl.launch.shared_engines import launcher_of
from prl.train import main as train

MODULE = """
from prl.engines.vllm.engine import VLLMEngine
from prl.launch.ray import RayLauncher
from prl.launch.slurm import SlurmLauncher
from prl.weights.ray import RayWeights

class MyRay(RayLauncher): ...
class MySlurm(SlurmLauncher): ...
class MyWeights(RayWeights): ...
class MyEngine(VLLMEngine): ...
"""
RAY = ("launcher=ray", "launcher._target_=subclasses_mine.MyRay", "run.name=x")
WEIGHTS = ("weights=ray", "weights._target_=subclasses_mine.MyWeights")


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "subclasses_mine.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))


def prepared(*overrides):
    """Prepare a run as the command does."""
    config = compose([*overrides])
    with launcher_of(config.launcher) as launcher:
        return prepare(config, planned(config), launcher)


def test_a_launcher_that_places_processes_has_a_machine_and_workers_on_ray():
    validated(compose([*RAY, "machine.gpus=8", "envs.math.workers.where=ray"]))
    with pytest.raises(ConfigError, match="choose launcher=ray as well"):
        validated(compose(["run.name=x", "envs.math.workers.where=ray"]))


def test_weights_that_need_ray_need_a_launcher_that_places():
    assert prepared(*RAY, *WEIGHTS, "dry_run=true")
    with pytest.raises(ConfigError, match="choose weights=files, or that launcher"):
        prepared("run.name=x", *WEIGHTS, "dry_run=true")


def test_weights_without_files_take_no_room():
    bundles = {way: planned(compose([*RAY, f"weights={way}"])).bundles for way in ("ray", "transfer")}
    assert {bundle.process for bundle in bundles["ray"] if bundle.room} == {"engine", "trainer"}
    assert not any(bundle.room for bundle in bundles["transfer"])


def test_an_engine_with_priorities_has_evaluations_come_last(tmp_path):
    chosen = ["run.name=x", "engine._target_=subclasses_mine.MyEngine", "orchestrator.eval.mode=beside"]
    spec = planned(compose(chosen)).policy.spec
    assert "--scheduling-policy" in spec.server.command(spec, 8000)
    spec = planned(compose(chosen[:2])).policy.spec
    assert "--scheduling-policy" not in spec.server.command(spec, 8000)


def test_a_launcher_that_submits_starts_nothing_here(tmp_path, monkeypatch, capsys):
    (tmp_path / "sbatch").write_text(f'#!/bin/sh\ncat > {tmp_path}/script\necho "7;prl"\n')
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    chosen = ["launcher=slurm", "launcher._target_=subclasses_mine.MySlurm", f"run.dir={tmp_path / 'x'}"]
    assert train(compose(chosen), chosen).status == "submitted" and "job 7" in capsys.readouterr().err
    assert "launcher=ray" in (tmp_path / "script").read_text()
