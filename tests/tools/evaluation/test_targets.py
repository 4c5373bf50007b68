"""What an argument names, and which targets one engine can serve."""

import shutil

import pytest

from prl.base.errors import ConfigError
from prl.config.evaluation import EndpointConfig, EvalModelConfig
from prl.config.schema import ModelConfig
from prl.models import model_path
from prl.tools.evaluation.targets import Target, by_engine, find_targets, look_up, model_of


def test_checkpoint_has_the_settings_of_its_run(make_run, make_model):
    run = make_run("outputs/mine", "model.max_model_len=99", "model.dtype=float16", "model.trust_remote_code=true")
    found = model_of("outputs/mine/checkpoints/step_000010")
    assert (found.max_model_len, found.renderer, found.dtype) == (99, "qwen3", "float16")
    assert not found.trust_remote_code, "that is for the user to say"
    assert model_of("mine").path == model_of(str(run)).path == "outputs/mine/checkpoints/step_000020"
    shutil.copytree(run / "checkpoints" / "step_000010", run / "checkpoints" / "step_000020.bak")
    assert model_of("mine").path == "outputs/mine/checkpoints/step_000020", "a copy is somebody's own"
    make_model(run / "checkpoints" / "best")
    assert model_of("mine").path == "outputs/mine/checkpoints/best"
    (run / "checkpoints" / "best" / "best.json").write_text('{"step": 0, "reward": 0.5}')
    base = model_of("mine")
    assert (base.path, base.max_model_len) == (model_path("tiny"), 99), "no version was better than the first"
    assert model_of(str(make_model("alone"))) == ModelConfig(path="alone", max_model_len=1024), "its positions"
    expected = ModelConfig(path=model_path("tiny"), max_model_len=512, lr=4e-4, renderer="qwen3")
    assert model_of("tiny") == model_of(model_path("tiny")) == expected
    assert model_of("organisation/model") == ModelConfig(path="organisation/model"), "on the hub"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["tyni"], "tyni: no such folder; models by name: smollm2, tiny, tiny-teacher"),
        (["outputs/nothing"], "outputs/nothing: no such folder"),
        (["/no/such/folder"], "/no/such/folder: no such folder"),
        (["empty"], "'empty' is not a model folder: it has no config.json"),
        (["young"], "young has no checkpoints yet"),
        ([], "nothing to look at"),
    ],
)
def test_what_is_no_target_is_refused(given, says, make_run, tmp_path):
    make_run("outputs/young", steps=())
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=says):
        find_targets(given, EvalModelConfig(), EndpointConfig())


@pytest.mark.parametrize("path", ["outputs/nothing", "./nothing", "../nothing"])
def test_a_local_path_is_no_name_on_the_hub(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"^{path}: no such folder"):
        model_of(path)


def test_names_are_short_and_command_line_settings_win(make_run):
    make_run("a/mine")
    make_run("b/mine", steps=(10,))
    steps = ("a/mine/checkpoints/step_000010", "b/mine/checkpoints/step_000010", "a/mine/checkpoints/step_000020")
    given = ["tiny", *steps]
    found = find_targets(given, EvalModelConfig(max_model_len=64), EndpointConfig())
    assert [target.name for target in found] == [*given[:3], "mine/step_000020"]
    assert [target.name for target in find_targets(["b/mine"], EvalModelConfig(), EndpointConfig())] == [
        "mine/step_000010"
    ]
    assert {target.model.max_model_len for target in found} == {64}
    assert {target.model.renderer for target in found} == {"qwen3"}


def test_one_engine_loads_all_of_one_shape(make_model):
    wide = str(make_model("wide", intermediate_size=999))
    names = ["tiny", wide, "tiny-teacher"]
    groups = by_engine([Target(name, model_of(name)) for name in names] + [Target("url", model_of("tiny"), object())])
    assert [[target.name for target in group] for group in groups] == [["tiny", "tiny-teacher"], [wide], ["url"]]


async def test_an_endpoint_says_its_name_tokenizer_and_length(server):
    server.replies["/v1/models"] = {"data": [{"id": "big", "root": model_path("tiny"), "max_model_len": 128}]}
    reference, model = await look_up(f"{server.url}/v1", EndpointConfig())
    assert (reference.name, reference.urls) == ("big", [f"{server.url}/v1"])
    assert (model.path, model.max_model_len, model.renderer) == (model_path("tiny"), 128, "qwen3")


async def test_an_endpoint_with_several_models_or_a_key(server):
    server.replies["/v1/models"] = {"data": [{"id": "a"}, {"id": "b"}]}
    with pytest.raises(ConfigError, match=r"serves a, b: choose one with endpoint\.name"):
        await look_up(server.url, EndpointConfig())
    with pytest.raises(ConfigError, match="serves a, b: choose one"):
        await look_up(server.url, EndpointConfig(name="c"))
    reference, model = await look_up(server.url, EndpointConfig(name="b", tokenizer="tiny"))
    assert reference.name == "b" and model.path == model_path("tiny")
    server.replies["/v1/models"] = (401, "no")
    with pytest.raises(ConfigError, match=r"HTTP 401: no: endpoint\.api_key_var names"):
        await look_up(server.url, EndpointConfig())


async def test_an_endpoint_that_does_not_answer_is_named(server):
    async def never():
        import asyncio

        await asyncio.sleep(5)

    server.replies["/v1/models"] = never
    with pytest.raises(ConfigError, match=rf"{server.url} did not answer within 0.05 s \(endpoint.timeout_s\)"):
        await look_up(server.url, EndpointConfig(timeout_s=0.05))
    await server.stop()
    with pytest.raises(ConfigError, match=f"{server.url}/v1/models failed: Cannot connect"):
        await look_up(server.url, EndpointConfig())
