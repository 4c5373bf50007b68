"""Micro-batches as tensors."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from prl.wire import STREAM_FILL, MicroBatch


@dataclass
class Stack:
    """Packed rows that go through the model together.

    `input_ids`, `position_ids`, `temperatures` and `wanted` are `[rows, tokens]`; `wanted` marks tokens whose logprob
    is needed. `flat` picks the tokens that are not padding, row after row, and the per-token fields below it are
    already picked: `[flat tokens]`, tiled by `sequence_lengths`.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    temperatures: torch.Tensor
    wanted: torch.Tensor
    flat: torch.Tensor
    mask: torch.Tensor
    logprobs: torch.Tensor
    streams: dict[str, torch.Tensor | None]
    sequence_lengths: list[int]
    origins: list[tuple[int, int]]
    """Of each sequence: which of the shipped rows it is in, and its place there."""
    previous: torch.Tensor | None = None
    """`[rows, tokens]`: where in the flattened rows the token before stands; None = one place to the left."""
    attention: torch.Tensor | None = None
    """bool `[rows, 1, tokens, tokens]`, who sees whom; None = causal within each sequence."""


def stacks(rows: list[MicroBatch], tokens_per_forward: int, device: torch.device) -> Iterator[Stack]:
    """Group rows, longest first, so that rows x longest row stays within `tokens_per_forward` (one row at least)."""
    order = sorted(range(len(rows)), key=lambda number: sum(rows[number].sequence_lengths), reverse=True)
    while order:
        length = max(1, sum(rows[order[0]].sequence_lengths))
        count = max(1, tokens_per_forward // length)
        yield _stack({number: rows[number] for number in order[:count]}, length, device)
        order = order[count:]


def _stack(numbered: dict[int, MicroBatch], length: int, device: torch.device) -> Stack:
    rows = list(numbered.values())

    def tensor(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([getattr(row, name)[:length] for row in rows], dtype=dtype)

    used = torch.tensor([sum(row.sequence_lengths) for row in rows])
    flat = (torch.arange(length)[None] < used[:, None]).flatten().nonzero().squeeze(1)
    streams = {name: _stream(rows, name, fill, length) for name, fill in STREAM_FILL.items()}
    mask = tensor("mask", torch.bool)
    # The rl weights only narrow the mask: where they are absent they stand as 1.0, on prompts too.
    wanted = mask if streams["rl_weights"] is None else mask & (streams["rl_weights"] != 0)
    for name in ("ce_weights", "ref_kl_weights"):
        if streams[name] is not None:
            wanted = wanted | (streams[name] != 0)
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
        origins=[(number, place) for number, row in numbered.items() for place in range(len(row.sequence_lengths))],
    )


def _stream(rows: list[MicroBatch], name: str, fill: float, length: int) -> torch.Tensor | None:
    """`[rows, tokens]`, or None where no row has the stream; a row without it takes its neutral value."""
    values = [getattr(row, name) for row in rows]
    if all(value is None for value in values):
        return None
    return torch.tensor([[fill] * length if value is None else value[:length] for value in values])
