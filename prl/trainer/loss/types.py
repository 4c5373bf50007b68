"""What a loss reads and returns, and the two rules all losses share: select before exp, and metrics as sums and counts.

A loss is any callable `fn(inputs: LossInputs, **knobs) -> LossOutputs` over one sequence. The built-in ones are
written token by token and marked `@tokenwise`, so that `compute_loss` can run them once over a packed row instead of
once per sequence; called directly they behave as any other loss.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

# vLLM clamps -inf to -9999 so that it survives JSON. Everything this low counts: bf16 rounds -9999 to -9984.
SENTINEL_BELOW = -9000.0


@dataclass
class LossInputs:
    """One sequence, every tensor `[tokens]`. Only `loss_mask` tokens count; what other positions hold is arbitrary.

    - `trainer_logprobs` t: the policy being trained, with gradient.
    - `inference_logprobs` i: the sampler, at rollout time.
    - `ref_logprobs`: the reference model; None unless an algorithm scores one.
    - `advantages` A: None where the algorithm assigns none (opd, opsd, sft).
    - `loss_mask`: bool, exactly this component's member tokens.
    - `loss_weights` w: scales each token's loss; None means 1.0.

    Raises `TypeError` without a `loss_mask` and `ValueError`, naming the array, where shapes differ.
    """

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    # The defaults below keep this positional order, in which an optional array comes before a required one.
    ref_logprobs: Tensor | None = None
    advantages: Tensor | None = None
    loss_mask: Tensor | None = None
    loss_weights: Tensor | None = None

    def __post_init__(self) -> None:
        if self.loss_mask is None:
            raise TypeError("LossInputs needs loss_mask, a bool tensor [tokens]")
        if self.trainer_logprobs.dim() != 1:
            raise ValueError(f"trainer_logprobs must be 1-D [tokens], got shape {list(self.trainer_logprobs.shape)}")
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and value.shape != self.trainer_logprobs.shape:
                raise ValueError(
                    f"{field.name} has shape {list(value.shape)}, trainer_logprobs {list(self.trainer_logprobs.shape)}"
                )

    def members(self, *, sampler: bool) -> Tensor:
        """`[tokens]` bool: in the mask, of non-zero weight and, if the loss reads the `sampler`, with a usable logprob.

        `compute_loss` has already applied this to the mask; a loss called by hand gets the same protection here.
        """
        members = self.loss_mask.bool()
        if self.loss_weights is not None:
            members = members & (self.loss_weights != 0)
        return members & usable(self.inference_logprobs) if sampler else members


@dataclass
class LossOutputs:
    """`loss`: a scalar, the *sum* over the sequence's members. `metrics`: scalars, averaged over sequences."""

    loss: Tensor
    metrics: dict[str, Tensor]


@dataclass
class TokenTerms:
    """A loss before reduction, all `[tokens]`: `loss`, 0 off the members; `metrics`, name -> (values, bool over).

    `excluded`: why a member has no policy gradient ("dropped", "clipped") -> bool, which ones; None where the loss
    makes no such difference. Nothing is computed from it.
    """

    loss: Tensor
    metrics: dict[str, tuple[Tensor, Tensor]]
    excluded: dict[str, Tensor] | None = None


def tokenwise(terms: Callable[..., TokenTerms]) -> Callable[..., LossOutputs]:
    """Make a per-sequence loss of a function returning `TokenTerms`; that function stays reachable as `.terms`.

    A metric is the mean of its values over `over`. Where the sequence has no such token a direct call says 0.0, so that
    every key is always there, whereas `compute_loss` leaves the sequence out of the mean, so that nothing is diluted.
    """

    @functools.wraps(terms)
    def loss_fn(inputs: LossInputs, **knobs) -> LossOutputs:
        out = terms(inputs, **knobs)
        dtype = out.loss.dtype
        metrics = {
            name: (torch.where(over, values.double(), 0.0).sum() / over.sum().clamp_min(1)).to(dtype)
            for name, (values, over) in out.metrics.items()
        }
        return LossOutputs(loss=out.loss.sum(), metrics=metrics)

    loss_fn.terms = terms
    return loss_fn


def usable(logprobs: Tensor) -> Tensor:
    """`[tokens]` bool: finite and not the sentinel."""
    return torch.isfinite(logprobs) & (logprobs > SENTINEL_BELOW)


def select(members: Tensor, values: Tensor) -> Tensor:
    """`[tokens]`, at least float32: `values` on members, 0 elsewhere, for the gradient too, whatever stood there."""
    if values.dtype != torch.float64:
        values = values.float()
    return torch.where(members, values, 0.0)


def weighted(inputs: LossInputs, members: Tensor, loss: Tensor) -> Tensor:
    """`[tokens]`: the loss times its weight. `loss` must be finite off the members and is zeroed there."""
    weights = members.to(loss.dtype) if inputs.loss_weights is None else select(members, inputs.loss_weights)
    return loss * weights


def importance_weighted(factor: Tensor, log_ratio: Tensor, keep: Tensor, delta: float | None = None) -> Tensor:
    """`[tokens]`: `factor * min(rho, delta)` on `keep`, 0 elsewhere, with rho = exp(log_ratio); delta None is no clip.

    rho is computed only where it is used, since 0 * inf is NaN, and so is the gradient of min(inf, delta).
    """
    live = keep & (factor != 0)
    if delta is None:
        return factor * torch.where(live, log_ratio, 0.0).exp() * live
    clipped = is_clipped(log_ratio, delta)
    rho = torch.where(live & ~clipped, log_ratio, 0.0).exp()
    return factor * torch.where(clipped, delta, rho) * live


def is_clipped(log_ratio: Tensor, delta: float) -> Tensor:
    """`[tokens]` bool: rho > delta."""
    return log_ratio.detach().exp() > delta


@torch.no_grad()
def mismatch_kl(log_ratio: Tensor) -> Tensor:
    """`[tokens]` float64: rho - log rho - 1 (k3, an estimate of KL). In float32 it would cancel to noise at rho = 1."""
    log_ratio = log_ratio.detach().double()
    return torch.expm1(log_ratio) - log_ratio
