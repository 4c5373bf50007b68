"""Small random models in folders, with and without their weights."""

import json
import shutil
from pathlib import Path

import pytest
from small_models import CLASSES, SIZES

from prl.models import model_path


@pytest.fixture
def bare(tmp_path):
    """`bare(kind, **sizes)`: a model folder with `config.json` and the tiny model's tokenizer, and no weights."""

    def make(kind="qwen3", **sizes):
        folder = tmp_path / "bare"
        folder.mkdir(exist_ok=True)
        config = {"model_type": kind, "architectures": [CLASSES[kind]], **SIZES[kind], **sizes}
        (folder / "config.json").write_text(json.dumps(config))
        for file in Path(model_path("tiny")).glob("tokenizer*"):
            shutil.copy(file, folder)
        return folder

    return make


@pytest.fixture
def built():
    """`built(kind, **sizes)`: a random model."""

    def make(kind="qwen3", **sizes):
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **{**SIZES[kind], **sizes})
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()

    return make
