"""Inputs of loss functions from plain lists, and what a loss function makes of them."""

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
