"""Run directories and model folders made by hand; nothing here starts an engine."""

import json
import shutil
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from prl.base import checkpoint_folders
from prl.config.build import plain
from prl.config.compose import compose
from prl.engines.replies import Completion
from prl.models import model_path


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def make_model():
    """`make_model(folder, **config)`: tiny's folder, with another config."""

    def make(folder, **changes):
        folder = Path(folder)
        shutil.copytree(model_path("tiny"), folder)
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


@pytest.fixture
def make_run(make_model):
    """`make_run(name, *overrides, steps=…)`: a run directory with its config and checkpoints."""

    def make(name, *overrides, steps=(10, 20)):
        run = Path(name)
        run.mkdir(parents=True)
        OmegaConf.save(OmegaConf.create(plain(compose([f"run.name='{run.name}'", *overrides]))), run / "config.yaml")
        for step in steps:
            checkpoint_folders.seal(make_model(checkpoint_folders.checkpoint_path(run, step)), step)
        return run

    return make


class Pool:
    """A model that says the same to everyone, or fails."""

    model = "policy"

    def __init__(self, tokenizer, reply):
        self.version, self.reply, self.prompts = 0, reply, []
        self.tokenizer, self.end = tokenizer, tokenizer.convert_tokens_to_ids("<|im_end|>")

    async def generate(self, prompt_ids, sampling, *, n=1, prefix=None):
        self.prompts.append((self.tokenizer.decode(prompt_ids), sampling))
        if isinstance(self.reply, Exception):
            raise self.reply
        ids = [*self.tokenizer.encode(self.reply, add_special_tokens=False), self.end]
        return [Completion(list(ids), [-0.5] * len(ids), "stop", self.version, self.version) for _ in range(n)]


@pytest.fixture
def make_pool(tokenizer):
    return lambda reply: Pool(tokenizer, reply)
