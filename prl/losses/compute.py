"""The loss of one packed micro-batch: L = sum over components of (sum of its loss over its members) / N.

Each N counts a component's member tokens over the whole step (all micro-batches, all ranks), so components do not
dilute each other and splitting the step into micro-batches changes nothing. The trainer sums `count_members` over its
micro-batches, all-reduces that one tensor, and passes `LossCounts.from_tensor` of it to every `compute_loss`.

The components are those of `prl.rollouts.components`. Members have a weight other than 0, are on the loss mask where
the component says so, and have a measured sampler logprob where its loss reads that. The rl component alone may use
another loss function for each sequence.

Left out: averaging over ranks. Gradients of ranks are summed (`prl.trainer.sharding`).
"""

import dataclasses
import functools
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from prl.config.build import name_of
from prl.losses.interface import (
    LossFunction,
    LossInputs,
    LossOutputs,
    Metrics,
    TokenTerms,
    add_metric,
    are_measured,
    check_shapes,
    mismatch_kl,
    per_token,
    select,
    sequence_sums,
)
from prl.losses.options import as_partial
from prl.rollouts.components import COMPONENTS, STREAM_FILL, Component
from prl.rollouts.messages import sequence_slices

TAKEN = ("mismatch_kl", "logprob_gap", "loss/", "nll", "ref_kl")
"""Beginnings of the names of metrics that are not the rl loss's. A user's own metric of such a name gets `rl/` before
it, or it would be added to prl's."""
OF_TRAINER = ("entropy", "divergence", "proximal_logprobs", "rollout_share")
"""Streams that the trainer adds to those of a micro-batch."""
Term = tuple[Component, LossFunction, Tensor]
"""A component, a loss function, and the tokens that it is computed on, bool `[tokens]`."""


@dataclass(frozen=True)
class LossCounts:
    """Member tokens of the whole step by component, each at least 1, in the order of `COMPONENTS`."""

    rl: int = 1
    ce: int = 1
    ref_kl: int = 1
    invalid: int = 0
    """Tokens that a component lacks only because their sampler logprob is not measured."""
    rl_sequences: int = 1
    """Sequences with an rl member, at least 1."""
    step: int = 1
    """Number of the training step, from 1 to `max_steps`."""
    max_steps: int = 1

    @classmethod
    def from_tensor(cls, counts: Tensor, step: int = 1, max_steps: int = 1) -> Self:
        """Make the counts of the tensor of `count_members`, summed over micro-batches and all-reduced."""
        rl, ce, ref_kl, invalid, rl_sequences = map(int, counts.tolist())
        # At least 1: a component without members has a sum of 0, which must not become NaN.
        return cls(max(rl, 1), max(ce, 1), max(ref_kl, 1), invalid, max(rl_sequences, 1), step, max_steps)


@dataclass
class TokenTreatment:
    """Labels that say how the loss treated each token of a micro-batch. `compute_loss` fills them in."""

    labels: dict[str, Tensor] = field(default_factory=dict)
    """Tokens of each label: "<component> kept", "<component> dropped" and the like, "<component>" alone where the loss
    makes no such difference, and "invalid logprob". A token has at most one label per component; no label, no loss."""
    sampled: Tensor = field(init=False)
    """Members of components that read the sampler's logprobs."""

    def add(self, component: str, members: Tensor, excluded: dict[str, Tensor] | None) -> None:
        """Label the members of a component; `excluded` is `TokenTerms.excluded`."""
        for reason, tokens in (excluded or {}).items():
            self.mark(f"{component} {reason}", members & tokens)
            # A token has one label a component: the first reason stands.
            members = members & ~tokens
        self.mark(component if excluded is None else f"{component} kept", members)

    def mark(self, label: str, tokens: Tensor) -> None:
        """Give a label to further tokens."""
        self.labels[label] = tokens | self.labels.get(label, False)


def count_members(
    *, inference_logprobs: Tensor, loss_mask: Tensor, sequence_lengths: Sequence[int], **streams: Tensor | None
) -> Tensor:
    """Count the members of each component in one micro-batch.

    Args:
        inference_logprobs, loss_mask, sequence_lengths: as in `compute_loss`.
        streams: the optional streams, as in `compute_loss`; only weights count.

    Returns:
        int64 `[components + 2]`: the counts in the order of `COMPONENTS`, `invalid` and `rl_sequences`.
    """
    required = {"inference_logprobs": inference_logprobs, "loss_mask": loss_mask}
    row = _without_padding(required | streams, sequence_lengths)
    by_component, _, invalid = _find_members(row)
    sequences = sequence_sums(by_component["rl"].long(), sequence_lengths) > 0
    return torch.stack([*(members.sum() for members in by_component.values()), invalid.sum(), sequences.sum()])


def compute_loss(
    *,
    trainer_logprobs: Tensor,
    inference_logprobs: Tensor,
    loss_mask: Tensor,
    sequence_lengths: Sequence[int],
    counts: LossCounts,
    rl_loss: LossFunction | Sequence[LossFunction] | None = None,
    ref_kl_loss: LossFunction | Sequence[LossFunction] | None = None,
    treatment: TokenTreatment | None = None,
    **streams: Tensor | None,
) -> tuple[Tensor, Metrics]:
    """Compute the loss and the metrics of one packed micro-batch. Every stream is `[tokens]`.

    Args:
        sequence_lengths: the first sum(sequence_lengths) tokens are the sequences; the rest is padding, never read.
        counts: member tokens of the whole step.
        rl_loss: the rl loss of all sequences, or a list with one for each sequence; None = `default_loss`.
        ref_kl_loss: the ref_kl loss, likewise; None = `ref_kl_loss`.
        treatment: filled with the labels of each token.
        streams: the optional streams (`advantages`, `rl_weights`, ...), `entropy`, `divergence`, `proximal_logprobs`
            and `rollout_share`, None or left out where absent.

    Returns:
        The loss, a float64 scalar, attached to the graph even without members, and metrics as (sum, count), where a
        count can be 0. Per sequence: those of the losses. Per token: `loss/<component>`, whose step mean is that term
        of L; over members of components that read the sampler, `mismatch_kl` and `logprob_gap`. No members, no key.

    Raises ValueError for a stream that does not align or is missing, and ValueError or TypeError, naming it, for a loss
    function that does not return an attached scalar in `LossOutputs`.
    """
    required = {"trainer_logprobs": trainer_logprobs, "inference_logprobs": inference_logprobs, "loss_mask": loss_mask}
    row = _without_padding(required | streams, sequence_lengths)
    by_component, sampled, invalid = _find_members(row)
    terms: list[Term] = []
    chosen = {"rl": rl_loss, "ref_kl": ref_kl_loss}
    for name, component in COMPONENTS.items():
        terms += _terms(component, chosen.get(name), by_component[name], sequence_lengths)
    *present, sampled_count = torch.stack([*(term[-1].sum() for term in terms), sampled.sum()]).tolist()  # one sync
    # All masked away: no gradient, no NaN whatever the logprobs are, yet backward has a graph to run through.
    loss = select(torch.zeros_like(loss_mask, dtype=torch.bool), trainer_logprobs).sum(dtype=torch.float64)
    metrics = _sampler_metrics(row, sampled, sampled_count) if sampled_count else {}
    for term, count in zip(terms, present, strict=True):
        if count:
            total = _run_term(*term, count, row, sequence_lengths, counts, metrics, treatment)
            loss = loss + total / getattr(counts, term[0].name)
    if treatment is not None:
        treatment.sampled = sampled
        treatment.mark("invalid logprob", invalid)
    return loss, metrics


def _without_padding(streams: Mapping[str, Tensor | None], sequence_lengths: Sequence[int]) -> dict[str, Tensor]:
    """Cut the padding off each stream that is there. Raises for a stream that is unknown or does not align."""
    known = {"trainer_logprobs", "inference_logprobs", "loss_mask", *OF_TRAINER, *STREAM_FILL}
    unknown = streams.keys() - known
    if unknown:
        raise TypeError(f"there is no keyword {min(unknown)!r}")
    present = {name: stream for name, stream in streams.items() if stream is not None}
    check_shapes(present)
    tokens, room = sum(sequence_lengths), len(present["loss_mask"])
    if tokens > room:
        raise ValueError(f"sequence_lengths sum to {tokens}, but there are only {room} tokens")
    return {name: stream[:tokens] for name, stream in present.items()}


def _terms(
    component: Component,
    losses: LossFunction | Sequence[LossFunction] | None,
    members: Tensor,
    sequence_lengths: Sequence[int],
) -> list[Term]:
    """The terms of a component: one for each different function among the losses of its sequences."""
    losses = pkgutil.resolve_name(component.loss) if losses is None else losses
    if callable(losses):
        return [(component, losses, members)]
    if len(losses) != len(sequence_lengths):
        raise ValueError(f"{component.name}_loss has {len(losses)} functions for {len(sequence_lengths)} sequences")
    # A term for each function, not for each sequence: it runs once over the row.
    distinct = list(dict.fromkeys(losses))
    of_token = per_token([distinct.index(function) for function in losses], sequence_lengths, members.device)
    return [(component, function, members & (of_token == number)) for number, function in enumerate(distinct)]


def _run_term(
    component: Component,
    function: LossFunction,
    members: Tensor,
    count: int,
    row: dict[str, Tensor],
    sequence_lengths: Sequence[int],
    counts: LossCounts,
    metrics: Metrics,
    treatment: TokenTreatment | None,
) -> Tensor:
    """Sum one term over its `count` members. Its metrics and labels are added to those of the row."""
    if component.requires is not None and component.requires not in row:
        raise ValueError(
            f"{count} tokens feed the {component.name} loss, but the micro-batch has no {component.requires}: "
            f"{component.provider}"
        )
    total, own, excluded = run_loss(function, _inputs(row, members, component, counts), sequence_lengths)
    add_metric(metrics, f"loss/{component.name}", total.detach(), count)
    for key, pair in own.items():
        taken = component.name == "rl" and key.startswith(TAKEN)
        add_metric(metrics, f"rl/{key}" if taken else key, *pair)
    if treatment is not None:
        treatment.add(component.name, members, excluded)
    return total


def normalised(terms: TokenTerms, inputs: LossInputs) -> Tensor:
    """The loss of each token, `[tokens]`, so scaled that the sum over all tokens / N is the mean of its `agg_mode`.

    This is the one place that knows how a loss is averaged. With N member tokens in S sequences over the whole update,
    all envs and ranks, and n of them in one sequence, the component's term of L is, by `agg_mode`:

    - `token_mean`: the sum over tokens / N. Source: DAPO (arXiv 2503.14476).
    - `sequence_mean`: the sum over sequences of (the sum over its tokens / n), / S. Source: GRPO (arXiv 2402.03300).
    - `rollout_mean`: the same with all sequences of a rollout as one: a history that broke counts once.
    - `constant`: the sum over tokens / (`constant_length` * S). Source: Dr. GRPO (arXiv 2503.20783).

    N and S count the tokens and sequences of all rl losses of the update, whatever their `agg_mode`. So each sequence
    counts as if the whole update had its mode, and envs with different modes do not change each other's gradient.

    Raises ValueError for another mode, and for `constant` without its length.
    """
    loss, mode = terms.loss, terms.agg_mode
    if mode == "token_mean":
        return loss
    if mode == "rollout_mean" and inputs.rollout_share is not None:
        # `compute_loss` divides by N, which the N of `mean_length` cancels: 1 / (R * n) remains.
        return loss * (inputs.mean_length * inputs.rollout_share.to(loss.dtype))
    if mode in ("sequence_mean", "rollout_mean"):  # without shares each rollout is one sequence
        # Tokens that a correction left out still count in n, as they do in N.
        members = inputs.members(sampler=True)
        return loss * (inputs.mean_length / inputs.sequence_sum(members.to(loss.dtype)).clamp_min(1))
    if mode == "constant" and terms.constant_length is not None:
        return loss * (inputs.mean_length / terms.constant_length)
    raise ValueError(f"agg_mode={mode!r} with constant_length={terms.constant_length}: only constant needs one")


def summed(terms: TokenTerms, inputs: LossInputs) -> LossOutputs:
    """Return what a `@tokenwise` loss returns for one sequence.

    A metric of a sequence is the mean over its tokens, or, if its name ends in `/max`, the largest. Where there is none
    to average over it is 0.0 here, so that every key is always there; `compute_loss` leaves the sequence out of the
    mean over sequences, so that it does not dilute the others.
    """
    loss = normalised(terms, inputs)
    means = _sequence_means(terms.metrics, [len(loss)])
    metrics = {name: torch.as_tensor(total / max(count, 1)).to(loss.dtype) for name, (total, count) in means.items()}
    return LossOutputs(loss.sum(), metrics)


def run_loss(
    fn: LossFunction, inputs: LossInputs, sequence_lengths: Sequence[int]
) -> tuple[Tensor, Metrics, dict[str, Tensor] | None]:
    """Run `fn` on a row without padding; `inputs.loss_mask` must have at least one member.

    A loss that is not `@tokenwise` gets one sequence at a time, and only sequences with members.

    Returns:
        The sum over the members, a float64 scalar; the metrics as (sum, count) over sequences; and
        `TokenTerms.excluded`, None for a loss that runs sequence by sequence.
    """
    bound = as_partial(fn)
    marked: Any = bound.func
    # A partial with positional arguments is the user's own: only a call tells what they mean.
    if hasattr(marked, "formula") and not bound.args:
        row = dataclasses.replace(inputs, sequence_lengths=sequence_lengths)
        terms: TokenTerms = marked.formula(row, marked.Config(**bound.keywords))
        # In float64, so that the cut of a step into micro-batches hardly shows in the sum.
        total = normalised(terms, row).sum(dtype=torch.float64)
        return total, _sequence_means(terms.metrics, sequence_lengths), terms.excluded
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


def _inputs(row: dict[str, Tensor], members: Tensor, component: Component, counts: LossCounts) -> LossInputs:
    """Return the inputs of one component's loss: its members are the mask.

    Every stream is 0.0 off the members, so that a custom loss may exponentiate before it masks.
    """
    unread = {"loss_mask", *(other.stream for other in COMPONENTS.values() if other is not component)}
    present: dict[str, Any] = {name: select(members, stream) for name, stream in row.items() if name not in unread}
    weights = present.pop(component.stream, None)
    return LossInputs(
        **present,
        loss_mask=members,
        loss_weights=weights,
        mean_length=counts.rl / counts.rl_sequences if component.name == "rl" else 1.0,
        step=counts.step,
        max_steps=counts.max_steps,
    )


@torch.no_grad()
def _sampler_metrics(row: dict[str, Tensor], sampled: Tensor, count: int) -> Metrics:
    """Measure the distance of the policy from the sampler on the `count` tokens of `sampled`."""
    gap = select(sampled, row["trainer_logprobs"]) - select(sampled, row["inference_logprobs"])
    return {"mismatch_kl": (mismatch_kl(gap).sum(), count), "logprob_gap": (gap.abs().double().sum(), count)}


def weighted_tokens(component: Component, mask: Tensor, weights: Tensor | None) -> Tensor:
    """Return the tokens with a weight in a component, whether or not the sampler measured them.

    Args:
        component: the loss component.
        mask: the loss mask, bool `[tokens]`.
        weights: the component's stream, `[tokens]`; None = absent, so that each token has `absent_weight`.

    Returns:
        bool `[tokens]`.
    """
    on = torch.full_like(mask, component.absent_weight != 0) if weights is None else weights != 0
    return on & mask.bool() if component.on_mask else on.bool()


def _find_members(row: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return which tokens of a row are members of what.

    Returns three times bool `[tokens]`: the members by component; those of any component that reads the sampler's
    logprobs; the tokens that such a component lacks only because their sampler logprob is not measured.
    """
    fed = {name: weighted_tokens(part, row["loss_mask"], row.get(part.stream)) for name, part in COMPONENTS.items()}
    reading = [name for name, component in COMPONENTS.items() if component.reads_sampler]
    wanted = torch.stack([fed[name] for name in reading]).any(0)
    measured = are_measured(row["inference_logprobs"])
    return fed | {name: fed[name] & measured for name in reading}, wanted & measured, wanted & ~measured


@torch.no_grad()
def _sequence_means(metrics: dict[str, tuple[Tensor, Tensor]], sequence_lengths: Sequence[int]) -> Metrics:
    """Average each metric inside each sequence with tokens for it, and sum the means; of `/max` take the largest."""
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
    """Return `out`. Raises where the loss function `name` does not keep to its contract."""
    if not isinstance(out, LossOutputs):
        raise TypeError(f"{name} must return LossOutputs(loss, metrics), not {type(out).__name__}")
    if not isinstance(out.loss, Tensor):
        raise TypeError(f"{name} must return a tensor as its loss, not {type(out.loss).__name__}")
    if out.loss.dim():
        raise ValueError(f"{name} must return a scalar loss, a sum over the sequence, not {list(out.loss.shape)}")
    if not out.loss.requires_grad:
        raise ValueError(f"{name} returned a loss without gradient: compute it from inputs.trainer_logprobs")
    return out
