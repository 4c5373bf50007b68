"""Members of each loss component: which tokens they are, and how many there are in a step."""

from collections.abc import Mapping, Sequence
from dataclasses import make_dataclass
from typing import Self

import torch
from torch import Tensor

from prl.trainer.loss.types import are_measured
from prl.wire.components import COMPONENTS, Component

Counts = make_dataclass("Counts", [*((name, int, 1) for name in COMPONENTS), ("invalid", int, 0)], frozen=True)


class LossCounts(Counts):  # type: ignore[misc, valid-type]  # its fields follow from the table
    """Member tokens of the whole step by component, each at least 1; `invalid`: those without a measured logprob.

    An invalid token is in no component that reads the sampler's logprobs, for that reason alone.
    """

    @classmethod
    def from_tensor(cls, counts: Tensor) -> Self:
        """Make it of `count_members`, summed over micro-batches and all-reduced."""
        *members, invalid = map(int, counts.tolist())
        return cls(*(max(count, 1) for count in members), invalid)


def weighted_tokens(component: Component, mask: Tensor, weights: Tensor | None) -> Tensor:
    """The tokens that feed a component, bool of the shape of `mask`, whatever the sampler's logprobs hold."""
    on = torch.full_like(mask, component.absent_weight != 0) if weights is None else weights != 0
    return on & mask.bool() if component.on_mask else on.bool()


def find_members(
    inference_logprobs: Tensor, loss_mask: Tensor, weights: Mapping[str, Tensor | None]
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Which tokens are members of what; `weights` holds the weight streams by name, an absent one None or left out.

    Returns three times bool `[tokens]`: the members by component; those of any component that reads the sampler's
    logprobs; the tokens that such a component lacks only because their sampler logprob is not measured.
    """
    measured = are_measured(inference_logprobs)
    sampled = invalid = torch.zeros_like(measured)
    found = {}
    for component in COMPONENTS.values():
        members = weighted_tokens(component, loss_mask, weights.get(component.stream))
        if component.reads_sampler:
            invalid = invalid | (members & ~measured)
            members = members & measured
            sampled = sampled | members
        found[component.name] = members
    return found, sampled, invalid


def count_members(
    *,
    inference_logprobs: Tensor,
    loss_mask: Tensor,
    sequence_lengths: Sequence[int] | None = None,
    **weights: Tensor | None,
) -> Tensor:
    """Count the members of each component in one micro-batch.

    Args:
        inference_logprobs, loss_mask: `[tokens]`, as in `compute_loss`.
        sequence_lengths: cuts padding off. Padding counts nothing in any case if its mask and weights are 0.
        weights: the weight streams, `<component>_weights`, `[tokens]`; an absent one None or left out.

    Returns:
        int64 `[components + 1]`: the counts in the order of `COMPONENTS`, `invalid` last.
    """
    if unknown := set(weights) - {component.stream for component in COMPONENTS.values()}:
        raise TypeError(f"count_members has no weight stream {min(unknown)!r}")
    tokens = len(loss_mask) if sequence_lengths is None else sum(sequence_lengths)
    cut = {name: None if stream is None else stream[:tokens] for name, stream in weights.items()}
    found, _, invalid = find_members(inference_logprobs[:tokens], loss_mask[:tokens], cut)
    return torch.stack([*(members.sum() for members in found.values()), invalid.sum()])
