"""Inputs of loss functions from plain lists, and what a loss function makes of them."""

import math
import random

import torch

from prl.losses import LossInputs


def inputs(t, i, *, advantages=None, ref=None, mask=None, weights=None, dtype=torch.float64, **others):
    """One sequence; the policy's logprobs `t` are a leaf, and without a mask every token is a member."""

    def tensor(values):
        return None if values is None else torch.tensor(values, dtype=dtype)

    return LossInputs(
        tensor(t).requires_grad_(),
        tensor(i),
        loss_mask=torch.tensor([True] * len(t) if mask is None else mask, dtype=torch.bool),
        advantages=tensor(advantages),
        ref_logprobs=tensor(ref),
        loss_weights=tensor(weights),
        **others,
    )


def run(fn, given, **options):
    """(loss, gradient, metrics) as plain numbers."""
    out = fn(given, **options)
    (gradient,) = torch.autograd.grad(out.loss, given.trainer_logprobs)
    assert out.loss.dim() == 0 and not any(value.requires_grad for value in out.metrics.values())
    return out.loss.item(), gradient.tolist(), {name: value.item() for name, value in out.metrics.items()}


def mean(values):
    return sum(values) / len(values) if values else 0.0


def random_streams(seed, n=40):
    """(t, i, advantages, mask, weights); some of the sampler's logprobs are not measured."""
    rng = random.Random(seed)
    i = [-rng.expovariate(1.0) for _ in range(n)]
    t = [min(-1e-4, x + rng.gauss(0, 0.9)) for x in i]
    advantages = [rng.choice([0.0, rng.gauss(0, 1)]) for _ in range(n)]
    mask = [rng.random() < 0.8 for _ in range(n)]
    weights = [rng.choice([0.0, 1.0, rng.random() * 2]) for _ in range(n)]
    for place, bad in enumerate((-9999.0, -math.inf, math.nan, math.inf)):
        i[place * 3] = bad
    return t, i, advantages, mask, weights


def members_of(i, mask, weights):
    return [n for n in range(len(i)) if mask[n] and weights[n] and math.isfinite(i[n]) and i[n] != -9999]
