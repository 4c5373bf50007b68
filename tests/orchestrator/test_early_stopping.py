"""Early stopping and the best checkpoint, rule by rule; `test_selection.py` has the loop of the orchestrator."""

import json
import shutil
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from prl.config.model_folder import tokenizer_files
from prl.config.orchestrator import StopConfig
from prl.models import model_path
from prl.orchestrator.early_stopping import EarlyStopping, held_out_reward, keep_best


def test_the_held_out_reward_is_the_mean_over_envs():
    metrics = {"eval/a/avg@4": 0.2, "eval/b/avg@1": 0.8, "eval/a/errored": 1.0, "reward/all/mean": 0.9}
    assert held_out_reward(metrics) == 0.5
    assert held_out_reward({"reward/all/mean": 0.9}) is None


def of_evaluations(rewards, **stop):
    """After which evaluations the run was to end, and which were the best so far."""
    early = EarlyStopping(StopConfig(**stop))
    best = [version for version, reward in enumerate(rewards) if early.evaluated(version, reward)]
    return early.reason, best


@pytest.mark.parametrize(
    ("rewards", "stop", "reason", "best"),
    [
        ([0.1, 0.5, 0.4], {}, None, [0, 1]),
        ([0.1, 0.5, 0.4], {"target": 0.5}, "version 1 has a held-out reward of 0.500", [0, 1]),
        ([0.1, 0.49], {"target": 0.5}, None, [0, 1]),
        ([0.7 + 0.2 + 0.1], {"target": 1.0}, "version 0 has a held-out reward of 1.000", [0]),
        ([0.3, 0.1 + 0.2], {"patience": 1}, "1 evaluation had no better held-out reward than 0.300", [0]),
        ([0.3, 0.2, 0.31, 0.1], {"patience": 2}, None, [0, 2]),
        ([0.3, 0.2, 0.1], {"patience": 2}, "2 evaluations in a row had no better held-out reward than 0.300", [0]),
        ([0.3, 0.3], {"patience": 1}, "1 evaluation had no better held-out reward than 0.300", [0]),
        ([-0.5, -0.2], {"patience": 1}, None, [0, 1]),
    ],
)
def test_target_and_patience(rewards, stop, reason, best):
    message, found = of_evaluations(rewards, **stop)
    assert found == best
    assert message is None if reason is None else message.startswith(reason)


def test_the_time_budget(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    early = EarlyStopping(StopConfig(time_budget_s=60))
    now[0] = 159.9
    early.trained(3)
    assert early.reason is None
    now[0] = 160.0
    early.trained(4)
    assert early.reason == "60 s had passed at step 4, orchestrator.stop.time_budget_s=60"


def test_best_checkpoint_survives_the_weights_it_came_from(tmp_path):
    weights, best = tmp_path / "weights", tmp_path / "checkpoints" / "best"
    weights.mkdir()
    (weights / "config.json").write_text("{}")
    (weights / "metrics.json").write_text("{}")
    (weights / "generation_config.json").write_text("{}")
    model = shutil.copytree(path := model_path("tiny"), tmp_path / "model")
    tokenizer = tokenizer_files(str(model), trust_remote_code=False)
    shutil.rmtree(model)
    keep_best(tmp_path, weights, tokenizer, 0, 0.0)
    assert [path.name for path in best.iterdir()] == ["best.json"], "the model itself is no copy"
    for version in (3, 7):
        (weights / "model.safetensors").unlink(missing_ok=True)
        save_file({"w": torch.full((2,), float(version))}, weights / "model.safetensors")
        keep_best(tmp_path, weights, tokenizer, version, version / 10)
    (weights / "model.safetensors").unlink()
    assert load_file(best / "model.safetensors")["w"].tolist() == [7.0, 7.0]
    assert json.loads((best / "best.json").read_text()) == {"step": 7, "reward": 0.7}
    assert not (best / "metrics.json").exists() and (best / "generation_config.json").exists()
    assert AutoTokenizer.from_pretrained(best).encode("1+2=") == AutoTokenizer.from_pretrained(path).encode("1+2=")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["best"]
