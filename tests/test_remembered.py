"""What a process finds out once: the answer, what it depends on, and what is not remembered."""

import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from prl import remembered
from prl.config.schema import InferenceConfig, ModelConfig
from prl.errors import ConfigError
from prl.launch import checks
from prl.launch.checks import check_loadable
from prl.launch.components import load_tokenizer
from prl.models import model_path


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(name="folder")
def _folder(tmp_path):
    return shutil.copytree(model_path("tiny"), tmp_path / "model")


@pytest.fixture(name="model")
def _model(folder):
    return ModelConfig(path=str(folder), max_model_len=1024)


@pytest.fixture(name="counted")
def _counted():
    calls = []

    def find():
        calls.append(1)
        return len(calls)

    return find


def test_an_answer_is_found_once_for_the_same_parts(counted):
    assert remembered.remembered([b"a", b"b"], counted, int) == 1
    assert remembered.remembered([b"a", b"b"], counted, int) == 1
    assert remembered.remembered([b"ab", b""], counted, int) == 2
    assert remembered.remembered([b"a", b"c"], counted, int) == 3


def test_another_version_of_a_library_asks_again(counted, monkeypatch):
    assert remembered.remembered([b"a"], counted, int) == 1
    monkeypatch.setattr(remembered, "version", lambda name: "0")
    assert remembered.remembered([b"a"], counted, int) == 2


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b'"text"', b"[1"])
def test_a_damaged_answer_is_found_again(tmp_path, counted, content):
    remembered.remembered([b"a"], counted, int)
    [file] = (tmp_path / "cache").rglob("*.json")
    file.write_bytes(content)
    assert remembered.remembered([b"a"], counted, int) == 2
    assert remembered.remembered([b"a"], counted, int) == 2


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, counted):
    (tmp_path / "cache").write_text("a file")
    assert [remembered.remembered([b"a"], counted, int) for _ in range(2)] == [1, 2]


def test_what_is_raised_is_not_remembered():
    def fail():
        raise ConfigError("no")

    for _ in range(2):
        with pytest.raises(ConfigError):
            remembered.remembered([b"a"], fail, int)


def test_a_model_that_has_passed_is_not_looked_at_again_until_its_config_changes(folder, model, monkeypatch):
    assert check_loadable(model, InferenceConfig(), "model.", trained=True) == 304
    with monkeypatch.context() as patch:
        patch.setattr(checks, "sizes_of", None)
        assert check_loadable(model, InferenceConfig(), "model.", trained=True) == 304
        with pytest.raises(TypeError):  # of weights that are not trained less is asked
            check_loadable(model, InferenceConfig(), "model.", trained=False)
    with pytest.raises(ConfigError, match="above the"):
        check_loadable(replace(model, max_model_len=10**6), InferenceConfig(), "model.", trained=True)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"hidden_size": ', '"logit_scale": 2, "hidden_size": '))
    with pytest.raises(ConfigError, match="logit_scale"):
        check_loadable(model, InferenceConfig(), "model.", trained=True)


def test_the_tokenizers_class_is_remembered_and_its_files_are_read(folder, model, monkeypatch):
    import transformers

    first = load_tokenizer(model, "model.path")
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", None)
    second = load_tokenizer(model, "model.path")
    assert type(second) is type(first)
    assert (vars(second).keys(), second.init_kwargs) == (vars(first).keys(), first.init_kwargs)
    messages = [{"role": "user", "content": "1 + 2 ="}]
    assert second.apply_chat_template(messages) == first.apply_chat_template(messages)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend", "eos_token": "a"}')
    with pytest.raises(ConfigError, match="no tokenizer there"):  # chosen anew, by what is gone here
        load_tokenizer(model, "model.path")


def test_a_launcher_that_knows_the_model_imports_no_torch(tmp_path):
    code = """
import sys
from prl.compose import compose
from prl.launch.builder import prepare
prepare(compose(["run.name=x"]))
print("torch" in sys.modules)
"""
    found = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        for _ in range(2)
    ]
    assert found == ["True", "False"]
