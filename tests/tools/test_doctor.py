"""What `prl doctor` finds missing, on machines that are pretended."""

import os
import shutil
import sys
import sysconfig
from importlib import metadata, util
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants
from seeing_models import weighed_model

from prl.base.errors import ConfigError
from prl.config import hardware
from prl.config.hardware import GIB, Gpu
from prl.engines.vllm import engine
from prl.engines.vllm.cpu import pictures as on_cpu
from prl.tools import doctor


@pytest.fixture
def run(monkeypatch, capsys):
    """`run(*overrides)`: the exit status and the lines of the command."""

    def command(*overrides):
        monkeypatch.setattr(sys, "argv", ["prl doctor", *overrides])
        with pytest.raises(SystemExit) as ended:
            doctor.main()
        printed = capsys.readouterr()
        assert not printed.err
        return int(ended.value.code), printed.out.splitlines()

    return command


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU with everything that it takes."""
    monkeypatch.setattr(hardware, "listed", lambda: (Gpu("Some GPU", 80 * GIB),))
    monkeypatch.setattr(hardware, "has_gpu_packages", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(tmp_path))
    (tmp_path / "Python.h").touch()


def test_a_machine_that_lacks_nothing(run, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "hf_abcdefghijklmnop")
    status, lines = run("engine=transformers", "trainer.compile=true", "trainer.threads=3")
    assert status == 0 and f"torch {torch.__version__}" in lines
    assert f"prl {metadata.version('prl')}, python {sys.version.split()[0]}" in lines[0]
    assert lines[-1].startswith("compile=True") and lines[-2] == "threads: engine 1, trainer 3"
    assert "hf_abcdefghijklmnop" not in "\n".join(lines)


def test_a_gpu_is_what_a_run_would_choose(run, gpu):
    status, lines = run("engine=transformers")
    assert status == 0 and "GPU Some GPU, 80 GiB" in lines
    assert "trainer: cuda, bfloat16, processes: 1" in lines


def no_package(name):
    raise metadata.PackageNotFoundError(name)


def hangs():
    raise ConfigError("nvidia-smi did not answer")


ON_GPU = {
    "a build of torch for CPUs": (torch.version, "cuda", None, "PRL_ENGINE=gpu scripts/setup"),
    "an old driver": (torch.cuda, "is_available", lambda: False, "newer driver"),
    "no compiler": (shutil, "which", lambda name: None, "install gcc"),
    "no headers": (sysconfig, "get_path", lambda *_: "nowhere", "python3-dev"),
}
ANYWHERE = {
    "no packages": (metadata, "distributions", lambda name: [], "msgspec is not installed: run scripts/setup"),
    "no prl": (metadata, "version", no_package, "No package metadata was found for prl: run scripts/setup"),
    "no libnuma": (engine, "find_library", lambda name: None, "install libnuma1"),
    "no engine": (util, "find_spec", lambda name: None, "engine=transformers"),
    "a driver that hangs": (hardware, "listed", hangs, "nvidia-smi did not answer"),
}


@pytest.mark.parametrize(("place", "name", "value", "text"), ON_GPU.values(), ids=ON_GPU)
def test_what_a_run_on_a_gpu_lacks(run, gpu, monkeypatch, place, name, value, text):
    monkeypatch.setattr(place, name, value)
    status, lines = run("engine=transformers")
    assert status == 1 and lines[-1].startswith("error: ") and text in lines[-1]


@pytest.mark.parametrize(("place", "name", "value", "text"), ANYWHERE.values(), ids=ANYWHERE)
def test_what_a_run_lacks_anywhere(run, monkeypatch, place, name, value, text):
    monkeypatch.setattr(place, name, value)
    status, lines = run("engine.device=cpu", "trainer.device=cpu")
    assert status == 1 and any(line.startswith("error: ") and text in line for line in lines)


@pytest.mark.parametrize("override", ["trainer.devic=cpu", "engine.servers=0"])
def test_an_override_that_is_refused_is_an_error(run, override):
    status, lines = run("engine=default", override)
    assert status == 1 and lines[-1].startswith("error: ") and override.partition("=")[0] in lines[-1]


def test_what_may_be_missing_is_no_error(run, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(total=GIB // 16, free=GIB))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "/models/of/the/hub")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    installed = metadata.distributions
    old = [SimpleNamespace(version="0.0.1")]
    monkeypatch.setattr(metadata, "distributions", lambda **of: old if of == {"name": "rich"} else installed(**of))
    status, lines = run("engine=transformers")
    assert status == 0
    for text in ("--shm-size=8g", "HF_HOME", "rich 0.0.1; prl is tested with "):
        assert any(text in line for line in lines)


def test_it_says_what_models_that_see_lack(run, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(on_cpu, "FOLDER", tmp_path / "aside")
    status, lines = run("engine.device=cpu")
    assert status == 0 and "scripts/setup --pictures" in lines[-1]
    seeing = (f"model.path={weighed_model('llava', tmp_path / 'model')}", "model=hf", "model.max_model_len=256")
    capsys.readouterr()  # of transformers, which wrote it
    status, lines = run("engine.device=cpu", *seeing)
    assert status == 1 and "error" in lines[-1] and "scripts/setup --pictures" in lines[-1]
    (tmp_path / "aside" / "torchvision").mkdir(parents=True)
    for overrides in ((), seeing):
        status, lines = run("engine.device=cpu", *overrides)
        assert status == 0 and "pictures" not in lines[-1]
