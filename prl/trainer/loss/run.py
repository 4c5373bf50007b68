"""Run one loss function over a packed row: at once if it is written token by token, else sequence by sequence."""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from prl.trainer.loss.types import LossInputs, LossOutputs, TokenTerms
from prl.trainer.metrics import Metrics, add_metric
from prl.wire.messages import sequence_slices

LossFunction = Callable[[LossInputs], LossOutputs]


def run_loss(
    fn: LossFunction, inputs: LossInputs, sequence_lengths: Sequence[int]
) -> tuple[Tensor, Metrics, dict[str, Tensor] | None]:
    """Run `fn` on a row without padding; `inputs.loss_mask` must have at least one member.

    A loss that is not `@tokenwise` gets one sequence at a time, and only sequences with members.

    Returns:
        The sum over the members, a scalar; the metrics as (sum, count) over sequences; and `TokenTerms.excluded`, None
        for a loss that runs sequence by sequence.
    """
    inner, knobs = (fn.func, fn.keywords) if isinstance(fn, functools.partial) and not fn.args else (fn, {})
    if not hasattr(inner, "terms"):
        return *_run_per_sequence(fn, inputs, sequence_lengths), None
    out: TokenTerms = inner.terms(inputs, **knobs)
    return out.loss.sum(), _sequence_means(out.metrics, sequence_lengths), out.excluded


def per_token(numbers: Sequence[int], sequence_lengths: Sequence[int], device: torch.device) -> Tensor:
    """The number of its sequence for each token, int64 `[tokens]`."""
    values, lengths = (torch.tensor(entries, dtype=torch.int64) for entries in (numbers, sequence_lengths))
    return torch.repeat_interleave(values, lengths).to(device)


@torch.no_grad()
def _sequence_means(metrics: dict[str, tuple[Tensor, Tensor]], sequence_lengths: Sequence[int]) -> Metrics:
    """`TokenTerms.metrics`, averaged inside each sequence that has tokens for it, then summed."""
    if not metrics:
        return {}
    over = torch.stack([over for _, over in metrics.values()])  # [metrics, tokens]
    values = torch.stack([values.double() for values, _ in metrics.values()])
    segments = per_token(range(len(sequence_lengths)), sequence_lengths, over.device)
    rows = torch.zeros(2, len(over), len(sequence_lengths), dtype=torch.float64, device=over.device)
    rows.index_add_(2, segments, torch.stack([torch.where(over, values, 0.0), over.double()]))
    sums, sizes = rows  # [metrics, sequences]
    means = (sums / sizes.clamp_min(1)).sum(1)
    return {name: (means[m], having) for m, (name, having) in enumerate(zip(metrics, (sizes > 0).sum(1), strict=True))}


def _run_per_sequence(fn: LossFunction, inputs: LossInputs, sequence_lengths: Sequence[int]) -> tuple[Tensor, Metrics]:
    """Run a custom loss on each sequence that has members."""
    losses: list[Tensor] = []
    metrics: Metrics = {}
    for sequence in map(inputs.part, sequence_slices(sequence_lengths)):
        if not sequence.loss_mask.any():
            continue
        out = _checked(fn, fn(sequence), attached=sequence.trainer_logprobs.requires_grad)
        losses.append(out.loss)
        for name, value in out.metrics.items():
            value = torch.as_tensor(value).detach().double()
            if value.dim():
                raise ValueError(f"{_name(fn)} returned metric {name!r} of shape {list(value.shape)}, not a scalar")
            add_metric(metrics, name, value, 1)
    return functools.reduce(torch.add, losses), metrics


def _checked(fn: LossFunction, out: object, *, attached: bool) -> LossOutputs:
    """`out` as LossOutputs. Raises where a loss function does not keep to its contract, naming it."""
    if not isinstance(out, LossOutputs):
        raise TypeError(f"{_name(fn)} must return LossOutputs(loss, metrics), not {type(out).__name__}")
    if not isinstance(out.loss, Tensor):
        raise TypeError(f"{_name(fn)} must return a tensor as its loss, not {type(out.loss).__name__}")
    if out.loss.dim():
        raise ValueError(f"{_name(fn)} must return a scalar loss, a sum over the sequence, not {list(out.loss.shape)}")
    if attached and not out.loss.requires_grad:
        raise ValueError(f"{_name(fn)} returned a loss without gradient: compute it from inputs.trainer_logprobs")
    return out


def _name(fn: LossFunction) -> str:
    fn = fn.func if isinstance(fn, functools.partial) else fn
    target = fn if hasattr(fn, "__qualname__") else type(fn)
    return f"{target.__module__}.{target.__qualname__}"
