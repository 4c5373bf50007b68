"""Run one loss function over a packed row: at once if it is written token by token, else sequence by sequence."""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prl.trainer.loss.types import LossInputs, LossOutputs, TokenTerms

LossFunction = Callable[[LossInputs], LossOutputs]
Metrics = dict[str, tuple[Tensor | float, Tensor | int]]
"""By name: sum and count, to be added up over micro-batches and ranks."""


@dataclass
class RowLoss:
    """What a loss returns for a whole row."""

    loss: Tensor
    """A scalar, the sum over the members."""
    metrics: Metrics
    """As (sum, count) over sequences."""
    excluded: dict[str, Tensor] | None = None
    """`TokenTerms.excluded`; None for a loss that runs sequence by sequence."""


def run_loss(fn: LossFunction, inputs: LossInputs, sequence_lengths: Sequence[int]) -> RowLoss:
    """Run `fn` on a row without padding; `inputs.loss_mask` must have at least one member.

    A loss that is not `@tokenwise` gets one sequence at a time, and only sequences with members.
    """
    terms = _terms_function(fn)
    if terms is not None:
        return _run_tokenwise(terms, inputs, sequence_lengths)
    return _run_per_sequence(fn, inputs, sequence_lengths)


def add_metric(metrics: Metrics, name: str, total: Tensor | float, count: Tensor | int) -> None:
    """Add a (sum, count) pair to the one that `name` has."""
    if name in metrics:
        total, count = metrics[name][0] + total, metrics[name][1] + count
    metrics[name] = (total, count)


def segments_of(sequence_lengths: Sequence[int], device: torch.device) -> Tensor:
    """Number of the sequence that each token belongs to, int64 `[tokens]`."""
    lengths = torch.tensor(sequence_lengths, dtype=torch.int64)
    return torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(device)


def _terms_function(fn: LossFunction) -> Callable[..., TokenTerms] | None:
    """The token-by-token form of a `@tokenwise` loss, with the knobs of a partial applied; None for any other loss."""
    target: Any = fn
    knobs: dict[str, Any] = {}
    if isinstance(target, functools.partial) and not target.args:
        target, knobs = target.func, target.keywords
    terms = getattr(target, "terms", None)
    return None if terms is None else functools.partial(terms, **knobs)


def _run_tokenwise(terms: Callable[..., TokenTerms], inputs: LossInputs, sequence_lengths: Sequence[int]) -> RowLoss:
    """Run the whole row at once. A metric is averaged inside each sequence that has tokens for it, then summed."""
    out = terms(inputs)
    if not out.metrics:
        return RowLoss(out.loss.sum(), {}, out.excluded)
    with torch.no_grad():
        over = torch.stack([over for _, over in out.metrics.values()])  # [metrics, tokens]
        values = torch.stack([values.double() for values, _ in out.metrics.values()])
        segments = segments_of(sequence_lengths, over.device)
        rows = torch.zeros(2, len(over), len(sequence_lengths), dtype=torch.float64, device=over.device)
        rows.index_add_(2, segments, torch.stack([torch.where(over, values, 0.0), over.double()]))
        sums, sizes = rows  # [metrics, sequences]
        means = (sums / sizes.clamp_min(1)).sum(1)
        having = (sizes > 0).sum(1)
    metrics: Metrics = {name: (means[m], having[m]) for m, name in enumerate(out.metrics)}
    return RowLoss(out.loss.sum(), metrics, out.excluded)


def _run_per_sequence(fn: LossFunction, inputs: LossInputs, sequence_lengths: Sequence[int]) -> RowLoss:
    """Run a custom loss on each sequence that has members."""
    losses: list[Tensor] = []
    metrics: Metrics = {}
    for start, end in itertools.pairwise(itertools.accumulate(sequence_lengths, initial=0)):
        sequence = inputs.part(slice(start, end))
        if not sequence.loss_mask.any():
            continue
        out = _checked(fn, fn(sequence), attached=sequence.trainer_logprobs.requires_grad)
        losses.append(out.loss)
        for name, value in out.metrics.items():
            value = torch.as_tensor(value).detach().double()
            if value.dim():
                raise ValueError(f"{_name(fn)} returned metric {name!r} of shape {list(value.shape)}, not a scalar")
            add_metric(metrics, name, value, 1)
    return RowLoss(functools.reduce(torch.add, losses), metrics)


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
