"""Threads of each process: from the cores, those who share them, and the model's size; or as the config says."""

import os
from dataclasses import replace

import pytest

from prl.config import threads
from prl.config.compose import compose
from prl.config.model_folder import local_folder
from prl.engines.vllm.engine import VLLMEngine
from prl.launch import command, specs
from prl.launch.local import trainer_environment

MILLION = 1_000_000


@pytest.fixture
def of(monkeypatch, tmp_path):
    """`of(cores, millions of parameters, *overrides)`: threads of engine and of each rank."""

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")

    def found(cores, size, *overrides):
        monkeypatch.setattr(threads, "cores", lambda: cores)
        monkeypatch.setattr(threads, "parameters_of", lambda model: size * MILLION)
        config = compose(["run.name=x", "engine.device=cpu", "trainer.device=cpu", *overrides])
        engine = specs.policy_engine(config, config.model, "t", tmp_path)
        return engine.threads, specs.trainer(config, tmp_path).threads

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


def test_tiny_model_has_one_thread(monkeypatch, config):
    monkeypatch.setattr(threads, "cores", lambda: 16)
    assert threads.share(None, config.model, "cpu", 1) == 1
    assert threads.share(None, replace(config.model, path="someone/large"), "cpu", 4) == 4, "its size is not known"
    assert local_folder("someone/large") is None


def test_each_process_has_its_threads_in_its_environment(monkeypatch, tmp_path):
    monkeypatch.setattr(threads, "cores", lambda: 8)
    config = compose(["run.name=x", "engine.device=cpu", "engine.threads=3", "trainer.threads=2"])
    engine = specs.policy_engine(config, config.model, "t", tmp_path)
    assert VLLMEngine.environment(engine)["OMP_NUM_THREADS"] == "3"
    rank = trainer_environment(config.model, specs.trainer(config, tmp_path).threads)
    assert (rank["OMP_NUM_THREADS"], rank["OMP_WAIT_POLICY"]) == ("2", "PASSIVE")


@pytest.mark.parametrize(("given", "has"), [(None, "1"), ("3", "3")])
def test_command_computes_with_one_thread_by_default(given, has, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setattr("sys.argv", ["prl train"])
    command.run(lambda: None, [])
    assert os.environ["OMP_NUM_THREADS"] == has
