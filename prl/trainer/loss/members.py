"""Members of each loss component: which tokens they are, and how many there are in a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, make_dataclass
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from prl.trainer.loss.types import are_measured
from prl.wire.components import COMPONENTS, Component

INVALID = "invalid"
"""Name of the count of tokens that are in no component only because their sampler logprob is not measured."""


class _Counts:
    if TYPE_CHECKING:

        def __init__(self, *counts: int) -> None:
            """Generated: one count per component, then `invalid`."""

    @classmethod
    def from_tensor(cls, counts: Tensor) -> Self:
        """Make it of `count_members`, summed over micro-batches and all-reduced."""
        *members, invalid = (int(count) for count in counts.tolist())
        return cls(*(max(count, 1) for count in members), invalid)


if TYPE_CHECKING:

    @dataclass(frozen=True)
    class LossCounts(_Counts):
        """The counts of the components that the project ships, for the type checker."""

        rl: int = 1
        ce: int = 1
        ref_kl: int = 1
        invalid: int = 0

else:
    LossCounts = make_dataclass(
        "LossCounts",
        [*((name, int, 1) for name in COMPONENTS), (INVALID, int, 0)],
        bases=(_Counts,),
        frozen=True,
        namespace={
            "__doc__": "Member tokens of the whole step by component, each at least 1; `invalid`: tokens that an "
            "unmeasured sampler logprob kept out.",
            "__module__": __name__,
        },
    )


@dataclass
class Members:
    """Which tokens of a row are members of what. Bool tensors, `[tokens]`."""

    of: dict[str, Tensor]
    """By component."""
    sampled: Tensor
    """Members of any component that reads the sampler's logprobs."""
    invalid: Tensor
    """Tokens that such a component lacks only because their sampler logprob is not measured."""


def weighted_tokens(component: Component, mask: Tensor, weights: Tensor | None) -> Tensor:
    """The tokens that feed a component, bool of the shape of `mask`, whatever the sampler's logprobs hold."""
    if weights is None:
        weights = torch.full_like(mask, component.absent_weight, dtype=torch.float32)
    on = weights != 0
    return on & mask.bool() if component.on_mask else on


def find_members(inference_logprobs: Tensor, loss_mask: Tensor, weights: Mapping[str, Tensor | None]) -> Members:
    """The members of every component; `weights` holds the weight streams by name, an absent one None or left out."""
    measured = are_measured(inference_logprobs)
    sampled = invalid = torch.zeros_like(measured)
    of = {}
    for component in COMPONENTS.values():
        members = weighted_tokens(component, loss_mask, weights.get(component.stream))
        if component.reads_sampler:
            invalid = invalid | (members & ~measured)
            members = members & measured
            sampled = sampled | members
        of[component.name] = members
    return Members(of, sampled, invalid)


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
    found = find_members(inference_logprobs[:tokens], loss_mask[:tokens], cut)
    return torch.stack([*(members.sum() for members in found.of.values()), found.invalid.sum()])
