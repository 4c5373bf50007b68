"""A trainer that goes on from its checkpoint is the trainer that did not stop."""

import json
import math
import os
import re

import pytest
import torch
from architectures import write_model
from run_processes import wait_until
from safetensors.torch import load_file

from prl.base.checkpoint_folders import part_path, parts_of
from prl.base.errors import ConfigError, PrlError
from prl.rollouts.messages import Reference, StepBatch
from prl.rollouts.packing import pack
from prl.trainer import worker
from prl.trainer.checkpoint_part import load_state, take_part, write_part
from prl.trainer.trainer import Trainer
from prl.transport.files import FileTransport

ADAMW = {"_target_": "torch.optim.AdamW", "lr": 1e-3}
REFERENCES = ["initial", "ema:0.5", "lagged:3"]
LORA = {"rank": 4, "alpha": 32.0, "target_modules": ["q_proj", "down_proj"]}
MUON = ADAMW | {
    "parts": {
        "muon": {
            "match": "^(?!.*(embed|lm_head))",
            "dims": 2,
            "_target_": "torch.optim.Muon",
            "lr": 1e-3,
            "adjust_lr_fn": "match_rms_adamw",
        }
    }
}


ADAPTIVE = {"proximal": True, "entropy_coef": 0.25, "entropy_target": 100.0, "entropy_step": 0.0625}
SEVERAL: dict[int, dict] = {1: {}, 2: ADAPTIVE}


@pytest.fixture
def train(tiny_path, make_sample, tmp_path):
    """`train(name, steps, …)`: run the trainer's loop over batches that depend on the step alone; its directory."""

    def run(
        name, steps, *, model=tiny_path, lora=None, optim=ADAMW, refs=(), resume=None, spoilt=None, updates=1, every=0
    ):
        folder = tmp_path / name
        transport = FileTransport(folder)
        for step in steps:
            pull = [{"reference": Reference(name), "ref_kl_weights": [0.2] * 20} for name in refs] or [{}]
            samples = [make_sample(20, 4, seed=16 * step + i, **pull[i % len(pull)]) for i in range(4)]
            if step == spoilt:
                samples[updates - 1].advantages = [float("inf")] * 20
            rows, _ = pack(samples, 64, 1, updates)
            transport.send_batch(StepBatch(step, rows[0], 0, bool(every)), 0)
        transport.send_end(max(steps))
        config = {
            "model": {"path": str(model), "dtype": "float32", "trust_remote_code": False, "lora": lora},
            "losses": {
                "": {"_target_": "prl.losses.default_loss", "_partial_": True, "kl_tau": 1e-3, **SEVERAL[updates]}
            },
            "weights": {"_target_": "prl.weights.files.FileWeights"},
            "seed": 0,
            "max_steps": 9,
            "references": refs,
            "trainer": {"_target_": "prl.trainer.trainer.Trainer", "device": "cpu", "optim": optim, "example_steps": 0}
            | {"updates_per_batch": updates, "epochs": updates},
            "resume": resume,
        }
        worker.run(config, folder)
        return folder

    return run


@pytest.mark.parametrize(
    ("model", "how"),
    [
        ("tiny", {"refs": REFERENCES}),
        ("tiny", {"updates": 2}),
        ("tiny", {"optim": MUON, "lora": LORA, "refs": REFERENCES}),
        ("Qwen3-MoE", {"lora": LORA | {"target_modules": None}}),
    ],
    ids=["AdamW and references", "several updates", "Muon with LoRA and references", "LoRA beside experts"],
)
def test_a_resumed_run_equals_one_that_did_not_stop(train, tmp_path, model, how):
    """Bit by bit, and so have two runs of the same batches."""
    if model != "tiny":
        how = how | {"model": write_model(tmp_path / "model", model, tied=True)}
    whole = train("whole", [1, 2, 3, 4], **how)
    first = train("first", [1, 2], **how)
    part = part_path(first, 2)
    second = train("second", [3, 4], resume={"folder": str(part), "step": 2}, **how)
    assert FileTransport(second).receive_metrics(2) == {}, "the version that it begins with is published"
    adapters = ["adapter/adapter_model.safetensors"] if "lora" in how else []
    for name in ("model.safetensors", "state/trainer.safetensors", *adapters):
        expected, found = (load_file(part_path(run, 4) / name) for run in (whole, second))
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[key], found[key]) for key in expected), name
    lines = [FileTransport(run).receive_metrics(4) for run in (whole, second)]
    assert lines[0]["lr"] == lines[1]["lr"]
    assert [line.get("entropy_coef/all") for line in lines] == [0.4375 if "updates" in how else None] * 2
    published = load_file(FileTransport(second).weights_path(2) / "model.safetensors")
    kept = load_file(part / "model.safetensors")
    assert all(torch.equal(kept[name], weight) for name, weight in published.items())


def test_a_reference_that_the_checkpoint_lacks_is_refused(train):
    part = part_path(train("first", [1], refs=["ema:0.5"]), 1)
    with pytest.raises(ConfigError, match=r"the checkpoint has no reference ema:0\.9"):
        train("second", [2], refs=["ema:0.9"], resume={"folder": str(part), "step": 1})


def test_a_fatal_gradient_leaves_the_last_good_weights(train):
    with pytest.raises(PrlError, match="gradient's norm"):
        train("spoilt", [1, 2, 3], spoilt=3)
    with pytest.raises(PrlError, match="gradient's norm"):
        train("spoilt later", [1, 2, 3], spoilt=3, updates=2)
    good = train("good", [1, 2])
    folder = good.parent / "spoilt"
    assert parts_of(good.parent / "spoilt later") == [], "its weights are of no step"
    assert parts_of(folder) == [2]
    expected, found = (load_file(part_path(run, 2) / "model.safetensors") for run in (good, folder))
    assert all(torch.equal(expected[key], found[key]) for key in expected)


def test_a_last_checkpoint_that_cannot_be_written_hides_no_error(train, monkeypatch, capsys):
    monkeypatch.setattr(worker, "write_part", full)
    with pytest.raises(PrlError, match="gradient's norm"):
        train("spoilt", [1, 2], spoilt=2)
    assert "no last checkpoint: checkpoints cannot be written: No space left on device" in capsys.readouterr().err


def full(*_):
    raise OSError(28, "No space left on device", "checkpoints")


def test_a_checkpoint_that_cannot_be_written_ends_the_trainer(train, monkeypatch):
    monkeypatch.setattr(worker, "write_part", full)
    with pytest.raises(OSError, match="No space left"):
        train("full", range(1, 9), every=1)


def test_training_goes_on_while_a_checkpoint_is_written(train, monkeypatch):
    """Each has what the trainer had at its step, though that goes on; the next one waits until it is written."""
    begun = []

    def write_late(run_dir, step, *given):
        begun.append((step, parts_of(run_dir)))
        if step == 1:
            wait_until(FileTransport(run_dir).weights_path(2).exists, 60, "the next step is trained")
        write_part(run_dir, step, *given)

    monkeypatch.setattr(worker, "write_part", write_late)
    how = {"refs": REFERENCES, "updates": 2}
    run = train("run", [1, 2, 3], every=1, **how)
    assert begun == [(1, []), (2, [1]), (3, [1, 2])]
    monkeypatch.undo()
    for step in (1, 2):
        alone = train(f"alone {step}", range(1, step + 1), **how)
        for name in ("model.safetensors", "state/trainer.safetensors", "state/trainer.json"):
            assert (part_path(run, step) / name).read_bytes() == (part_path(alone, step) / name).read_bytes()


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_weights_and_state_follow_the_umask(train, mask):
    before = os.umask(mask)
    try:
        folder = train("one", [1], lora=LORA)
    finally:
        os.umask(before)
    modes = {path: path.stat().st_mode & 0o777 for path in folder.rglob("*.safetensors")}
    names = {path.name for path in modes}
    assert names == {"model.safetensors", "adapter_model.safetensors", "trainer.safetensors"}
    assert set(modes.values()) == {0o666 & ~mask}


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_weights_that_are_not_finite_are_not_kept(trainer, tmp_path, value):
    with torch.no_grad():
        next(trainer.model.parameters())[0, 0] = value
    with pytest.raises(PrlError, match=r"step 3: weights are not finite \(model\.embed_tokens\.weight\)"):
        write_part(tmp_path, 3, take_part(trainer), trainer.model, {})
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def trainer(tiny):
    return Trainer(model=tiny, rl_losses={}, max_steps=4, optim=ADAMW)


def test_random_generators_come_back(trainer, tmp_path):
    torch.manual_seed(5)
    write_part(tmp_path, 1, take_part(trainer), trainer.model, {})
    expected = torch.rand(3)
    torch.manual_seed(6)
    load_state(part_path(tmp_path, 1), trainer)
    assert torch.equal(torch.rand(3), expected)


def test_optimiser_state_that_is_no_plain_data_is_refused(trainer):
    trainer.optimizer.optimizers[0].state[next(trainer.model.parameters())] = {"mine": object()}
    with pytest.raises(PrlError, match=r"state of AdamW has what a checkpoint cannot hold: .*object"):
        take_part(trainer)


@pytest.mark.parametrize("name", ["trainer.safetensors", "trainer.json"])
@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:-9], lambda data: b"\xff" * 99])
def test_a_damaged_state_is_refused_by_its_file(train, trainer, name, damage):
    folder = part_path(train("one", [1]), 1)
    path = folder / "state" / name
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ConfigError, match=rf"^{re.escape(str(path))} .*cannot be read") as refused:
        load_state(folder, trainer)
    assert worker.reason(refused.value) == str(refused.value)


def test_the_state_of_another_model_is_refused(train, trainer):
    folder = part_path(train("one", [1]), 1)
    path = folder / "state" / "trainer.json"
    saved = json.loads(path.read_text())
    saved["optimizer"]["model.layers.99.weight"] = saved["optimizer"].pop(next(iter(saved["optimizer"])))
    path.write_text(json.dumps(saved))
    with pytest.raises(ConfigError, match=r"parameters that the model lacks: model\.layers\.99"):
        load_state(folder, trainer)
