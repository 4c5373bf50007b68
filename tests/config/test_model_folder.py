"""Model folders that cannot be loaded are refused by what they lack, from their headers alone."""

import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from prepared_run import planned
from safetensors.torch import load_file, save_file

from prl.base.errors import ConfigError
from prl.config.compose import compose
from prl.config.hardware import Machine, MachineConfig
from prl.config.model_folder import check_length, check_model, embedding_rows, positions
from prl.engines.transformers import TransformersConfig
from prl.engines.vllm.engine import VLLMConfig
from prl.engines.vllm.weights import WeightsError, files_of
from prl.launch.checks import check_loadable, check_rows
from prl.launch.plan import plan
from prl.models import model_path


@pytest.fixture
def folder(tmp_path):
    """A copy of the tiny model, to be damaged."""
    return Path(shutil.copytree(model_path("tiny"), tmp_path / "model"))


def refused(folder):
    with pytest.raises(ConfigError) as caught:
        check_model(str(folder), "model.path")
    printed = str(caught.value)
    assert printed.startswith(f"model.path={str(folder)!r}") and "\n" not in printed
    return printed


def test_whole_folder_passes_name_is_the_hubs(folder, monkeypatch):
    check_model(str(folder), "model.path")
    monkeypatch.chdir(folder.parent)
    check_model("./model", "model.path")
    check_model("model", "model.path")
    check_model("some/model", "model.path")


@pytest.mark.parametrize("path", ["", "  ", "a\nb", "a\x1b]0;x\x07"])
def test_what_is_no_path_is_refused(path):
    with pytest.raises(ConfigError, match=r"^model\.path=.*: give a model folder"):
        check_model(path, "model.path")


def test_a_folder_that_is_not_there_or_holds_no_model(folder, tmp_path, monkeypatch):
    assert "there is no such folder" in refused(tmp_path / "nothing")
    (folder / "config.json").unlink()
    assert refused(folder).endswith("is not a model folder: it has no config.json")

    with pytest.raises(ConfigError, match="cannot be read: File name too long"):
        check_model(str(tmp_path / ("x" * 300)), "model.path")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model_type": null}', "\x00"])
def test_a_broken_config(folder, text):
    (folder / "config.json").write_text(text)
    assert "config.json is broken" in refused(folder) or "names no model_type" in refused(folder)


def test_a_folder_without_weights_or_with_pickles(folder):
    (folder / "model.safetensors").unlink()
    assert refused(folder).endswith("has no weights: *.safetensors files are missing")
    (folder / "pytorch_model.bin").write_bytes(b"\x80")
    assert refused(folder).endswith("(pytorch_model.bin is a pickle, which prl does not load; save it as safetensors)")


@pytest.mark.parametrize(
    "index",
    [
        '{"weight_map": {"a": "../other.safetensors"}}',
        '{"weight_map": {"a": "model.safetensors", "b": "%s/other.safetensors"}}',
        '{"weight_map": {"a": "sub/other.safetensors"}}',
        '{"weight_map": {"a": ".."}}',
        '{"weight_map": {"a": "model-00002-of-00002.safetensors"}}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": []}',
        "{}",
        "[]",
        "{",
    ],
)
def test_index_of_weights_stays_in_its_folder_and_names_files_that_are_there(folder, index):
    for other in (folder.parent, folder / "sub"):
        other.mkdir(exist_ok=True)
        shutil.copy(folder / "model.safetensors", other / "other.safetensors")
    (folder / "model.safetensors.index.json").write_text(index.replace("%s", str(folder.parent)))
    assert "model.safetensors.index.json" in refused(folder)
    with pytest.raises(WeightsError, match=r"model\.safetensors\.index\.json"):
        files_of(folder)


def test_index_of_the_folders_own_files_passes(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model.safetensors"}}')
    check_model(str(folder), "model.path")
    assert files_of(folder) == [folder / "model.safetensors"]


@pytest.mark.parametrize("size", [0, 3, 8, 100, -1])
def test_truncated_weights(folder, size):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    assert "model.safetensors is damaged" in refused(folder)


def test_weights_with_a_broken_header_or_more_than_it_says(folder):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole + b"x")
    assert "model.safetensors is damaged" in refused(folder)
    file.write_bytes(whole[:8] + b"x" + whole[9:])
    assert "model.safetensors is damaged" in refused(folder)
    save_file({}, file)
    assert "hold no tensor" in refused(folder)


def test_weights_of_the_hubs_cache_are_links(folder, tmp_path):
    cached = tmp_path / "models--x" / "snapshots" / "1234"
    blob = tmp_path / "models--x" / "blobs" / "abcd"
    shutil.copytree(folder, cached)
    blob.parent.mkdir()
    (cached / "model.safetensors").rename(blob)
    (cached / "model.safetensors").symlink_to("../../blobs/abcd")
    check_model(str(cached), "model.path")


def test_the_weights_that_a_run_publishes_have_no_tokenizer(folder, tmp_path):
    for file in folder.glob("tokenizer.*"):
        file.unlink()
    none = "has no tokenizer, none of tokenizer.json, vocab*, *.model, *.tiktoken"
    assert (folder / "tokenizer_config.json").is_file(), "which alone is none"
    assert refused(folder).endswith(f"{none}: copy the files of the tokenizer that the model was trained with")
    run = tmp_path / "run"
    published = shutil.copytree(folder, run / "weights" / "step_000003")
    for name in ("step_000003", "step_000012", "step_000012.bak"):
        (run / "checkpoints" / name).mkdir(parents=True)
        (run / "checkpoints" / name / "manifest.json").touch()
    assert refused(published).endswith(f"{none}: give a checkpoint, {run}/checkpoints/step_000012")
    assert refused(run).endswith(f"it has no config.json: give a checkpoint, {run}/checkpoints/step_000012")


def test_the_model_of_an_adapter_is_named(folder):
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").touch()
    assert refused(folder / "adapter").endswith(f"it is an adapter; the model with it merged is {folder}")


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({"max_position_embeddings": 1024}, 1024),
        ({"n_positions": 512}, 512),
        ({"text_config": {"max_position_embeddings": 64}}, 64),
        ({"max_position_embeddings": 1024, "rope_scaling": {"type": "linear", "factor": 4.0}}, 4096),
        ({"max_position_embeddings": 1024, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, 1024),
        ({"max_position_embeddings": 1024, "rope_parameters": {"rope_type": "default"}}, 1024),
        ({"vocab_size": 3}, None),
        ({"max_position_embeddings": "many"}, None),
    ],
)
def test_how_many_positions_a_model_has(config, limit):
    assert positions(config) == limit
    check_length(limit or 10**9, positions(config), "model.", "m")
    if limit:
        with pytest.raises(ConfigError, match=rf"^model\.max_model_len={limit + 1} is above the {limit} positions"):
            check_length(limit + 1, positions(config), "model.", "m")


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "laguna", "minimax_m2"])
def test_what_vllm_gets_wrong_on_a_cpu_is_refused_there_alone(folder, kind, monkeypatch):
    (folder / "config.json").write_text(f'{{"model_type": "{kind}"}}')
    config = compose(["run.name=x", f"model.path={folder}", "model.max_model_len=64", "trainer.device=cpu"])
    monkeypatch.setenv("PRL_TOKEN", "t")
    with pytest.raises(ConfigError, match="^model.path=.*: vLLM on a CPU .*: choose engine=transformers, or a GPU"):
        check_loadable(config.model, planned(config).policy, "model.", trained=True)
    gpu = Machine(MachineConfig(gpus=1))
    for engine, machine in (
        (VLLMConfig(device="cuda"), gpu),
        (VLLMConfig(urls=["http://a:1"]), Machine()),
        (TransformersConfig(device="cpu"), Machine()),
    ):
        chosen = plan(replace(config, engine=engine), machine)
        assert check_loadable(config.model, chosen.policy, "model.", trained=True) > 0


@pytest.mark.parametrize(
    ("rows", "prompts", "named"),
    [
        (12, [], None),
        (99, [[98]], None),  # padded
        (9, [], None),  # the tokens 9 to 11 are of pads and pictures
        (9, [[1, 10]], "<image>"),  # where one has been written
        (8, [], "<call>"),
        (None, [[98]], None),
    ],
)
def test_tokens_without_a_row_are_refused(rows, prompts, named):
    vocabulary = {f"t{number}": number for number in range(8)} | {"<call>": 8, "<pad>": 9, "<image>": 10, "<audio>": 11}
    tokenizer = Mock(pad_token="<pad>", image_token="<image>", audio_token="<audio>", video_token=None)
    tokenizer.get_vocab.return_value = vocabulary
    tokenizer.convert_ids_to_tokens.side_effect = {number: token for token, number in vocabulary.items()}.get
    with pytest.raises(ConfigError, match=f"^model.path='m': its tokenizer has '{named}'") if named else nullcontext():
        check_rows("m", rows, tokenizer, prompts)


@pytest.mark.parametrize("prefix", ["model.", "teacher.model."])
def test_a_length_above_the_models_positions_is_refused_before_a_run(prefix):
    config = compose(["run.name=x", "model.max_model_len=1025"])
    with pytest.raises(ConfigError, match=rf"^{prefix}max_model_len=1025 is above the 1024 positions of "):
        check_loadable(config.model, planned(config).policy, prefix, trained=False)


def test_a_name_that_the_hub_cannot_give_is_said_to_be_no_folder_either(monkeypatch):
    config = compose(["run.name=x"])
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", Mock(side_effect=OSError("We couldn't connect")))
    says = "^model.path='no/such': there is no such folder, and on the hub: We couldn't connect"
    with pytest.raises(ConfigError, match=says):
        check_loadable(replace(config.model, path="no/such"), planned(config).policy, "model.", trained=False)


def test_the_rows_of_the_embedding(folder):
    tensors = load_file(folder / "model.safetensors")
    assert embedding_rows(str(folder)) == tensors["model.embed_tokens.weight"].shape[0]
    save_file({"other": torch.zeros(2, 3)}, folder / "model.safetensors")
    assert embedding_rows(str(folder)) is None and embedding_rows("some/model") is None
