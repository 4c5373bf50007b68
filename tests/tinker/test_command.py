"""`prl serve api=tinker`: its options, what it refuses before it starts, and how it ends."""

import os
import shutil
import signal
import socket
import subprocess
import sys

import httpx
import hydra
import pytest
from safetensors.torch import load_file, save_file
from tinker_server import KEY

from prl.base.errors import ConfigError
from prl.config.compose import CONF, to_config
from prl.config.schema import TinkerConfig
from prl.models import model_path
from prl.serve import with_target
from prl.tinker.command import how_to_use, main


def config_of(*arguments):
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        named = [
            "name=mine",
            *with_target(list(arguments)),
        ]  # else that of the option of `model`, which Hydra's job knows
        return to_config(TinkerConfig, hydra.compose("tinker", named), [])


def test_the_options_and_a_target():
    config = config_of("host=0.0.0.0", "port=1", "models=3", "max_rank=16", "max_samples=5")
    assert (config.host, config.port, config.models, config.max_rank, config.max_samples) == ("0.0.0.0", 1, 3, 16, 5)
    assert (config.name, config.dir) == ("mine", "outputs/tinker-mine")
    named = config_of("tiny-teacher", "dir=a folder", "trainer.device=cpu", "trainer.tokens_per_forward=9")
    assert (named.name, named.dir, named.model.path) == ("tiny-teacher", "a folder", model_path("tiny-teacher"))
    assert (named.trainer.device, named.trainer.tokens_per_forward) == ("cpu", 9)
    for wrong in (
        *("models=0", "max_rank=0", "port=70000", "trainer.device=tpu", "max_samples=0"),
        *("max_models=0", "max_queued_tokens=0"),
    ):
        with pytest.raises(ConfigError, match=wrong.partition("=")[0]):
            config_of(wrong)


def test_refusals_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arguments, message in (
        (["max_rank=600"], r"^max_rank=600: VLLMEngine has 512 at most"),
        (["engine.urls=[http://127.0.0.1:1]"], r"^engine\.urls: api=tinker starts its engine itself"),
    ):
        with pytest.raises(ConfigError, match=message):
            main(config_of("engine=default", *arguments))
    with monkeypatch.context() as without, pytest.raises(ConfigError, match="^engine=VLLMEngine: api=tinker wants one"):
        without.setattr("prl.engines.vllm.engine.VLLMEngine.largest_adapter", 0)
        main(config_of("engine=default"))
    with pytest.raises(ConfigError, match=r"^model\.path=.*nowhere.*no such folder"):
        main(config_of("model=hf", "model.path=./nowhere"))
    monkeypatch.setenv("TINKER_API_KEY", "mine")
    with pytest.raises(ConfigError, match="^TINKER_API_KEY: clients take a key that begins with tml-"):
        main(config_of())
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = config_of(f"port={taken.getsockname()[1]}")
        with pytest.raises(ConfigError, match=r"^host=127\.0\.0\.1 port=\d+: "):
            main(config)
    assert KEY not in how_to_use(config_of(), ("127.0.0.1", 8010), KEY)
    monkeypatch.delenv("TINKER_API_KEY")
    assert KEY in how_to_use(config_of(), ("127.0.0.1", 8010), KEY)


def test_a_model_that_the_trainer_would_get_wrong_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    folder = tmp_path / "a model"
    shutil.copytree(model_path("tiny"), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][:] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"^model\.path='.*a model': .*its logprobs are not finite"):
        main(config_of(str(folder), f"dir={tmp_path / 'state'}", "port=0"))


@pytest.mark.slow
def test_the_command_serves_until_a_signal_and_owns_its_folder(tmp_path):
    environment = {**os.environ, "TINKER_API_KEY": KEY, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "prl.serve", "api=tinker", "port=0", "dir=a folder", "model.max_model_len=64"]
    pipes = {"env": environment, "stderr": subprocess.PIPE, "text": True, "cwd": tmp_path}
    with subprocess.Popen(command, **pipes) as serving:
        lines = iter(serving.stderr.readline, "")
        url = next(line.split("=")[1].split()[0] for line in lines if "TINKER_BASE_URL=" in line)
        assert httpx.get(f"{url}/api/v1/healthz", headers={"X-API-Key": KEY}).json() == {"status": "ok"}
        second = subprocess.run(command, **pipes, check=False)
        assert second.returncode == 2 and "'a folder' belongs to process" in second.stderr
        serving.send_signal(signal.SIGTERM)
        assert serving.wait(60) == 128 + signal.SIGTERM
