"""Run directories and model folders made by hand; nothing here starts an engine."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
from omegaconf import OmegaConf
from scripted_models import saying

from prl.base import checkpoint_folders
from prl.config.build import plain
from prl.config.compose import compose
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


@pytest.fixture
def make_pool(tokenizer):
    """`make_pool(reply)`: a model that says the same to everyone, or fails."""

    def make(reply):
        if isinstance(reply, Exception):
            return SimpleNamespace(model="policy", version=0, generate=AsyncMock(side_effect=reply))
        return saying(tokenizer, reply)

    return make
