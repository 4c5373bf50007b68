"""Pictures before a start: what is refused by file, row and remedy, and how the first task is shown."""

import json
from types import SimpleNamespace

import pytest
from PIL import Image
from seeing_models import seeing_model
from verifiers.v1.dialects.chat import message_to_wire

from prl.base.errors import ConfigError
from prl.config.schema import EnvConfig, ModelConfig
from prl.engines.renderer import UnrenderablePrompt
from prl.engines.tokenizers import load_tokenizer
from prl.envs.environment import Environment
from prl.launch.components import picture_store, renderer_of
from prl.launch.prompts import as_read, check_pictures, rendered_prompts
from prl.models import model_path

AUTO = {"_target_": "prl.engines.renderer.make_renderer", "_partial_": True, "name": "auto"}


@pytest.fixture
def made(tmp_path):
    """`made(rows)`: an env of rows with one red picture of 64x32 pixels each, and the renderer of a model that sees."""
    path = seeing_model("qwen3_vl", tmp_path / "model")

    def make(rows=({},), renderer=None, **model):
        Image.new("RGB", (64, 32), "red").save(tmp_path / "red.png")
        lines = [
            json.dumps({"prompt": f"{n}: <image>?", "answer": "x", "images": "red.png"} | row)
            for n, row in enumerate(rows)
        ]
        (tmp_path / "rows.jsonl").write_text("\n".join(lines))
        config = ModelConfig(path=path, **model)
        store = picture_store(config, tmp_path / "pictures")
        args = {"path": str(tmp_path / "rows.jsonl"), "eval_fraction": 0}
        env = Environment("e", EnvConfig("prl.envs.tasksets.jsonl", args), eval_tasks=0, pictures=store)
        node = AUTO | ({"name": renderer} if renderer else {})
        return env, renderer_of("renderer", node, config, load_tokenizer(path, "model.path"), store)

    return make


def test_a_picture_above_the_models_limit_is_refused_with_the_option(made):
    with pytest.raises(ConfigError, match=r"rows\.jsonl, line 1: .*64x32 pixels, above model\.max_pixels=2047"):
        made(max_pixels=2047)
    env, _ = made(max_pixels=2048)
    assert env.pictures.max_pixels == 2048


def test_pictures_that_do_not_fit_are_refused_by_row(made):
    env, renderer = made([{}, {"prompt": "two: <image><image>", "images": ["red.png"] * 2}])
    check_pictures(env, renderer, 18)  # 64 by 32 pixels are eight tokens
    with pytest.raises(
        ConfigError, match=r"line 2: its pictures \(64x32, 64x32\) have 16 tokens, and model\.max_model_len is 17"
    ):
        check_pictures(env, renderer, 17)


def test_a_picture_that_the_processor_refuses_is_refused_by_row(made, tmp_path):
    Image.new("RGB", (600, 2)).save(tmp_path / "thin.png")
    env, renderer = made([{}, {"images": "thin.png"}])
    with pytest.raises(ConfigError, match=r"line 2: its pictures \(600x2\): .*aspect ratio.*: cut them, or leave"):
        check_pictures(env, renderer, 99)
    shown = {task.data.prompt[0].content[1].image_url.url: task for task in env.tasks}
    [thin] = [each for each in shown if env.pictures.sizes[each.removeprefix("picture:")] == (600, 2)]
    with pytest.raises(UnrenderablePrompt, match="cannot be shown"):
        renderer.render([message_to_wire(message) for message in shown[thin].data.prompt])


def test_algorithms_and_envs_that_take_no_pictures_are_refused(made):
    env, renderer = made()
    aligned = SimpleNamespace(align="text")
    for algorithm in (aligned, SimpleNamespace(kl=aligned)):
        with pytest.raises(ConfigError, match=r"line 1 has pictures, and algo\.align=text"):
            check_pictures(env, renderer, 99, algorithm)
    check_pictures(env, renderer, 99, SimpleNamespace(align=None, kl=None))
    env.uses_harness = True
    with pytest.raises(ConfigError, match=r"line 1 has pictures, and verifiers' harness"):
        check_pictures(env, renderer, 99)


def test_a_renderer_that_shows_no_pictures_is_refused(made):
    env, renderer = made(renderer="qwen3")
    with pytest.raises(ConfigError, match=r"line 1 has pictures, and the renderer shows none"):
        check_pictures(env, renderer, 99)


def test_a_text_that_spells_a_placeholder_is_refused(made):
    env, renderer = made([{"prompt": "<|image_pad|>? <image>"}])
    with pytest.raises(ConfigError, match="spell"):
        rendered_prompts(env, renderer, "renderer")


def test_the_first_task_names_its_picture(made):
    env, renderer = made()
    [digest] = env.pictures.sizes
    assert f"[picture {digest[:12]}, 64x32 pixels]" in as_read(env)
    [prompt] = rendered_prompts(env, renderer, "renderer")
    assert len([token for token in prompt if token in renderer.pictures.placeholders]) == 8


def test_only_a_model_that_sees_has_a_store(tmp_path):
    assert picture_store(ModelConfig(path=model_path("tiny")), tmp_path) is None
    assert picture_store(ModelConfig(path=str(tmp_path / "none")), None) is None
