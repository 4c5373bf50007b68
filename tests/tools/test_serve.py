"""`prl serve`: what a run, a checkpoint or a model stands for, and how it says that it is asked."""

import importlib.util
import re
import shutil
from pathlib import Path

import hydra
import pytest
from omegaconf import OmegaConf

from prl.base.errors import ConfigError
from prl.config.compose import CONF, options, to_config
from prl.config.schema import ServeConfig
from prl.engines.vllm.options import with_tool_parser
from prl.models import model_path
from prl.serve import how_to_use, main, with_target


def config_of(*arguments):
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return to_config(ServeConfig, hydra.compose("serve", [*with_target(list(arguments)), "log=x"]), [])


@pytest.fixture
def run(tmp_path, monkeypatch):
    """`run(name)`: a run under outputs/ with two checkpoints, whose model is shorter than others."""
    monkeypatch.chdir(tmp_path)

    def make(name):
        folder = tmp_path / "outputs" / name
        for step in (10, 20):
            shutil.copytree(model_path("tiny"), folder / "checkpoints" / f"step_{step:06d}")
        config = {"envs": {}, "model": {"path": "tiny", "max_model_len": 300, "dtype": "bfloat16", "renderer": "qwen3"}}
        OmegaConf.save(config, folder / "config.yaml")
        return folder

    return make


@pytest.mark.parametrize("name", ["hello", "a run", "algo=max_rl,seed=0"])
def test_a_run_is_served_as_its_checkpoint_with_its_settings(run, name):
    folder = run(name)
    for target in (*([] if "=" in name else [name]), f"outputs/{name}", str(folder)):
        served = config_of(target, "engine.max_num_seqs=8")
        assert (served.name, Path(served.model.path).absolute()) == (name, folder / "checkpoints" / "step_000020")
        assert (served.model.max_model_len, served.model.dtype, served.model.renderer) == (300, "bfloat16", "qwen3")
        assert (served.engine.max_num_seqs, served.engine.port, served.tools) == (8, 8001, False)
    (folder / "checkpoints" / "best").mkdir()
    (folder / "checkpoints" / "best" / "best.json").write_text('{"step": 0}')
    assert config_of(f"outputs/{name}").model.path == "tiny", "the best is the model that it began with"


def test_a_checkpoint_a_folder_and_a_model_by_name(run, tmp_path):
    run("hello")
    checkpoint = "outputs/hello/checkpoints/step_000010"
    served = config_of(checkpoint, "model.max_model_len=200", "name=mine")
    assert (served.name, served.model.path, served.model.max_model_len) == ("mine", checkpoint, 200)
    assert config_of(checkpoint).name == "hello-step_000010"
    shutil.copytree(model_path("tiny"), tmp_path / "my models" / "one")
    assert config_of("my models/one").name == "one"
    tiny = config_of("tiny")
    assert (tiny.name, tiny.model.path, tiny.model.renderer) == ("tiny", model_path("tiny"), "qwen3")
    assert config_of("Qwen/Qwen3-0.6B").name == "Qwen3-0.6B"
    assert with_target(["model=tiny", "engine.port=1", "--cfg", "job"]) == [
        "model=tiny",
        "engine.port=1",
        "--cfg",
        "job",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "^nowhere: no such folder"),
        (["runs/of/mine"], "^runs/of/mine: no such folder"),
        (["tiny", "tiny-teacher"], "^tiny tiny-teacher: this command serves one model"),
        (["tiny", "model=hf"], "^tiny is the model to serve: leave model=… out"),
        (["tiny", "model.path=x"], "^tiny is the model to serve"),
        (["empty"], "empty has no checkpoints yet"),
    ],
)
def test_what_cannot_be_served_is_a_line(run, tmp_path, arguments, message):
    shutil.rmtree(run("empty") / "checkpoints")
    with pytest.raises(ConfigError, match=message):
        with_target(arguments)


def test_it_says_how_to_ask_and_to_distil(run, monkeypatch):
    monkeypatch.delenv("PRL_TOKEN", raising=False)
    run("algo=max_rl,seed=0")
    told = how_to_use(config_of("outputs/algo=max_rl,seed=0"), "http://127.0.0.1:8001", "the-key")
    assert "export OPENAI_BASE_URL=http://127.0.0.1:8001/v1 OPENAI_API_KEY=the-key" in told
    assert """teacher.name='"'"'algo=max_rl,seed=0'"'"'""" in told, "as a shell and Hydra read it"
    assert "tools=true" in told
    monkeypatch.setenv("PRL_TOKEN", "the-key")
    told = how_to_use(config_of("tiny", "tools=true"), "http://127.0.0.1:8001", "the-key")
    assert "the-key" not in told and "$PRL_TOKEN" in told and "tools=true" not in told


def test_an_engine_for_runs_says_which_model_they_name(run):
    run("hello")
    told = how_to_use(config_of("hello", "policy=true"), "http://127.0.0.1:8001", "the-key")
    assert "model=hf" in told and "hello/checkpoints/step_000020" in told
    told = how_to_use(config_of("tiny", "policy=true"), "http://127.0.0.1:8001", "the-key")
    assert "prl.train model=tiny engine.urls=[http://127.0.0.1:8001]" in told


def known_parsers():
    """The parsers that vLLM registers, by its own file: importing it takes seconds."""
    [folder] = importlib.util.find_spec("vllm").submodule_search_locations
    return set(re.findall(r'^    "([\w-]+)": \(', (Path(folder) / "tool_parsers" / "__init__.py").read_text(), re.M))


def test_every_renderer_of_a_family_has_a_parser_of_tool_calls():
    for renderer in set(options()["renderer"]) - {"auto", "custom", "default"}:
        found = with_tool_parser({}, renderer)
        assert found["enable-auto-tool-choice"] is True and found["tool-call-parser"] in known_parsers(), renderer
    families = {
        renderer: with_tool_parser({}, renderer)["tool-call-parser"] for renderer in ("qwen3", "qwen3.5", "glm-4.5")
    }
    assert families == {"qwen3": "hermes", "qwen3.5": "qwen3_coder", "glm-4.5": "glm45"}
    own = {"tool_call_parser": "xlam", "block-size": 16}
    expected = {"enable-auto-tool-choice": True, "tool-call-parser": "xlam", "block-size": 16}
    assert with_tool_parser(own, None) == with_tool_parser(own, "qwen3") == expected


@pytest.mark.parametrize("renderer", [None, "default"])
def test_a_family_that_is_not_known_is_refused_with_the_remedy(renderer):
    with pytest.raises(
        ConfigError, match="^tools=true: .*: give model.renderer=qwen3 or the like, or .engine.args.tool-"
    ):
        with_tool_parser({}, renderer)


def test_an_engine_without_tool_calls_refuses_them(run):
    with pytest.raises(ConfigError, match="^tools=true: TransformersEngine reads no tool calls"):
        main(config_of("tiny", "tools=true", "engine=transformers", "~engine.port"))
