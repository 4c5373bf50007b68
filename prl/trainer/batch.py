"""Micro-batches as tensors."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from prl.trainer.loss.members import weighted_tokens
from prl.wire.components import COMPONENTS
from prl.wire.messages import STREAM_FILL, MicroBatch


@dataclass
class Stack:
    """Packed rows that go through the model together: `[rows, tokens]`, and without padding `[flat tokens]`.

    The flat tokens are those of one sequence after the other, tiled by `sequence_lengths`.
    """

    input_ids: torch.Tensor
    """`[rows, tokens]`, as are the three below."""
    position_ids: torch.Tensor
    temperatures: torch.Tensor
    wanted: torch.Tensor
    """bool: tokens whose logprob is needed, the members of any loss component."""
    flat: torch.Tensor
    """`[flat tokens]`: the index of each flat token in the flattened rows."""
    mask: torch.Tensor
    """bool `[flat tokens]`."""
    logprobs: torch.Tensor
    """The sampler's, `[flat tokens]`."""
    streams: dict[str, torch.Tensor | None]
    """By name, `[flat tokens]`; None where no row has the stream."""
    sequence_lengths: list[int]
    losses: list[str]
    """Name of each sequence's rl loss."""
    origins: list[tuple[int, int]]
    """Number of each sequence's row in the shipped batch, and its place in that row."""
    previous: torch.Tensor | None = None
    """`[rows, tokens]`: index in the flattened rows of the token before; None = one place to the left."""
    attention: torch.Tensor | None = None
    """bool `[rows, 1, tokens, tokens]`: which tokens (last axis) each token attends to; None = causal within each
    sequence."""


def stacks(rows: list[MicroBatch], tokens_per_forward: int, device: torch.device) -> Iterator[Stack]:
    """Stack rows, longest first, so that rows x longest row stays within `tokens_per_forward`; one row at least."""
    order = sorted(range(len(rows)), key=lambda number: sum(rows[number].sequence_lengths), reverse=True)
    while order:
        length = max(1, sum(rows[order[0]].sequence_lengths))
        count = max(1, tokens_per_forward // length)
        yield _stack({number: rows[number] for number in order[:count]}, length, device)
        order = order[count:]


def _stack(numbered: dict[int, MicroBatch], length: int, device: torch.device) -> Stack:
    """The rows, by their number in the batch, as tensors of `length` tokens per row."""
    rows = list(numbered.values())

    def tensor(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([getattr(row, name)[:length] for row in rows], dtype=dtype)

    used = torch.tensor([sum(row.sequence_lengths) for row in rows])
    flat = (torch.arange(length)[None] < used[:, None]).flatten().nonzero().squeeze(1)
    streams = {name: _stream(rows, name, fill, length) for name, fill in STREAM_FILL.items()}
    mask = tensor("mask", torch.bool)
    wanted = torch.zeros_like(mask)
    for component in COMPONENTS.values():
        wanted |= weighted_tokens(component, mask, streams[component.stream])
    return Stack(
        input_ids=tensor("input_ids", torch.int64).to(device),
        position_ids=tensor("position_ids", torch.int64).to(device),
        temperatures=tensor("temperatures", torch.float32).to(device),
        wanted=wanted.to(device),
        flat=flat.to(device),
        mask=mask.flatten()[flat].to(device),
        logprobs=tensor("logprobs", torch.float32).flatten()[flat].to(device),
        streams={name: s if s is None else s.flatten()[flat].to(device) for name, s in streams.items()},
        sequence_lengths=[n for row in rows for n in row.sequence_lengths],
        losses=[name for row in rows for name in row.losses],
        origins=[(number, place) for number, row in numbered.items() for place in range(len(row.sequence_lengths))],
    )


def _stream(rows: list[MicroBatch], name: str, fill: float, length: int) -> torch.Tensor | None:
    """`[rows, tokens]`, or None where no row has the stream; a row without it takes its neutral value."""
    values = [getattr(row, name) for row in rows]
    if all(value is None for value in values):
        return None
    return torch.tensor([[fill] * length if value is None else value[:length] for value in values])
