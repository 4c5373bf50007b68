"""Threads of each process: from the cores, those who share them, and the model's size; or as the config says."""

import os
from dataclasses import replace

import pytest
from prepared_run import planned

from prl.config import threads
from prl.config.compose import compose
from prl.config.hardware import Machine, MachineConfig
from prl.config.model_folder import local_folder
from prl.engines.vllm.engine import VLLMEngine
from prl.launch import command
from prl.launch.local import trainer_environment
from prl.launch.plan import plan

MILLION = 1_000_000


@pytest.fixture
def of(monkeypatch):
    """`of(cores, millions of parameters, *overrides)`: threads of engine and of each rank."""
    monkeypatch.setenv("PRL_TOKEN", "t")

    def found(cores, size, *overrides):
        monkeypatch.setattr(threads, "parameters_of", lambda model: size * MILLION)
        config = compose(["run.name=x", "engine.device=cpu", "trainer.device=cpu", *overrides])
        run = plan(config, Machine(MachineConfig(cores=cores, gpus=8 if "cuda" in str(overrides) else 0)))
        return run.policy.spec.threads, run.trainer.threads

    return found


K0, RANKS, OPD = "orchestrator.max_async_level=0", "trainer.num_processes=2", "algo=opd"
GPU = ("engine.device=cuda", "trainer.device=cuda")


@pytest.mark.parametrize(
    ("cores", "size", "overrides", "expected"),
    [
        (1, 135, [], (1, 1)),
        (2, 135, [], (1, 2)),
        (2, 135, [K0], (2, 2)),
        (16, 1, [], (1, 1)),
        (16, 6, [], (2, 2)),
        (16, 135, [], (8, 16)),
        (16, 135, [RANKS], (5, 8)),
        (16, 135, [OPD], (5, 16)),
        (16, 135, [OPD, K0], (8, 16)),
        (16, 135, ["trainer.device=cuda"], (16, 8)),
        (16, 135, ["engine.device=cuda"], (8, 16)),
        (16, 135, [*GPU], (8, 8)),
        (16, 135, [*GPU, "trainer.cpu_offload=true"], (8, 16)),
        (16, 135, [*GPU, "engine.threads=3", "trainer.threads=4"], (3, 4)),
        (16, 135, ["engine.urls=[http://a:1,http://b:2]"], (5, 16)),
        (16, 135, ["engine.servers=3", OPD, "teacher.engine.servers=2", K0], (3, 16)),
    ],
)
def test_engines_and_ranks_share_the_cores(of, cores, size, overrides, expected):
    assert of(cores, size, *overrides) == expected


def test_tiny_model_has_one_thread(config):
    assert threads.share(None, config.model, "cpu", 1, 16) == 1
    assert threads.share(None, replace(config.model, path="someone/large"), "cpu", 4, 16) == 4, "its size is not known"
    assert local_folder("someone/large") is None


def test_each_process_has_its_threads_in_its_environment():
    config = compose(["run.name=x", "engine.device=cpu", "engine.threads=3", "trainer.threads=2"])
    run = planned(config)
    assert VLLMEngine.environment(run.policy.spec)["OMP_NUM_THREADS"] == "3"
    rank = trainer_environment(config.model, run.trainer.threads)
    assert (rank["OMP_NUM_THREADS"], rank["OMP_WAIT_POLICY"]) == ("2", "PASSIVE")


@pytest.mark.parametrize(("given", "has"), [(None, "1"), ("3", "3")])
def test_command_computes_with_one_thread_by_default(given, has, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setattr("sys.argv", ["prl train"])
    command.run(lambda: None, [])
    assert os.environ["OMP_NUM_THREADS"] == has
