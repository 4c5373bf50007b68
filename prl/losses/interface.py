"""The interface of a loss: its inputs and outputs, and the arithmetic on tokens that the losses share.

A loss is any callable `fn(inputs: LossInputs, **options) -> LossOutputs` over one sequence. The built-in ones are
written token by token and marked `@tokenwise`, so that `compute_loss` can run them once over a packed row instead of
once per sequence; called directly they behave as any other loss. Two rules are shared by all: select before exp, and
metrics as sums and counts, so that a mean over micro-batches and ranks is exact.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from prl.losses.options import AggMode, PolicyOptions
from prl.rollouts.logprobs import SENTINEL_CEILING

if TYPE_CHECKING:
    from prl.losses.policy import PolicyTokens

Metrics = dict[str, tuple[Tensor | float, Tensor | float]]
"""Sum and count of each metric, by its name, to be added up over micro-batches and ranks."""


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
    - `mean_length`: N / S, the rl members per sequence with any, over the whole update. `compute_loss` divides by N; a
      loss of your own that is multiplied by `mean_length` is divided by S instead. Those of prl name an `agg_mode`.
    - `rollout_share`: for each token S / (R * n), where R rollouts with S sequences have rl members in the update, n of
      them in this token's rollout; for `agg_mode=rollout_mean`. None where each rollout has one sequence.
    - `step`, `max_steps`: the training step, from 1, and the run's last, for a coefficient that changes.

    Raises ValueError, naming the tensor, where shapes differ.
    """

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None = None
    advantages: Tensor | None = None
    loss_mask: Tensor = None  # type: ignore[assignment]  # required, behind optional ones by the documented order
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
        if self.loss_mask is None:
            raise TypeError("LossInputs needs loss_mask, the tokens that the loss is computed on")
        check_shapes(self._tensors())

    def _tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def part(self, tokens: slice) -> "LossInputs":
        """Return the inputs of some of the tokens alone, as those of one sequence of a row."""
        cut: dict[str, Any] = {name: value[tokens] for name, value in self._tensors().items()}
        return dataclasses.replace(self, **cut, sequence_lengths=None)

    def policy_tokens(self, options: PolicyOptions) -> "PolicyTokens":
        """Return the tokens of an rl loss with these options. Raises ValueError for inputs that lack what it reads."""
        from prl.losses.policy import PolicyTokens  # which imports this module

        return PolicyTokens(self, options)

    def sequence_sum(self, values: Tensor) -> Tensor:
        """Sum `values` over each sequence, and give each of its tokens the sum, `[tokens]`."""
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
    """`loss`: a scalar, the *sum* over the sequence's members. `metrics`: scalars, averaged over sequences.

    A loss of prl that is called by hand has applied its `agg_mode` to `loss`: divided by the members of the whole
    update, N, it is that sequence's part of the mean.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


LossFunction = Callable[[LossInputs], LossOutputs]


@dataclass
class TokenTerms:
    """A loss before its reduction over tokens. Every tensor is `[tokens]`."""

    loss: Tensor
    """Weighted by `loss_weights`, divided by nothing, and 0 off the members."""
    metrics: dict[str, tuple[Tensor, Tensor]]
    """Values of each metric, by its name, and as bool the tokens to average them over."""
    excluded: dict[str, Tensor] | None = None
    """Tokens without a policy gradient, bool, by the reason ("dropped", "clipped"); None where the loss has no policy
    gradient. Only the token export reads it."""
    agg_mode: AggMode | None = "token_mean"
    """Mean that `loss` is averaged by (`prl.losses.compute.normalised`)."""
    constant_length: int | None = None
    """Tokens that `agg_mode=constant` divides by."""


def are_measured(logprobs: Tensor) -> Tensor:
    """Apply `prl.rollouts.logprobs.is_measured` to every element; bool."""
    return torch.isfinite(logprobs) & (logprobs > SENTINEL_CEILING)


def select(members: Tensor, values: Tensor) -> Tensor:
    """Set `values` to 0 off the members, `[tokens]`, at least float32.

    Selecting comes before any arithmetic: NaN and infinities off the members reach neither the result nor the gradient.
    """
    return torch.where(members, values if values.dtype == torch.float64 else values.float(), 0.0)


def weighted(inputs: LossInputs, members: Tensor, loss: Tensor) -> Tensor:
    """Multiply the loss of each token by its weight, `[tokens]`. It must be finite off the members and is 0 there."""
    weights = members.to(loss.dtype) if inputs.loss_weights is None else select(members, inputs.loss_weights)
    return loss * weights


def importance_weighted(factor: Tensor, log_ratio: Tensor, keep: Tensor, delta: float | None = None) -> Tensor:
    """Compute `factor * min(rho, delta)` on `keep`, else 0, `[tokens]`; rho = exp(log_ratio), delta None = no clip.

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
    """Compute rho - log rho - 1 (k3, an estimate of the KL), float64 `[tokens]`: float32 is noise at rho = 1."""
    log_ratio = log_ratio.detach().double()
    return torch.expm1(log_ratio) - log_ratio


def add_metric(metrics: Metrics, name: str, total: Tensor | float, count: Tensor | float) -> None:
    """Add a sum and a count to those that `name` has; of a name that ends in `/max` keep the largest value."""
    before = metrics.get(name, (0.0, 0))
    if name.endswith("/max"):
        metrics[name] = (max(before[0], total), 1)
    else:
        metrics[name] = (before[0] + total, before[1] + count)


def per_token(numbers: Sequence[int], sequence_lengths: Sequence[int], device: torch.device) -> Tensor:
    """Give each token the number of its sequence, int64 `[tokens]`."""
    # With a dtype, since a dummy row has no sequences and an empty list would be float.
    values, lengths = (torch.tensor(entries, dtype=torch.int64) for entries in (numbers, sequence_lengths))
    return torch.repeat_interleave(values, lengths).to(device)


def sequence_sums(values: Tensor, sequence_lengths: Sequence[int]) -> Tensor:
    """Sum `values`, `[tokens]`, over each sequence, `[sequences]`."""
    segments = per_token(range(len(sequence_lengths)), sequence_lengths, values.device)
    return values.new_zeros(len(sequence_lengths)).index_add(0, segments, values)
