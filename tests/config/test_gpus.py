"""Which GPUs each process has, worked out without any."""

import os
import time
from types import SimpleNamespace

import pytest
from prepared_run import planned

from prl.base.errors import ConfigError
from prl.config import hardware
from prl.config.gpus import Need, Placement, place, visible_devices
from prl.config.hardware import Machine, MachineConfig
from prl.engines.vllm.engine import VLLMEngine
from prl.launch.local import LocalLauncher
from prl.runs import provenance


@pytest.mark.parametrize(
    ("gpus", "needs", "engines", "ranks", "teachers"),
    [
        (0, [(1, 0), (2, 0), (0, 0)], [()], [(), ()], []),
        (1, [(1, 1), (1, 1), (0, 0)], [(0,)], [(0,)], []),  # a single GPU is shared
        (1, [(1, 1), (1, 1), (1, 1)], [(0,)], [(0,)], [(0,)]),
        (2, [(1, 1), (1, 1), (0, 0)], [(0,)], [(1,)], []),
        (8, [(2, 2), (4, 1), (0, 0)], [(0, 1), (2, 3)], [(4,), (5,), (6,), (7,)], []),
        (8, [(1, 1), (2, 1), (2, 2)], [(0,)], [(1,), (2,)], [(3, 4), (5, 6)]),
        (2, [(1, 0), (2, 1), (0, 0)], [()], [(0,), (1,)], []),  # an engine on the CPU takes none
        (1, [(1, 1), (2, 0), (0, 0)], [(0,)], [(), ()], []),  # nor do ranks
        (3, [(0, 1), (2, 1), (0, 0)], [], [(0,), (1,)], []),
    ],
)
def test_processes_have_own_gpus_or_share_one(gpus, needs, engines, ranks, teachers):
    expected = [[tuple(f"gpu-{gpu}" for gpu in each) for each in kind] for kind in (engines, ranks, teachers)]
    names = [f"gpu-{number}" for number in range(gpus)]
    assert place([Need(*need) for need in needs], names) == Placement(*expected)


@pytest.mark.parametrize(
    ("gpus", "needs", "says"),
    [
        (
            8,
            [(3, 2), (4, 1), (0, 0)],
            "engine and trainer take 10 GPUs",
        ),
        (1, [(2, 1), (1, 1), (0, 0)], "engine and trainer take 3 GPUs"),
        (1, [(1, 1), (2, 1), (0, 0)], "engine and trainer take 3 GPUs"),
        (1, [(1, 2), (0, 0), (0, 0)], "engine take 2 GPUs"),
        (2, [(1, 1), (1, 1), (1, 1)], "engine and trainer and teacher take 3 GPUs"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_keys(gpus, needs, says):
    options = ("engine", "trainer", "teacher")
    with pytest.raises(ConfigError) as refused:
        place([Need(*need, option) for need, option in zip(needs, options, strict=True)], list(map(str, range(gpus))))
    assert says in str(refused.value)


def test_gpus_are_counted_among_those_that_are_shown(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    assert Machine().gpus == ["4", "5", "7"]
    assert visible_devices(("4", "7")) == {"CUDA_VISIBLE_DEVICES": "4,7"} and visible_devices(()) == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a, GPU-b")
    assert Machine().gpus == ["GPU-a", "GPU-b"]


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """`smi(lines)`: what `nvidia-smi` is, a program of the shell, which counts its calls in `calls`."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(hardware, "has_gpu_packages", lambda: True)

    def make(lines):
        path = tmp_path / "nvidia-smi"
        path.write_text(f"#!/bin/sh\necho $* >> {tmp_path}/calls\n{lines}\n")
        path.chmod(0o700)
        hardware.listed.cache_clear()

    yield make
    hardware.listed.cache_clear()


def test_the_gpus_are_those_that_this_process_may_use(monkeypatch, smi, tmp_path):
    smi("printf 'NVIDIA H100, 81559\\nNVIDIA L4, 24564\\n'")
    assert Machine().gpus == ["0", "1"] and Machine().device_of("auto") == "cuda"
    assert Machine().gpu_memory == [81559 << 20, 24564 << 20]
    assert provenance.gpus() == ["NVIDIA H100", "NVIDIA L4"]
    assert len((tmp_path / "calls").read_text().splitlines()) == 1, "asked once"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-b")
    assert Machine().gpus == ["3", "GPU-b"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert Machine().gpu_memory == [24564 << 20, 81559 << 20]


def test_gpu_of_unknown_memory_counts(smi):
    smi("echo 'NVIDIA Thor, [N/A]'")
    assert Machine().device_of("auto") == "cuda"
    with pytest.raises(ConfigError, match="of 1 GPUs the memory is not known here: give it, machine.gpu_memory_gb="):
        assert Machine().gpu_memory
    assert Machine(MachineConfig(gpu_memory_gb=2)).gpu_memory == [2 << 30]


@pytest.mark.parametrize(
    ("shown", "packages", "reason"),
    [
        ("-1", True, "CUDA_VISIBLE_DEVICES is set and shows none"),
        ("", True, "CUDA_VISIBLE_DEVICES is set and shows none"),
        ("0", False, "the packages installed here are those for a CPU: PRL_ENGINE=gpu scripts/setup"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_none(smi, monkeypatch, shown, packages, reason):
    smi("echo NVIDIA H100, 81559")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    monkeypatch.setattr(hardware, "has_gpu_packages", lambda: packages)
    assert Machine().device_of("auto") == "cpu"
    with pytest.raises(ConfigError, match=f"trainer.device=cuda: {reason}"):
        Machine().check_device("cuda", "trainer.device")


@pytest.mark.parametrize("lines", ["exit 9", "echo 'No devices were found'; exit 6", ":"])
def test_a_driver_that_fails_is_no_gpu(smi, lines):
    smi(lines)
    assert Machine().device_of("auto") == "cpu" and Machine().gpu_memory == []


def test_a_driver_that_hangs_is_said(smi, monkeypatch):
    monkeypatch.setattr(hardware, "ANSWER_S", 0.2)
    smi("exec sleep 60")
    began = time.monotonic()
    with pytest.raises(ConfigError, match="nvidia-smi did not answer within 0.2 s: the driver .* engine.device=cpu"):
        Machine().device_of("auto")
    assert time.monotonic() - began < 10 and Machine().device_of("cpu") == "cpu"
    assert provenance.gpus() == [], "a run on CPUs says no more of it"


def test_each_process_of_a_run_sees_its_own(monkeypatch, config):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,GPU-h")
    config.engine.device = config.trainer.device = "cuda"
    config.engine.servers, config.engine.tensor_parallel_size, config.trainer.num_processes = 2, 3, 2
    config.engine.port = 9000
    run = planned(config)
    engines = run.policy.servers
    assert [engine.process for engine in engines] == ["engine", "engine 2"]
    assert [engine.log.name for engine in engines] == ["engine.log", "engine_2.log"]
    assert [engine.config.port for engine in engines] == [9000, 9001]
    started = {}
    with LocalLauncher() as launcher:
        take = lambda name, *_, env, **__: started.update({name: env}) or SimpleNamespace(tell=id)  # noqa: E731
        monkeypatch.setattr(launcher, "start", take)
        for spec in engines:
            launcher.start_engine(spec)
        launcher.start_trainer(run.trainer)
    assert {name: env["CUDA_VISIBLE_DEVICES"] for name, env in started.items()} == {
        "engine": "0,1,2",
        "engine 2": "3,4,5",
        "trainer rank 0": "6",
        "trainer rank 1": "GPU-h",
    }
    assert [started[f"trainer rank {rank}"]["LOCAL_RANK"] for rank in range(2)] == ["0", "0"]
    config.engine.servers = 3
    with pytest.raises(ConfigError, match="^engine.servers=3 of 3 GPUs and trainer.num_processes=2 take 11 GPUs, each"):
        planned(config)
    config.engine.urls = ["http://a:1"]
    monkeypatch.setenv("PRL_TOKEN", "t")
    assert planned(config).policy.servers == ()
    assert planned(config).trainer.gpus == (("0",), ("1",))


def test_on_a_cpu_nothing_is_set(config):
    config.engine.device = config.trainer.device = "cpu"
    config.engine.servers = 3
    engines = planned(config).policy.servers
    assert [engine.gpus for engine in engines] == [()] * 3
    assert all("CUDA_VISIBLE_DEVICES" not in VLLMEngine.environment(each) for each in engines)
    assert [engine.config.port for engine in engines] == [None] * 3
