"""The interface of a loss: its inputs, its outputs, and how it is run over a packed row.

A loss is any callable `fn(inputs: LossInputs, **options) -> LossOutputs` over one sequence. The built-in ones are
written token by token and marked `@tokenwise`, so that `compute_loss` can run them once over a packed row instead of
once per sequence; called directly they behave as any other loss. Two rules are shared by all: select before exp, and
metrics as sums and counts, so that a mean over micro-batches and ranks is exact.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from prl.config.build import name_of
from prl.rollouts.logprobs import SENTINEL_CEILING
from prl.rollouts.messages import sequence_slices

Metrics = dict[str, tuple[Tensor | float, Tensor | float]]
"""By name: sum and count, to be added up over micro-batches and ranks."""


@dataclass
class LossInputs:
    """One sequence, every tensor `[tokens]`. Only `loss_mask` tokens count; the values of others are arbitrary.

    - `trainer_logprobs` t: the policy being trained, with gradient.
    - `inference_logprobs` i: the sampler, at rollout time.
    - `ref_logprobs`: the reference model; None where no algorithm asks for one.
    - `advantages` A: None where the algorithm assigns none (opd, opsd, sft).
    - `loss_mask`: bool, exactly this component's member tokens.
    - `loss_weights` w: scales each token's loss; None means 1.0.
    - `proximal_logprobs` p: the trainer's before the first update on the batch; None where no loss has `proximal`.
    - `entropy`: of the policy's distribution at the sampling temperature, nats, with gradient.
    - `divergence`: of the policy's distribution from the reference's, nats, with gradient; for `divergence_loss` alone.
    - `sequence_lengths`: of the sequences, where a `@tokenwise` loss gets a whole row; None = one sequence.
    - `mean_length`: rl members per sequence with any, over the whole update. What an rl loss returns is divided by the
      number of members later; times `mean_length`, it is divided by the number of sequences instead.
    - `rollout_share`: for each token S / (R * n), where R rollouts with S sequences have rl members in the update, n of
      them in this token's rollout. Times `mean_length * rollout_share`, a sum is a mean over rollouts. None where each
      rollout has one sequence.
    - `step`, `max_steps`: the training step, from 1, and the run's last, for a coefficient that changes.

    Raises ValueError, naming the tensor, where shapes differ.
    """

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    _: KW_ONLY
    loss_mask: Tensor
    ref_logprobs: Tensor | None = None
    advantages: Tensor | None = None
    loss_weights: Tensor | None = None
    proximal_logprobs: Tensor | None = None
    entropy: Tensor | None = None
    divergence: Tensor | None = None
    rollout_share: Tensor | None = None
    sequence_lengths: Sequence[int] | None = None
    mean_length: float = 1.0
    step: int = 1
    max_steps: int = 1

    def __post_init__(self) -> None:
        check_shapes({name: value for name, value in vars(self).items() if isinstance(value, Tensor)})

    def part(self, tokens: slice) -> "LossInputs":
        """The inputs of some of the tokens alone, as of one sequence of a row."""
        cut: dict[str, Any] = {name: value[tokens] for name, value in vars(self).items() if isinstance(value, Tensor)}
        return dataclasses.replace(self, **cut, sequence_lengths=None)

    def sequence_sum(self, values: Tensor) -> Tensor:
        """For each token the sum of `values` over its sequence, `[tokens]`."""
        lengths = [len(values)] if self.sequence_lengths is None else self.sequence_lengths
        return sequence_sums(values, lengths)[per_token(range(len(lengths)), lengths, values.device)]

    def members(self, *, sampler: bool) -> Tensor:
        """Return which tokens the loss is computed on, bool `[tokens]`: those in the mask with a weight other than 0.

        `compute_loss` has already applied this to the mask; a loss called by hand gets the same protection here.

        Args:
            sampler: the loss reads the sampler's logprobs, so tokens without a measured one are left out.
        """
        members = self.loss_mask.bool() & (True if self.loss_weights is None else self.loss_weights != 0)
        return members & are_measured(self.inference_logprobs) if sampler else members


def check_shapes(tensors: dict[str, Tensor]) -> None:
    """Raise ValueError, naming it, unless the first tensor is 1-D and the others have its shape."""
    first, shape = next((name, value.shape) for name, value in tensors.items())
    if len(shape) != 1:
        raise ValueError(f"{first} must be 1-D [tokens], got shape {list(shape)}")
    for name, value in tensors.items():
        if value.shape != shape:
            raise ValueError(f"{name} has shape {list(value.shape)}, {first} {list(shape)}")


@dataclass
class LossOutputs:
    """`loss`: a scalar, the *sum* over the sequence's members. `metrics`: scalars, averaged over sequences."""

    loss: Tensor
    metrics: dict[str, Tensor]


LossFunction = Callable[[LossInputs], LossOutputs]


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

    A metric of a sequence is the mean over its tokens, or, if its name ends in `/max`, the largest. Where there is none
    to average over, a direct call returns 0.0, so that every key is always there; `compute_loss` leaves the sequence
    out of the mean over sequences, so that it does not dilute the others.
    """

    @functools.wraps(terms)
    def loss_fn(inputs: LossInputs, **options: Any) -> LossOutputs:
        out = terms(inputs, **options)
        return LossOutputs(
            loss=out.loss.sum(),
            metrics={
                name: torch.as_tensor(total / max(count, 1)).to(out.loss.dtype)
                for name, (total, count) in _sequence_means(out.metrics, [len(out.loss)]).items()
            },
        )

    vars(loss_fn)["terms"] = terms
    return loss_fn


def are_measured(logprobs: Tensor) -> Tensor:
    """`prl.rollouts.logprobs.is_measured` of every element, as bool."""
    return torch.isfinite(logprobs) & (logprobs > SENTINEL_CEILING)


def select(members: Tensor, values: Tensor) -> Tensor:
    """`values` on members and 0 elsewhere, `[tokens]`, at least float32.

    Selecting comes before any arithmetic: NaN and infinities off the members reach neither the result nor the gradient.
    """
    return torch.where(members, values if values.dtype == torch.float64 else values.float(), 0.0)


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
    clipped = log_ratio.detach().exp() > delta
    rho = torch.where(live & ~clipped, log_ratio, 0.0).exp()
    return factor * torch.where(clipped, delta, rho) * live


@torch.no_grad()
def mismatch_kl(log_ratio: Tensor) -> Tensor:
    """rho - log rho - 1 (k3, an estimate of KL), float64 `[tokens]`. In float32 it would cancel to noise at rho = 1."""
    log_ratio = log_ratio.detach().double()
    return torch.expm1(log_ratio) - log_ratio


def add_metric(metrics: Metrics, name: str, total: Tensor | float, count: Tensor | float) -> None:
    """Add a sum and a count to those that `name` has; of a name that ends in `/max` keep the largest value."""
    before = metrics.get(name, (0.0, 0))
    if name.endswith("/max"):
        metrics[name] = (max(before[0], total), 1)
    else:
        metrics[name] = (before[0] + total, before[1] + count)


def run_loss(
    fn: LossFunction, inputs: LossInputs, sequence_lengths: Sequence[int]
) -> tuple[Tensor, Metrics, dict[str, Tensor] | None]:
    """Run `fn` on a row without padding; `inputs.loss_mask` must have at least one member.

    A loss that is not `@tokenwise` gets one sequence at a time, and only sequences with members.

    Returns:
        The sum over the members, a float64 scalar; the metrics as (sum, count) over sequences; and
        `TokenTerms.excluded`, None for a loss that runs sequence by sequence.
    """
    inner, options = (fn.func, fn.keywords) if isinstance(fn, functools.partial) and not fn.args else (fn, {})
    if hasattr(inner, "terms"):
        terms: TokenTerms = inner.terms(dataclasses.replace(inputs, sequence_lengths=sequence_lengths), **options)
        return terms.loss.sum(dtype=torch.float64), _sequence_means(terms.metrics, sequence_lengths), terms.excluded
    losses: list[Tensor] = []
    metrics: Metrics = {}
    for sequence in map(inputs.part, sequence_slices(sequence_lengths)):
        if not sequence.loss_mask.any():
            continue
        out = _checked(name_of(fn), fn(sequence))
        losses.append(out.loss)
        for name, value in out.metrics.items():
            value = torch.as_tensor(value).detach().double()
            if value.dim():
                raise ValueError(f"{name_of(fn)} returned metric {name!r} of shape {list(value.shape)}, not a scalar")
            add_metric(metrics, name, value, 1)
    return functools.reduce(torch.add, [loss.double() for loss in losses]), metrics, None


def per_token(numbers: Sequence[int], sequence_lengths: Sequence[int], device: torch.device) -> Tensor:
    """The number of its sequence for each token, int64 `[tokens]`."""
    # With a dtype, since a dummy row has no sequences and an empty list would be float.
    values, lengths = (torch.tensor(entries, dtype=torch.int64) for entries in (numbers, sequence_lengths))
    return torch.repeat_interleave(values, lengths).to(device)


def sequence_sums(values: Tensor, sequence_lengths: Sequence[int]) -> Tensor:
    """The sum of `values`, `[tokens]`, over each sequence, `[sequences]`."""
    segments = per_token(range(len(sequence_lengths)), sequence_lengths, values.device)
    return values.new_zeros(len(sequence_lengths)).index_add(0, segments, values)


@torch.no_grad()
def _sequence_means(metrics: dict[str, tuple[Tensor, Tensor]], sequence_lengths: Sequence[int]) -> Metrics:
    """`TokenTerms.metrics`, averaged inside each sequence that has tokens for it, then summed; or the largest."""
    over = torch.stack([over for _, over in metrics.values()])  # [metrics, tokens]
    values = torch.stack([values.double() for values, _ in metrics.values()])
    segments = per_token(range(len(sequence_lengths)), sequence_lengths, over.device)
    rows = torch.zeros(2, len(over), len(sequence_lengths), dtype=torch.float64, device=over.device)
    # Both [metrics, sequences].
    sums, sizes = rows.index_add_(2, segments, torch.stack([torch.where(over, values, 0.0), over.double()]))
    means = (sums / sizes.clamp_min(1)).sum(1)
    result: Metrics = dict(zip(metrics, zip(means, (sizes > 0).sum(1), strict=True), strict=True))
    largest = {name: torch.where(*metrics[name][::-1], 0.0).max() for name in metrics if name.endswith("/max")}
    return result | {name: (value, 1) for name, value in largest.items()}


def _checked(name: str, out: object) -> LossOutputs:
    """`out` as LossOutputs. Raises where the loss function `name` does not keep to its contract."""
    if not isinstance(out, LossOutputs):
        raise TypeError(f"{name} must return LossOutputs(loss, metrics), not {type(out).__name__}")
    if not isinstance(out.loss, Tensor):
        raise TypeError(f"{name} must return a tensor as its loss, not {type(out.loss).__name__}")
    if out.loss.dim():
        raise ValueError(f"{name} must return a scalar loss, a sum over the sequence, not {list(out.loss.shape)}")
    if not out.loss.requires_grad:
        raise ValueError(f"{name} returned a loss without gradient: compute it from inputs.trainer_logprobs")
    return out
