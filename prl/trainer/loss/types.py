"""Inputs and outputs of a loss, and the two rules that all losses share: select before exp, metrics as sums and counts.

A loss is any callable `fn(inputs: LossInputs, **knobs) -> LossOutputs` over one sequence. The built-in ones are
written token by token and marked `@tokenwise`, so that `compute_loss` can run them once over a packed row instead of
once per sequence; called directly they behave as any other loss.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from prl.wire.logprobs import SENTINEL_CEILING


@dataclass
class LossInputs:
    """One sequence, every tensor `[tokens]`. Only `loss_mask` tokens count; the values of others are arbitrary.

    - `trainer_logprobs` t: the policy being trained, with gradient.
    - `inference_logprobs` i: the sampler, at rollout time.
    - `ref_logprobs`: the reference model; None unless an algorithm scores one.
    - `advantages` A: None where the algorithm assigns none (opd, opsd, sft).
    - `loss_mask`: bool, exactly this component's member tokens.
    - `loss_weights` w: scales each token's loss; None means 1.0.
    - `streams`: the streams that further components require (`prl.wire.components`), by name.

    Raises `TypeError` without a `loss_mask` and `ValueError`, naming the array, where shapes differ.
    """

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    # The defaults below keep this positional order, in which an optional array comes before a required one.
    ref_logprobs: Tensor | None = None
    advantages: Tensor | None = None
    loss_mask: Tensor = None  # type: ignore[assignment]  # refused by `__post_init__`
    loss_weights: Tensor | None = None
    streams: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.loss_mask is None:
            raise TypeError("LossInputs needs loss_mask, a bool tensor [tokens]")
        own = {name: value for name, value in vars(self).items() if name != "streams"}
        check_shapes(self.trainer_logprobs, own | self.streams)

    def part(self, tokens: slice) -> "LossInputs":
        """The inputs of some of the tokens alone, as of one sequence of a row."""
        own = {name: value[tokens] for name, value in vars(self).items() if isinstance(value, Tensor)}
        return LossInputs(**own, streams={name: stream[tokens] for name, stream in self.streams.items()})

    def members(self, *, sampler: bool) -> Tensor:
        """Which tokens the loss is computed on, bool `[tokens]`: those in the mask with a weight other than 0.

        `compute_loss` has already applied this to the mask; a loss called by hand gets the same protection here.

        Args:
            sampler: the loss reads the sampler's logprobs, so tokens without a measured one are left out.
        """
        members = self.loss_mask.bool()
        if self.loss_weights is not None:
            members = members & (self.loss_weights != 0)
        return members & are_measured(self.inference_logprobs) if sampler else members


def check_shapes(trainer_logprobs: Tensor, tensors: dict[str, Tensor | None]) -> None:
    """Raise ValueError, naming it, unless `trainer_logprobs` is 1-D and the others, None if absent, have its shape."""
    if trainer_logprobs.dim() != 1:
        raise ValueError(f"trainer_logprobs must be 1-D [tokens], got shape {list(trainer_logprobs.shape)}")
    for name, value in tensors.items():
        if value is not None and value.shape != trainer_logprobs.shape:
            raise ValueError(f"{name} has shape {list(value.shape)}, trainer_logprobs {list(trainer_logprobs.shape)}")


@dataclass
class LossOutputs:
    """`loss`: a scalar, the *sum* over the sequence's members. `metrics`: scalars, averaged over sequences."""

    loss: Tensor
    metrics: dict[str, Tensor]


@dataclass
class TokenTerms:
    """A loss before its reduction over tokens. Every tensor is `[tokens]`."""

    loss: Tensor
    """0 off the members."""
    metrics: dict[str, tuple[Tensor, Tensor]]
    """By name: the values, and as bool the tokens to average them over."""
    excluded: dict[str, Tensor] | None = None
    """By reason ("dropped", "clipped"): the tokens without a policy gradient, bool. None where the loss has no policy
    gradient. For the token export alone."""


def tokenwise(terms: Callable[..., TokenTerms]) -> Callable[..., LossOutputs]:
    """Make a per-sequence loss of a function that returns `TokenTerms`; that function stays reachable as `.terms`.

    A metric of a sequence is the mean over its tokens. Where there is none to average over, a direct call returns 0.0,
    so that every key is always there; `compute_loss` leaves the sequence out of the mean over sequences, so that it
    does not dilute the others.
    """

    @functools.wraps(terms)
    def loss_fn(inputs: LossInputs, **knobs: Any) -> LossOutputs:
        out = terms(inputs, **knobs)
        dtype = out.loss.dtype
        metrics = {
            name: (torch.where(over, values.double(), 0.0).sum() / over.sum().clamp_min(1)).to(dtype)
            for name, (values, over) in out.metrics.items()
        }
        return LossOutputs(loss=out.loss.sum(), metrics=metrics)

    vars(loss_fn)["terms"] = terms
    return loss_fn


def are_measured(logprobs: Tensor) -> Tensor:
    """`prl.wire.logprobs.is_measured` of every element, as bool."""
    return torch.isfinite(logprobs) & (logprobs > SENTINEL_CEILING)


def select(members: Tensor, values: Tensor) -> Tensor:
    """`values` on members and 0 elsewhere, `[tokens]`, at least float32.

    Selecting comes before any arithmetic: NaN and infinities off the members reach neither the result nor the gradient.
    """
    if values.dtype != torch.float64:
        values = values.float()
    return torch.where(members, values, 0.0)


def weighted(inputs: LossInputs, members: Tensor, loss: Tensor) -> Tensor:
    """The loss times its weight, `[tokens]`. `loss` must be finite off the members and is zeroed there."""
    weights = members.to(loss.dtype) if inputs.loss_weights is None else select(members, inputs.loss_weights)
    return loss * weights


def importance_weighted(factor: Tensor, log_ratio: Tensor, keep: Tensor, delta: float | None = None) -> Tensor:
    """`factor * min(rho, delta)` on `keep`, 0 elsewhere, `[tokens]`; rho = exp(log_ratio), and delta None is no clip.

    rho is computed only where it is used, since 0 * inf is NaN, and so is the gradient of min(inf, delta).
    """
    live = keep & (factor != 0)
    if delta is None:
        return factor * torch.where(live, log_ratio, 0.0).exp() * live
    clipped = is_clipped(log_ratio, delta)
    rho = torch.where(live & ~clipped, log_ratio, 0.0).exp()
    return factor * torch.where(clipped, delta, rho) * live


def is_clipped(log_ratio: Tensor, delta: float) -> Tensor:
    """rho > delta, bool `[tokens]`."""
    return log_ratio.detach().exp() > delta


@torch.no_grad()
def mismatch_kl(log_ratio: Tensor) -> Tensor:
    """rho - log rho - 1 (k3, an estimate of KL), float64 `[tokens]`. In float32 it would cancel to noise at rho = 1."""
    log_ratio = log_ratio.detach().double()
    return torch.expm1(log_ratio) - log_ratio
