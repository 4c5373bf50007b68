"""Pictures in a dry run: their sizes in the first prompts, and the parameters of what sees them."""

import json
from pathlib import Path

import pytest
import torch
from prepared_run import prepared_run
from seeing import config_of, write_model
from seeing_models import noise, seeing_model
from transformers import AutoModelForImageTextToText

from prl.config.compose import compose
from prl.config.schema import ModelConfig
from prl.tools.dry_run.pictures import parameters_that_see, sights


@pytest.fixture
def run(tmp_path):
    """Four tasks, three of which have a picture, of 32 x 32 or 32 x 48 pixels."""
    folder = Path(seeing_model("qwen3_vl", tmp_path / "model"))
    config = config_of("qwen3_vl").to_dict() | json.loads((folder / "config.json").read_text())
    own = config_of("qwen3_vl").to_dict()
    sizes = {name: own[name] for name in ("text_config", "vision_config")}
    (folder / "config.json").write_text(json.dumps(config | sizes))
    rows = [{"prompt": f"<image>colour {number}?", "answer": "red", "images": f"{number}.png"} for number in range(3)]
    for number, height in enumerate((32, 32, 48)):
        noise(32, height, seed=number).save(tmp_path / f"{number}.png")
    lines = map(json.dumps, [*rows, {"prompt": "1+1=", "answer": "2"}])
    (tmp_path / "my.jsonl").write_text("\n".join(lines))
    env = [
        f"envs.jsonl.args.path={tmp_path / 'my.jsonl'}",
        "env=jsonl",
        "envs.jsonl.eval_args=null",
        "envs.jsonl.args.eval_fraction=0",
    ]
    return prepared_run(
        compose(["run.name=x", "dry_run=true", "model=hf", f"model.path={folder}", "model.max_model_len=64", *env])
    )


def test_sizes_are_those_of_the_first_prompts(run):
    """Patches of 8 x 8, four of which are a token; 384 numbers each, and three of eight bytes for the grid.

    The pictures have 16, 16 and 24 patches, 24,600 and 36,888 bytes; 64 tasks a step have 3 pictures for every 4.
    """
    pictures, tower = sights(run)
    assert pictures == (
        "pictures of jsonl, in the first 4 prompts: 0.75 a prompt, each of 1,024 to 1,536 pixels, 4 to 6 tokens and "
        "0.02346 to 0.03518 MiB of features; 1.31 MiB a step"
    )
    assert tower.endswith(f"has {parameters_that_see(run.config.model):,} parameters")
    run.config.orchestrator.batch_size, run.config.orchestrator.token_batch_size = None, 4096
    assert next(sights(run)).endswith("MiB of features")


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen2_5_vl", "llava"])
def test_what_sees_is_all_but_the_language_model(tmp_path, kind):
    folder = write_model(tmp_path / "model", kind)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config_of(kind))
    names = [name for name, _ in model.named_parameters() if not name.startswith(("model.language_model.", "lm_head."))]
    counted = sum(model.get_parameter(name).numel() for name in names)
    assert parameters_that_see(ModelConfig(path=str(folder))) == counted > 0


def test_a_run_of_text_shows_none(config):
    config.dry_run = True
    assert list(sights(prepared_run(config))) == []
