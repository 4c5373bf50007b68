"""The components of the training loss, one table entry each.

L = sum over components of (sum of the component's loss over its member tokens) / (number of its member tokens). The
neutral values of packing, membership, the normaliser and the token export follow from the table. A new
component is an entry here, a loss function, and its fields in `prl.rollouts.messages.Streams` and `LossCounts`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Component:
    """One term of the loss: which tokens are its members, and what is computed on them."""

    name: str
    loss: str
    """Dotted path of its loss function, `fn(inputs: LossInputs) -> LossOutputs`, called once per sequence."""
    absent_weight: float = 0.0
    """Weight of every token of a sample that lacks the weight stream."""
    on_mask: bool = False
    """Members must be on the loss mask; otherwise a non-zero weight is enough."""
    reads_sampler: bool = False
    """Its loss reads the sampler's logprobs, so a token without a measured one is no member."""
    requires: str | None = None
    """The per-token stream that its loss reads; None = none."""
    provider: str = ""
    """Who provides that stream, as the end of the sentence that refuses a sample without it."""

    @property
    def stream(self) -> str:
        """Name of the stream that holds its weight per token."""
        return f"{self.name}_weights"


COMPONENTS: dict[str, Component] = {
    "rl": Component(
        name="rl",
        loss="prl.losses.rl.default_loss",
        absent_weight=1.0,
        on_mask=True,
        reads_sampler=True,
        requires="advantages",
        provider="its algorithm must call rollout.assign_advantages, or declare another action_loss_type",
    ),
    "ce": Component(name="ce", loss="prl.losses.ce.ce_loss"),
    "ref_kl": Component(
        name="ref_kl",
        loss="prl.losses.ref_kl.ref_kl_loss",
        reads_sampler=True,
        requires="ref_logprobs",
        provider="its algorithm must score a reference model, as opd and opsd do",
    ),
}
"""Components by name, in the order in which their terms are added and their counts are stored."""

STREAM_FILL: dict[str, float] = {
    **{component.requires: 0.0 for component in COMPONENTS.values() if component.requires is not None},
    **{component.stream: component.absent_weight for component in COMPONENTS.values()},
}
"""Optional per-token streams of a message, and what an absent one means beside a neighbour that has it."""
