"""Which GPUs each process has, worked out without any."""

import os
import time

import pytest

from prl.config import hardware
from prl.config.gpus import Needs, Placement, place, visible_gpus
from prl.config.validate import resolve_device
from prl.errors import ConfigError
from prl.launch import specs
from prl.launch.local import LocalLauncher, engine_environment

EIGHT = [str(number) for number in range(8)]


@pytest.mark.parametrize(
    ("needs", "gpus", "engines", "trainer", "teachers"),
    [
        (Needs(engines=1, ranks=1), ["0"], [()], (), []),
        (Needs(engines=1, ranks=1, teachers=1), ["0"], [()], (), [()]),
        (Needs(engines=1, ranks=1), [], [()], (), []),
        (Needs(engines=1, ranks=1), ["0", "1"], [("0",)], ("1",), []),
        (Needs(engines=2, engine_gpus=2, ranks=4), EIGHT, [("0", "1"), ("2", "3")], ("4", "5", "6", "7"), []),
        (Needs(engines=6, ranks=2), EIGHT, [(n,) for n in "012345"], ("6", "7"), []),
        (Needs(engines=1, ranks=2, teachers=2, teacher_gpus=2), EIGHT, [("0",)], ("1", "2"), [("3", "4"), ("5", "6")]),
        (Needs(ranks=2), ["4", "5", "6"], [], ("4", "5"), []),
        (Needs(engines=2), ["GPU-a", "GPU-b"], [("GPU-a",), ("GPU-b",)], (), []),
    ],
)
def test_servers_first_then_ranks_then_teachers_and_a_single_gpu_for_all(needs, gpus, engines, trainer, teachers):
    assert place(needs, gpus) == Placement(tuple(engines), trainer, tuple(teachers))


@pytest.mark.parametrize(
    ("needs", "gpus", "says"),
    [
        (
            Needs(engines=3, engine_gpus=2, ranks=4),
            EIGHT,
            "inference.servers=3 of tensor_parallel_size=2 and trainer.num_processes=4 take 10 GPUs, each its own, and "
            "this machine has 8",
        ),
        (Needs(engines=2, ranks=1), ["0"], "inference.servers=2 of tensor_parallel_size=1 and trainer.num_process"),
        (Needs(engines=1, ranks=2), ["0"], "trainer.num_processes=2 take 3 GPUs"),
        (Needs(engines=1, engine_gpus=2), ["0"], "inference.servers=1 of tensor_parallel_size=2 take 2 GPUs"),
        (Needs(engines=1, ranks=1, teachers=1), ["0", "1"], "teacher.inference.servers=1 of tensor_parallel_size=1 ta"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_keys(needs, gpus, says):
    with pytest.raises(ConfigError) as refused:
        place(needs, gpus)
    assert says in str(refused.value) and "CUDA_VISIBLE_DEVICES" in str(refused.value)


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """`smi(lines)`: what `nvidia-smi` is, a program of the shell, which counts its calls in `calls`."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def make(lines):
        path = tmp_path / "nvidia-smi"
        path.write_text(f"#!/bin/sh\necho $* >> {tmp_path}/calls\n{lines}\n")
        path.chmod(0o700)
        hardware.listed.cache_clear()

    yield make
    hardware.listed.cache_clear()


def test_the_gpus_are_those_that_this_process_may_use(monkeypatch, smi, tmp_path):
    smi("printf '81559\\n24564\\n'")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus() == ["0", "1"] and resolve_device("auto") == "cuda"
    assert hardware.gpu_memory_bytes() == [81559 << 20, 24564 << 20]
    assert len((tmp_path / "calls").read_text().splitlines()) == 1, "asked once"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-b")
    assert visible_gpus() == ["3", "GPU-b"]


def test_a_gpu_that_does_not_say_its_memory_is_one_all_the_same(smi):
    smi("echo '[N/A]'")
    assert resolve_device("auto") == "cuda"
    with pytest.raises(ConfigError, match="of 1 GPUs the memory is not known here: give it, machine.gpu_memory_gb="):
        hardware.gpu_memory_bytes()
    with hardware.assuming(hardware.MachineConfig(gpu_memory_gb=2)):
        assert hardware.gpu_memory_bytes() == [2 << 30]


@pytest.mark.parametrize("lines", ["exit 9", "echo 'No devices were found'; exit 6", ":"])
def test_a_driver_that_fails_is_no_gpu(smi, lines):
    smi(lines)
    assert resolve_device("auto") == "cpu" and hardware.gpu_memory_bytes() == []


def test_a_driver_that_hangs_is_said(smi, monkeypatch):
    monkeypatch.setattr(hardware, "ANSWER_S", 0.2)
    smi("exec sleep 60")
    began = time.monotonic()
    with pytest.raises(ConfigError, match="nvidia-smi did not answer within 0.2 s: the driver .* inference.device=cpu"):
        resolve_device("auto")
    assert time.monotonic() - began < 10 and resolve_device("cpu") == "cpu"


def test_each_process_of_a_run_sees_its_own(monkeypatch, config, tmp_path):
    monkeypatch.setattr(specs, "visible_gpus", lambda: EIGHT)
    config.inference.device = config.trainer.device = "cuda"
    config.inference.servers, config.inference.tensor_parallel_size, config.trainer.num_processes = 2, 3, 2
    config.inference.port = 9000
    engines = specs.policy_engines(config, config.model, "t", tmp_path / "logs" / "inference.log")
    assert [engine_environment(engine)["CUDA_VISIBLE_DEVICES"] for engine in engines] == ["0,1,2", "3,4,5"]
    assert [engine.process for engine in engines] == ["inference", "inference 2"]
    assert [engine.log.name for engine in engines] == ["inference.log", "inference_2.log"]
    assert [engine.config.port for engine in engines] == [9000, 9001]
    ranks = LocalLauncher()._ranks(specs.trainer(config, tmp_path))
    assert {env["CUDA_VISIBLE_DEVICES"] for env in ranks.values()} == {"6,7"}
    assert [env["LOCAL_RANK"] for env in ranks.values()] == ["0", "1"]
    config.inference.urls = ["http://a:1"]
    assert specs.policy_engines(config, config.model, "t", tmp_path) == []
    assert specs.trainer(config, tmp_path).gpus == ("0", "1")


def test_on_a_cpu_and_with_one_gpu_nothing_is_set(monkeypatch, config, tmp_path):
    config.inference.device = config.trainer.device = "cpu"
    config.inference.servers = 3
    engines = specs.policy_engines(config, config.model, "t", tmp_path / "inference.log")
    assert len(engines) == 3 and all("CUDA_VISIBLE_DEVICES" not in engine_environment(each) for each in engines)
    assert [engine.config.port for engine in engines] == [None] * 3
    monkeypatch.setattr(specs, "visible_gpus", lambda: ["0"])
    config.inference.device, config.inference.servers = "cuda", 1
    [engine] = specs.policy_engines(config, config.model, "t", tmp_path / "inference.log")
    assert "CUDA_VISIBLE_DEVICES" not in engine_environment(engine)
