"""What the orchestrator ships to the trainer. Msgpack through msgspec, never pickle."""

import msgspec

STREAM_FILL = {"advantages": 0.0, "ref_logprobs": 0.0, "rl_weights": 1.0, "ce_weights": 0.0, "ref_kl_weights": 0.0}
"""Optional per-token streams, and what an absent one means beside a neighbour that has it."""


class TrainingSample(msgspec.Struct, omit_defaults=True):
    """One token sequence that a rollout trains on. Every list is `[tokens]`."""

    token_ids: list[int]
    mask: list[bool]
    """True on tokens the model sampled and that train here."""
    logprobs: list[float]
    """The sampler's logprobs; 0.0 off the mask."""
    temperatures: list[float]
    env_name: str
    reward: float
    advantages: list[float] | None = None
    ref_logprobs: list[float] | None = None
    rl_weights: list[float] | None = None
    ce_weights: list[float] | None = None
    ref_kl_weights: list[float] | None = None


class MicroBatch(msgspec.Struct, omit_defaults=True):
    """One packed row. Every per-token list is `[tokens]`; `sequence_lengths` tiles its front, the rest is padding."""

    input_ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    temperatures: list[float]
    position_ids: list[int]
    sequence_lengths: list[int]
    env_names: list[str]
    """One per sequence."""
    advantages: list[float] | None = None
    ref_logprobs: list[float] | None = None
    rl_weights: list[float] | None = None
    ce_weights: list[float] | None = None
    ref_kl_weights: list[float] | None = None


class StepBatch(msgspec.Struct):
    """What one trainer rank trains on in one step."""

    step: int
    micro_batches: list[MicroBatch]
    truncated: int
    """Samples of the whole step that were cut to `seq_len`."""
