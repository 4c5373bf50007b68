"""Options of losses: those of a user's own that extend prl's are treated as what they extend."""

import functools
import math
import subprocess
import sys
from dataclasses import FrozenInstanceError, dataclass
from typing import Annotated

import pytest
import torch
from annotated_types import Ge
from hydra.utils import instantiate
from loss_cases import inputs

from prl.base.errors import ConfigError
from prl.config.compose import compose, options
from prl.launch.components import check_loss
from prl.losses import LossCounts, LossInputs, compute_loss, ppo_loss, tokenwise
from prl.losses.options import loss_of, options_of
from prl.losses.rl import PPOOptions, ReinforceOptions
from prl.trainer.entropy import controls_of


@dataclass(frozen=True)
class Scaled(PPOOptions):
    scale: Annotated[float, Ge(0)] = 1.0


@tokenwise(Scaled)
def scaled(inputs, options):
    """PPO, its surrogate times a number."""
    tokens = inputs.policy_tokens(options)
    policy = tokens.importance_weighted(tokens.advantages, tokens.log_ratio, tokens.members, 1 + options.clip_high)
    return tokens.terms(-options.scale * policy, metrics={"importance_ratio": (tokens.ratio, tokens.members)})


@dataclass(frozen=True)
class Plain(ReinforceOptions):
    pass


@tokenwise(Plain)
def plain(inputs, options):
    tokens = inputs.policy_tokens(options)
    return tokens.terms(-tokens.advantages * tokens.logprobs, metrics={})


def passing_on(inputs, scale=1.0, **options):
    return ppo_loss(inputs, **options)


@pytest.fixture
def trainer():
    return compose(["run.name=x", "trainer.updates_per_batch=2"]).trainer


def node(name, **options):
    return {"_target_": f"{__name__}.{name}", "_partial_": True, **options}


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (node("scaled", correction="tis"), "loss.correction=tis: the loss has a ratio to the sampler itself"),
        (node("scaled", correction_cap=3.0), "loss.correction_cap is given, but only correction=tis reads it"),
        (node("scaled", agg_mode="constant"), "loss.agg_mode=constant needs loss.constant_length"),
        (node("scaled", scale=-1.0), "loss.scale=-1.0"),
        (node("scaled", dual_clip=0.5), "loss.dual_clip=0.5"),
        (node("scaled", clip_hihg=0.5), "loss.clip_hihg: there is no such key; did you mean loss.clip_high?"),
        (node("passing_on", agg_mode="mean"), "loss.agg_mode=mean"),
        (node("passing_on", agg_mode="constant"), "loss.agg_mode=constant needs loss.constant_length"),
        (node("passing_on", dual_clip=0.5), "loss.dual_clip=0.5"),
        (node("scaled", correction="tis", proximal=True), None),
        (node("plain", correction="tis"), None),
        (node("passing_on", correction="tis", constant_length=4), None),  # nobody knows its ratios, nor its mean
    ],
)
def test_options_of_ones_own_are_refused_as_those_that_they_extend(trainer, loss, message):
    if message is None:
        check_loss("loss", loss, trainer)
    else:
        with pytest.raises(ConfigError) as caught:
            check_loss("loss", loss, trainer)
        assert message in str(caught.value)


def test_the_trainer_reads_them_as_those_of_a_loss_of_prl():
    given = {"entropy_target": 0.5, "entropy_coef": 0.25, "proximal": True}
    for name in ("scaled", "passing_on"):
        options = options_of(loss_of(node(name, **given), "loss"))
        (control,) = controls_of({"": options}).values()
        assert (control.target, control.coef, control.step) == (0.5, 0.25, 0.005) and options.proximal
        with pytest.raises(FrozenInstanceError):
            options.proximal = False
    assert not controls_of({"": options_of(scaled)}) and options_of(scaled).clip_high == 0.2


def test_a_formula_of_ones_own_runs_on_the_row_and_by_hand():
    """Ratios 1, 1.1 and 2, which is clipped at 1.5; A = 1, scale 2, the mean over sequences of 1 and 2 tokens."""
    ratios = torch.tensor([1.0, 1.1, 2.0], dtype=torch.float64)
    sampler = torch.full((3,), -1.0, dtype=torch.float64)
    policy = (sampler + ratios.log()).requires_grad_()
    fn = functools.partial(scaled, scale=2.0, clip_high=0.5, agg_mode="sequence_mean")
    loss, metrics = compute_loss(
        trainer_logprobs=policy,
        inference_logprobs=sampler,
        loss_mask=torch.ones(3, dtype=torch.bool),
        advantages=torch.ones(3, dtype=torch.float64),
        sequence_lengths=[1, 2],
        counts=LossCounts(rl=3, rl_sequences=2),
        rl_loss=fn,
    )
    assert loss.item() == pytest.approx(-2 * (1 + (1.1 + 1.5) / 2) / 2)
    total, count = metrics["importance_ratio"]
    assert (float(total), int(count)) == (pytest.approx(1 + 1.55), 2)
    one = fn(inputs([-1.0 + math.log(1.1), -1.0 + math.log(2.0)], [-1.0, -1.0], advantages=[1.0, 1.0]))
    assert one.loss.item() == pytest.approx(-(1.1 + 1.5))


@pytest.mark.parametrize("option", sorted({*options()["loss"]} - {"custom"}))
def test_plain_hydra_makes_the_loss_of_a_conf_file(option):
    made = instantiate(compose(["run.name=x", f"loss={option}"]).loss)
    assert made.func.__name__ == f"{option}_loss" and options_of(made) == made.func.Config()


def test_plain_hydra_makes_a_loss_of_ones_own():
    made = instantiate(
        compose(["run.name=x", "loss=custom", f"loss._target_={__name__}.passing_on", "+loss.scale=3"]).loss
    )
    assert (made.func, made.keywords) == (passing_on, {"scale": 3})


def test_inputs_in_the_documented_order():
    policy, sampler, reference, advantages = (torch.tensor([-value, -value]) for value in (1.0, 2.0, 3.0, 4.0))
    mask, weights = torch.tensor([True, False]), torch.tensor([0.5, 1.0])
    given = LossInputs(policy, sampler, reference, advantages, mask, weights)
    assert given.ref_logprobs is reference and given.advantages is advantages
    assert given.loss_mask is mask and given.loss_weights is weights
    short = LossInputs(policy, sampler, loss_mask=mask)
    assert short.ref_logprobs is None and short.advantages is None and short.loss_weights is None
    with pytest.raises(TypeError, match="loss_mask"):
        LossInputs(policy, sampler)


def test_options_are_read_without_torch():
    code = (
        "import sys; from prl.losses.options import loss_of; "
        "loss_of({'_target_': 'prl.losses.ppo_loss', 'clip_low': 0.1}, 'loss'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
