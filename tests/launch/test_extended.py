"""A component of the user's own that extends one of prl's takes its place, its options, and adds options of its own."""

import json
import sys

import pytest
import torch

from prl.config.build import build, function, plain
from prl.config.compose import compose
from prl.config.validate import validate
from prl.launch.components import build_components
from prl.launch.specs import trainer_payload
from prl.losses import LossInputs, default_loss
from prl.trainer.schedule import Schedule

MODULE = '''
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from prl.algorithms.grpo import GRPOAlgorithm
from prl.filters.repetition import Repetition
from prl.losses import LossOutputs, default_loss
from prl.trainer.schedule import Schedule


@dataclass(kw_only=True)
class Scaled(GRPOAlgorithm):
    scale: Annotated[float, Ge(0)] = 1.0


@dataclass(kw_only=True)
class Longer(Repetition):
    least: Annotated[int, Ge(1)] = 1


@dataclass(kw_only=True)
class Halving(Schedule):
    every: int = 10

    def factor(self, step, max_steps):
        return 0.5 ** (step // self.every)


def scaled(inputs, scale: Annotated[float, Ge(0)] = 1.0, **options):
    """default_loss times `scale`."""
    out = default_loss(inputs, **options)
    return LossOutputs(scale * out.loss, out.metrics)
'''


@pytest.fixture(autouse=True)
def theirs(tmp_path, monkeypatch):
    (tmp_path / "their_things.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("their_things", None)


def built(*overrides):
    config = compose(["run.name=test", *overrides])
    validate(config)
    return config, build_components(config)


def test_a_schedule_with_none_of_prls_options_in_the_trainers_process():
    config, _ = built("schedule=custom", "trainer.schedule._target_=their_things.Halving", "+trainer.schedule.every=4")
    payload = json.loads(json.dumps(trainer_payload(config, config.model, initial_reference=False)))
    made = build(payload["trainer"]["schedule"], Schedule, "trainer.schedule")
    assert made.factor(8, 100) == 0.25


@pytest.mark.parametrize("own", [False, True], ids=["the run's", "an env's"])
def test_a_loss(own):
    where = "envs.math.loss" if own else "loss"
    chosen = ["env=math", "+loss@envs.math.loss=default"] if own else ["loss=default"]
    config, _ = built(
        *chosen, f"{where}._target_=their_things.scaled", f"+{where}.scale=3", f"{where}.entropy_coef=0.5"
    )
    shipped = plain(config.envs["math"].loss if own else config.loss)  # as the trainer's process gets it
    given = LossInputs(
        torch.tensor([-1.0, -2.0]),
        torch.tensor([-1.0, -2.5]),
        advantages=torch.ones(2),
        loss_mask=torch.ones(2, dtype=torch.bool),
        entropy=torch.tensor([0.5, 1.5]),
    )
    expected = 3 * default_loss(given, entropy_coef=0.5).loss
    assert function(shipped, where)(given).loss.item() == pytest.approx(expected.item())
