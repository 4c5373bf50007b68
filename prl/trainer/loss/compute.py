"""The loss of one packed micro-batch: L = sum over components of (sum of its loss over its members) / N.

Each N counts a component's member tokens over the whole step (all micro-batches, all ranks), so components do not
dilute each other and splitting the step into micro-batches changes nothing. The trainer sums `count_members` over its
micro-batches, all-reduces that one tensor, and passes `LossCounts.from_tensor` of it to every `compute_loss`.

The components are those of `prl.wire.components`. Members have a weight other than 0, are on the loss mask where the
component says so, and have a measured sampler logprob where its loss reads that. The rl component alone may use another
loss function for each sequence.

Left out: averaging over ranks. Where the wrapper averages gradients (FSDP does), multiply the loss by the world size.
"""

import functools
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from prl.trainer.loss.members import LossCounts, Members, find_members
from prl.trainer.loss.run import LossFunction, Metrics, add_metric, run_loss, segments_of
from prl.trainer.loss.types import LossInputs, check_shapes, mismatch_kl, select
from prl.wire.components import COMPONENTS, Component
from prl.wire.messages import STREAM_FILL

SAMPLER_METRICS = frozenset({"mismatch_kl", "logprob_gap"})


@dataclass
class TokenFates:
    """What the loss did with each token of a micro-batch, for `compute_loss` to fill in. Bool tensors, `[tokens]`."""

    labels: dict[str, Tensor] = field(default_factory=dict)
    """By label: "<component> kept", "<component> dropped" and the like, "<component>" alone where the loss makes no
    such difference, and "invalid logprob". A token has at most one label per component; no label, no loss."""
    sampled: Tensor | None = None
    """Members of components that read the sampler's logprobs."""

    def add(self, component: str, members: Tensor, excluded: dict[str, Tensor] | None) -> None:
        """Label the members of a component; `excluded` is `TokenTerms.excluded`."""
        for reason, tokens in (excluded or {}).items():
            self.mark(f"{component} {reason}", members & tokens)
            members = members & ~tokens
        self.mark(component if excluded is None else f"{component} kept", members)

    def mark(self, label: str, tokens: Tensor) -> None:
        """Give `tokens` a label, beside those that have it."""
        self.labels[label] = tokens | self.labels[label] if label in self.labels else tokens


@dataclass
class _Row:
    """A packed row without its padding."""

    trainer: Tensor
    """Logprobs of the policy, `[tokens]`."""
    sampler: Tensor
    """Logprobs of the sampler, `[tokens]`."""
    mask: Tensor
    """`[tokens]`."""
    streams: dict[str, Tensor | None]
    """The optional streams by name, `[tokens]`; an absent one is None."""
    lengths: Sequence[int]
    segments: Tensor
    """Number of the sequence that each token belongs to, int64 `[tokens]`."""

    @classmethod
    def of(
        cls, trainer: Tensor, sampler: Tensor, mask: Tensor, streams: dict[str, Tensor | None], lengths: Sequence[int]
    ) -> "_Row":
        """Cut the padding off. Raises ValueError, naming it, for a stream that does not align."""
        if trainer.dim() != 1:
            raise ValueError(f"trainer_logprobs must be 1-D [tokens], got shape {list(trainer.shape)}")
        check_shapes(trainer, {"inference_logprobs": sampler, "loss_mask": mask, **streams})
        if (tokens := sum(lengths)) > len(trainer):
            raise ValueError(f"sequence_lengths sum to {tokens}, but there are only {len(trainer)} tokens")
        cut = {name: None if stream is None else stream[:tokens] for name, stream in streams.items()}
        segments = segments_of(lengths, trainer.device)
        return cls(trainer[:tokens], sampler[:tokens], mask[:tokens], cut, lengths, segments)

    def inputs(self, members: Tensor, component: Component) -> LossInputs:
        """The row as one component sees it: its members as the mask, and every stream 0.0 off them.

        So a custom loss may exponentiate before it masks.
        """
        weights = {other.stream for other in COMPONENTS.values()}
        present = {
            name: select(members, stream)
            for name, stream in self.streams.items()
            if stream is not None and (name not in weights or name == component.stream)
        }
        return LossInputs(
            trainer_logprobs=select(members, self.trainer),
            inference_logprobs=select(members, self.sampler),
            ref_logprobs=present.pop("ref_logprobs", None),
            advantages=present.pop("advantages", None),
            loss_mask=members,
            loss_weights=present.pop(component.stream, None),
            streams=present,
        )


@dataclass
class _Term:
    """One loss function and the tokens of the row that it is computed on, bool `[tokens]`."""

    component: Component
    loss: LossFunction
    members: Tensor


def compute_loss(
    *,
    trainer_logprobs: Tensor,
    inference_logprobs: Tensor,
    loss_mask: Tensor,
    sequence_lengths: Sequence[int],
    counts: LossCounts,
    rl_loss: LossFunction | Sequence[LossFunction] | None = None,
    fates: TokenFates | None = None,
    **keywords: Any,
) -> tuple[Tensor, Metrics]:
    """Loss and metrics of one packed micro-batch. Every stream is `[tokens]`.

    Args:
        sequence_lengths: the first sum(sequence_lengths) tokens are the sequences; the rest is padding, never read.
        counts: member tokens of the whole step.
        rl_loss: the rl loss of all sequences, or a list with that of each; None = `default_loss`.
        fates: filled with what became of each token.
        keywords: the optional streams (`advantages`, `rl_weights`, ...), None or left out where absent, and
            `<component>_loss`, a loss function in place of the table's.

    Returns:
        The scalar loss, attached to the graph even without members, and metrics as (sum, count), where a count can be
        0. Per sequence: those of the losses. Per token: `loss/<component>`, whose step mean is that term of L; over
        members of components that read the sampler, `mismatch_kl` and `logprob_gap`. No members, no key.

    Raises ValueError for a stream that does not align or is missing, and ValueError or TypeError, naming it, for a loss
    function that does not return an attached scalar in `LossOutputs`.
    """
    streams, losses = _split(keywords)
    row = _Row.of(trainer_logprobs, inference_logprobs, loss_mask, streams, sequence_lengths)
    found = find_members(row.sampler, row.mask, row.streams)
    terms = _terms(found, losses if rl_loss is None else losses | {"rl": rl_loss}, row)
    *present, sampled = torch.stack([*(term.members.sum() for term in terms), found.sampled.sum()]).tolist()  # one sync
    # All masked away: no gradient, no NaN whatever the logprobs hold, yet backward has a graph to run through.
    loss = select(torch.zeros_like(loss_mask, dtype=torch.bool), trainer_logprobs).sum()
    metrics: Metrics = {}
    for term, count in zip(terms, present, strict=True):
        if count:
            total = _run_term(term, count, row, metrics, fates)
            loss = loss + total / getattr(counts, term.component.name)
    if sampled:
        metrics |= _sampler_metrics(row, found.sampled, sampled)
    if fates is not None:
        fates.sampled = found.sampled
        fates.mark("invalid logprob", found.invalid)
    return loss, metrics


def _split(keywords: Mapping[str, Any]) -> tuple[dict[str, Tensor | None], dict[str, LossFunction]]:
    """The streams, and the loss functions by component, among the keywords of `compute_loss`."""
    streams = {name: keywords.get(name) for name in STREAM_FILL}
    functions = {f"{name}_loss": name for name in COMPONENTS}
    if unknown := set(keywords) - set(streams) - set(functions):
        raise TypeError(f"compute_loss has no keyword {min(unknown)!r}")
    return streams, {functions[name]: value for name, value in keywords.items() if name in functions}


def _terms(found: Members, losses: Mapping[str, LossFunction | Sequence[LossFunction]], row: _Row) -> list[_Term]:
    """The terms of the row's loss, in the order of the table: one per component, or per function of its sequences."""
    terms = []
    for name, component in COMPONENTS.items():
        chosen = losses[name] if name in losses else table_loss(name)
        if callable(chosen):
            terms.append(_Term(component, chosen, found.of[name]))
            continue
        if len(chosen) != len(row.lengths):
            raise ValueError(f"{name}_loss has {len(chosen)} functions for {len(row.lengths)} sequences")
        distinct = {id(function): function for function in chosen}
        numbers = {key: number for number, key in enumerate(distinct)}
        of_token = torch.tensor([numbers[id(function)] for function in chosen], dtype=torch.int64)
        of_token = of_token.to(row.segments.device)[row.segments]
        for number, function in enumerate(distinct.values()):
            terms.append(_Term(component, function, found.of[name] & (of_token == number)))
    return terms


@functools.cache
def table_loss(component: str) -> LossFunction:
    """The loss function that the table names for a component."""
    loss: LossFunction = pkgutil.resolve_name(COMPONENTS[component].loss)
    return loss


def _run_term(term: _Term, count: int, row: _Row, metrics: Metrics, fates: TokenFates | None) -> Tensor:
    """The sum of one term over its `count` members; its metrics and fates are added to those of the row."""
    component = term.component
    if component.requires is not None and row.streams[component.requires] is None:
        raise ValueError(
            f"{count} tokens feed the {component.name} loss, but the micro-batch has no {component.requires}: "
            f"{component.provider}"
        )
    out = run_loss(term.loss, row.inputs(term.members, component), row.lengths)
    add_metric(metrics, f"loss/{component.name}", out.loss.detach().double(), count)
    for key, pair in out.metrics.items():
        add_metric(metrics, f"{component.name}/{key}" if _is_taken(key, component) else key, *pair)
    if fates is not None:
        fates.add(component.name, term.members, out.excluded)
    return out.loss


def _is_taken(metric: str, by: Component) -> bool:
    """Whether a metric of `by` has the name of one that `compute_loss` or another component reports."""
    others = [component for component in COMPONENTS.values() if component is not by]
    return (
        metric in SAMPLER_METRICS
        or metric in {f"loss/{name}" for name in COMPONENTS}
        or any(metric in other.metrics or metric.startswith(f"{other.name}/") for other in others)
    )


@torch.no_grad()
def _sampler_metrics(row: _Row, sampled: Tensor, count: int) -> Metrics:
    """How far the policy is from the sampler on the `count` tokens of `sampled`."""
    gap = select(sampled, row.trainer) - select(sampled, row.sampler)
    return {"mismatch_kl": (mismatch_kl(gap).sum(), count), "logprob_gap": (gap.abs().double().sum(), count)}
