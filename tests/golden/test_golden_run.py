"""A golden run: the numbers of three training steps on seeded samples of every kind, as they were written down.

A refactor that changes one of them fails here and names it. Where a change is meant, write them anew and say why in the
commit: PRL_UPDATE_GOLDEN=1 pytest tests/golden
"""

import json
import os
import random
from pathlib import Path

import pytest
import torch

from prl.algorithms.advantage import centred, efficiency_shaping, mean_normalized
from prl.losses import aipo_loss, default_loss
from prl.models import model_path
from prl.rollouts.messages import StepBatch, TrainingSample
from prl.rollouts.packing import pack
from prl.trainer.model import load_model
from prl.trainer.trainer import Trainer

GOLDEN = Path(__file__).with_name("steps.json")
KINDS = ("rl", "echo", "ref_kl", "ce")
RUNS = {
    "default": {"loss": default_loss, "share_prefixes": True},
    "aipo": {"loss": aipo_loss, "share_prefixes": True},
    "packed rows": {"loss": default_loss, "share_prefixes": False},
}
VOCABULARY = 290


def make_samples(seed: int) -> list[TrainingSample]:
    """Ten groups of four samples with a common prompt; the kinds take turns."""
    draw = random.Random(seed)
    samples = []
    for group in range(10):
        prompt = [draw.randrange(20, VOCABULARY) for _ in range(draw.randrange(5, 12))]
        for _ in range(4):
            length = draw.randrange(3, 14)
            token_ids = prompt + [draw.randrange(20, VOCABULARY) for _ in range(length)]
            mask = [False] * len(prompt) + [True] * length
            logprobs = [0.0] * len(prompt) + [-round(draw.uniform(0.1, 6.0), 4) for _ in range(length)]
            streams = make_streams(KINDS[group % 4], mask, draw)
            samples.append(
                TrainingSample(
                    token_ids=token_ids,
                    mask=mask,
                    logprobs=[0.0] * len(mask) if KINDS[group % 4] == "ce" else logprobs,
                    temperatures=[1.0 if group % 3 else 0.7] * len(token_ids),
                    env_name=f"env{group % 2}",
                    reward=0.0,
                    **streams,
                )
            )
    return samples


def make_streams(kind: str, mask: list[bool], draw: random.Random) -> dict[str, list[float]]:
    """The streams of one sample: advantages for rl, observation weights for echo, a reference or plain weights."""
    zero, sampled = [0.0] * len(mask), [float(trains) for trains in mask]
    if kind in ("rl", "echo"):
        advantage = round(draw.uniform(-1, 1), 3)
        streams = {"advantages": [advantage * trains for trains in mask]}
        if kind == "echo":
            streams["ce_weights"] = [0.1 if place >= 2 and not trains else 0.0 for place, trains in enumerate(mask)]
        return streams
    if kind == "ref_kl":
        reference = [-round(draw.uniform(0.1, 6.0), 4) * trains for trains in mask]
        return {"ref_logprobs": reference, "ref_kl_weights": sampled, "rl_weights": zero}
    return {"ce_weights": sampled, "rl_weights": zero}


def run(loss, share_prefixes: bool) -> list[dict[str, float]]:
    torch.manual_seed(0)
    trainer = Trainer(
        model=load_model(model_path("tiny"), device=torch.device("cpu")),
        rl_losses={"": loss},
        max_steps=10,
        seq_len=128,
        tokens_per_forward=512,
        share_prefixes=share_prefixes,
        schedule={"_target_": "prl.trainer.schedule.Linear", "decay_fraction": 0.5},
    )
    lines = []
    for step in (1, 2, 3):
        rows, truncated = pack(make_samples(step), 128, 1)
        lines.append(trainer.train_step(StepBatch(step, rows[0], truncated)))
    return lines


def credit() -> dict[str, list[float]]:
    """Credit of eight seeded rewards and costs by each rule."""
    draw = random.Random(0)
    rewards = [round(draw.choice((0.0, 0.05, 0.5, 1.0)), 2) for _ in range(8)]
    costs = [float(draw.randrange(1, 90)) for _ in range(8)]
    return {
        "centred": centred(rewards),
        "mean_normalized": mean_normalized(rewards),
        "efficiency_shaping": centred(efficiency_shaping(rewards, costs)),
    }


def differences(expected, found, where=""):
    """The places where two nested results differ by more than float32 arithmetic on another machine would."""
    if isinstance(expected, dict):
        keys = sorted(set(expected) ^ set(found))
        yield from (f"{where}/{key}: only in {'golden' if key in expected else 'this'} run" for key in keys)
        for key in set(expected) & set(found):
            yield from differences(expected[key], found[key], f"{where}/{key}")
    elif isinstance(expected, list):
        for number, pair in enumerate(zip(expected, found, strict=True), 1):
            yield from differences(*pair, f"{where}/{number}")
    elif found != pytest.approx(expected, rel=1e-4, abs=3e-6):
        yield f"{where}: {expected} became {found}"


def test_the_numbers_are_those_of_the_golden_run():
    found = {"credit": credit()} | {name: run(**how) for name, how in RUNS.items()}
    if os.environ.get("PRL_UPDATE_GOLDEN"):
        GOLDEN.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    assert list(differences(json.loads(GOLDEN.read_text()), found)) == []


def test_a_changed_number_is_found_and_named():
    golden = json.loads(GOLDEN.read_text())
    changed = json.loads(GOLDEN.read_text())
    changed["aipo"][1]["grad_norm"] *= 1.001
    (given,) = differences(golden, changed)
    assert given.startswith("/aipo/2/grad_norm: ")
