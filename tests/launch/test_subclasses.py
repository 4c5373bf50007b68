"""A user's subclass of a launcher, transport or engine is treated as the class that it extends."""

import os
import subprocess
import sys

import pytest
from prepared_run import planned, validated

from prl.base.errors import ConfigError
from prl.config.compose import compose
from prl.launch.run import prepare
from prl.launch.shared_engines import launcher_of

MODULE = """
from prl.engines.vllm.engine import VLLMEngine
from prl.launch.ray import RayLauncher
from prl.launch.slurm import SlurmLauncher
from prl.transport.ray import RayTransport

class MyRay(RayLauncher): ...
class MySlurm(SlurmLauncher): ...
class MyTransport(RayTransport): ...
class MyEngine(VLLMEngine): ...
"""
RAY = ("launcher=ray", "launcher._target_=subclasses_mine.MyRay", "run.name=x")
TRANSPORT = ("weights=ray", "weights._target_=subclasses_mine.MyTransport")


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


def test_a_transport_that_needs_no_shared_folder_needs_a_launcher_that_places():
    assert prepared(*RAY, *TRANSPORT, "dry_run=true")
    with pytest.raises(ConfigError, match="choose weights=files, or that launcher"):
        prepared("run.name=x", *TRANSPORT, "dry_run=true")


def test_an_engine_with_priorities_has_evaluations_come_last(tmp_path):
    chosen = ["run.name=x", "engine._target_=subclasses_mine.MyEngine", "orchestrator.eval.mode=beside"]
    spec = planned(compose(chosen)).policy.spec
    assert "--scheduling-policy" in spec.server.command(spec, 8000)
    spec = planned(compose(chosen[:2])).policy.spec
    assert "--scheduling-policy" not in spec.server.command(spec, 8000)


def test_a_launcher_that_submits_starts_nothing_here(tmp_path):
    (tmp_path / "sbatch").write_text(f'#!/bin/sh\ncat > {tmp_path}/script\necho "7;prl"\n')
    (tmp_path / "sbatch").chmod(0o755)
    env = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}",
    }
    chosen = ["launcher=slurm", "launcher._target_=subclasses_mine.MySlurm", "run.name=x"]
    command = [sys.executable, "-m", "prl.train", *chosen]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "job 7" in done.stderr, done.stderr
    assert "launcher=ray" in (tmp_path / "script").read_text()
