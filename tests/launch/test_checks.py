"""Addresses, architectures, tokenizers and prompts: refused by what is wrong with them, before a process starts."""

import json
import shutil
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from engines import policy_spec
from prepared_run import prepared_run

from prl.base.errors import ConfigError, PrlError
from prl.config.compose import compose
from prl.engines.vllm.engine import VLLMConfig
from prl.launch.local import LocalLauncher
from prl.launch.prompts import check_lengths
from prl.models import model_path

BASE = ("run.name=x", "envs.math.args.num_tasks=8", "envs.math.eval_args=null", "engine.device=cpu")


@pytest.fixture
def folder(tmp_path):
    """A copy of the tiny model, to be changed."""
    return Path(shutil.copytree(model_path("tiny"), tmp_path / "model"))


def refused(*overrides):
    with pytest.raises(ConfigError) as caught:
        prepared_run(compose([*BASE, *overrides]))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def change(file, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_engine_that_cannot_listen_is_refused_with_address(tmp_path):
    with socket.socket() as taken, LocalLauncher() as launcher:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for options, address in (({"port": port}, f"127.0.0.1, port {port}"), ({"host": "a..b"}, "a..b, port any")):
            with pytest.raises(PrlError, match=f"an engine cannot listen on {address}: "):
                launcher.start_engine(replace(policy_spec("t", tmp_path / "log"), config=VLLMConfig(**options)))
        assert not launcher.processes


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "says"),
    [({"logit_scale": 0.5}, "logit_scale"), ({"model_type": "qwen99"}, "qwen99")],
)
def test_unsupported_model_is_refused(folder, values, says):
    change(folder / "config.json", **values)
    printed = refused(f"model.path={folder}")
    assert printed.startswith("model.path=") and says in printed


def test_tokenizer_without_chat_template_is_refused(folder):
    (folder / "tokenizer.json").write_text("{")
    assert refused(f"model.path={folder}").startswith(f"model.path={str(folder)!r}: no tokenizer here")
    shutil.copy(Path(model_path("tiny")) / "tokenizer.json", folder)
    change(folder / "tokenizer_config.json", chat_template=None)
    printed = refused(f"model.path={folder}", "renderer=default")
    assert printed.startswith("renderer") and "template" in printed
    prepared_run(compose([*BASE, f"model.path={folder}"]))  # the renderer qwen3 brings its own


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_rows_and_models_that_end_before_the_reply_begins():
    prompts = [[0] * 10, [0] * 12]
    check_lengths(12, 11, "math", prompts)
    check_lengths(2, 2, "math", [])  # an env that writes its own prompts
    with pytest.raises(ConfigError, match=r"^trainer\.seq_len=10 cuts every sample .* first 2 prompts of env 'math'"):
        check_lengths(64, 10, "math", prompts)
    with pytest.raises(ConfigError, match=r"^model\.max_model_len=11 leaves no room .* has 10 tokens"):
        check_lengths(11, 11, "math", prompts)
