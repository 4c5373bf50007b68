"""Messages from the orchestrator to the trainer. Encoded as msgpack by msgspec, never pickled."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import msgspec

from prl.rollouts.components import Component
from prl.rollouts.inputs import ModelInput, Picture


class Streams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The optional per-token fields of the loss components: advantages, logprobs, weights; None = absent."""

    advantages: list[float] | None = None
    ref_logprobs: list[float] | None = None
    rl_weights: list[float] | None = None
    ce_weights: list[float] | None = None
    ref_kl_weights: list[float] | None = None


class Origin(msgspec.Struct, array_like=True):
    """The origin of a sample, for records and the token export."""

    task: Any
    """The task's id in its env, as JSON has it."""
    group: int
    rollout: int
    """The episode's place in its group."""
    agent: str


class Reference(msgspec.Struct, array_like=True, frozen=True):
    """The model that the `ref_kl` tokens of a sequence are compared with, and how."""

    model: str = ""
    """The trainer's model that fills `ref_logprobs`: `initial`, `ema:<decay>`, `lagged:<every>`; "" = they are shipped.
    """
    divergence: str = ""
    """`reverse_kl`, `forward_kl` or `jsd` of the distributions, differentiated itself; "" = by the sampled token."""
    beta: float = 0.5
    """The reference's share in the mixture of `jsd`."""
    prefix: tuple[int, ...] = ()
    """Tokens that `model` sees in front of the sequence."""

    @property
    def comparison(self) -> "Reference":
        """Return the same for all prefixes."""
        return msgspec.structs.replace(self, prefix=())


class TrainingSample(Streams, omit_defaults=True):
    """One token sequence of a rollout. Every list is `[tokens]`; the optional fields are the keys of `STREAM_FILL`."""

    token_ids: list[int]
    mask: list[bool]
    """True on tokens that the model sampled and that train."""
    logprobs: list[float]
    """The sampler's logprobs; 0.0 off the mask."""
    temperatures: list[float]
    env_name: str
    reward: float
    loss: str = ""
    """Name of the rl loss that trains it; "" = the run's."""
    reference: Reference = Reference()
    top_ids: list[list[int]] | None = None
    """`[tokens, k]`: for a divergence from a shipped reference, its most likely tokens in each token's place."""
    top_logprobs: list[list[float]] | None = None
    """`[tokens, k]`: the reference's logprobs of `top_ids`."""
    origin: Origin | None = None
    rollout_share: float | None = None
    """`LossInputs.rollout_share` of each of its tokens; written when it is packed."""
    pictures: list[Picture] | None = None
    """The pictures in it, in their order; None = there are none."""

    @property
    def input(self) -> ModelInput:
        """Return its tokens and pictures as a model reads them."""
        return ModelInput(self.token_ids, tuple(self.pictures or ()))

    def members(self, component: Component) -> list[bool]:
        """Return the members of a component, `[tokens]`: tokens with a weight in it, measured by the sampler or not."""
        weights = getattr(self, component.stream) or [component.absent_weight] * len(self.token_ids)
        return [weight != 0 and (on or not component.on_mask) for on, weight in zip(self.mask, weights, strict=True)]

    def feeds(self, component: Component, tokens: int | None = None) -> bool:
        """Return whether any of the first `tokens` tokens (None = all) has a weight in the component."""
        if component.absent_weight == 0 and getattr(self, component.stream) is None:
            return False
        return any(self.members(component)[:tokens])


class MicroBatch(Streams, omit_defaults=True):
    """One packed row. Every per-token list is `[tokens]`; `sequence_lengths` tiles its front, the rest is padding."""

    input_ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    temperatures: list[float]
    position_ids: list[int]
    sequence_lengths: list[int]
    env_names: list[str]
    """The env of each sequence."""
    losses: list[str]
    """Name of each sequence's rl loss; "" = the run's."""
    references: list[Reference] = msgspec.field(default_factory=list)
    """The reference of each sequence; empty = `Reference()` for all."""
    top_ids: list[list[int]] | None = None
    """`TrainingSample.top_ids` of the sequences, on members of `ref_kl` alone; [] elsewhere."""
    top_logprobs: list[list[float]] | None = None
    rollout_shares: list[float] = msgspec.field(default_factory=list)
    """`TrainingSample.rollout_share` of each sequence; empty = each rollout of the update has one sequence."""
    update: int = 0
    """The optimiser step on the batch that it is for, from 0; every rank has as many rows for each."""
    origins: list[Origin | None] = msgspec.field(default_factory=list)
    """The origin of each sequence; empty = none is known."""
    pictures: list[Picture] = msgspec.field(default_factory=list)
    """The pictures of all sequences, in their order; their places are those in the row."""


def sequence_slices(sequence_lengths: Sequence[int]) -> list[slice]:
    """Return the place of each sequence in its row."""
    return [slice(*ends) for ends in pairwise(accumulate(sequence_lengths, initial=0))]


class StepBatch(msgspec.Struct):
    """The rows that one trainer rank trains on in one step."""

    step: int
    micro_batches: list[MicroBatch]
    truncated: int
    """Samples of the whole step that were cut to `seq_len`."""
    checkpoint: bool = False
    """The trainer writes its part of a checkpoint after the step."""
