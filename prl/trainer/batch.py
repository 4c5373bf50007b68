"""Micro-batches as tensors: the rows of a stack go through the model together.

These are packed rows, one sequence after the other; `prl.trainer.tree.tree` has rows in which sequences share tokens.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch

from prl.losses.compute import weighted_tokens
from prl.losses.interface import per_token
from prl.rollouts.components import COMPONENTS, STREAM_FILL
from prl.rollouts.inputs import Picture
from prl.rollouts.messages import MicroBatch, Reference
from prl.trainer.divergence import Top
from prl.trainer.tree.attention import TokenTree

if TYPE_CHECKING:
    from prl.rollouts.pictures import Features


@dataclass(frozen=True)
class Stack:
    """Rows that go through the model together, `[rows, tokens]`, and the sequences in them, `[flat tokens]`.

    The flat tokens are those of one sequence after the other, tiled by `sequence_lengths`.
    """

    input_ids: torch.Tensor
    """`[rows, tokens]`."""
    position_ids: torch.Tensor
    """`[rows, tokens]`: place of each token in its sequence."""
    token_ids: torch.Tensor
    """int64 `[flat tokens]`."""
    before: torch.Tensor
    """int64 `[flat tokens]`: the index, in the flattened rows, of the token before each in its sequence, where its
    logprob comes from; -1 where a sequence starts, and where a row leaves out what nobody wants."""
    temperatures: torch.Tensor
    """`[flat tokens]`: the sampling temperature, which logits are divided by."""
    wanted: torch.Tensor
    """bool `[flat tokens]`: tokens whose logprob is needed, the members of any loss component."""
    mask: torch.Tensor
    """bool `[flat tokens]`: the loss mask."""
    logprobs: torch.Tensor
    """Logprobs by the sampler, `[flat tokens]`."""
    streams: dict[str, torch.Tensor]
    """Advantages, weights and further numbers of each token, by name, `[flat tokens]`. A stream is there if any row has
    it; the other rows have its neutral value."""
    sequence_lengths: list[int]
    references: list[Reference]
    """Reference that the `ref_kl` tokens of each sequence are compared with."""
    losses: list[str]
    """Name of each sequence's rl loss."""
    envs: list[str]
    """Name of each sequence's env."""
    origins: list[tuple[int, int]]
    """Number of each sequence's row in the shipped batch, and its place in that row."""
    top: Top | None = None
    """Likeliest tokens by references that engines serve, `[flat tokens, k]`; None where no sequence has any."""
    tree: TokenTree | None = None
    """Tree by which the tokens of the one row attend; None = causal within each sequence, as its positions say."""
    pictures: list[Picture] = field(default_factory=list)
    """Pictures of the sequences, in their order; their places count flat tokens."""
    features: "Mapping[str, Features]" = field(default_factory=dict)
    """What the model's processor made of each picture, by `Picture.features`."""

    @property
    def forward_tokens(self) -> int:
        """Tokens that go through the model, without padding."""
        return self.token_ids.numel() if self.tree is None else self.input_ids.numel()

    def tokens_of(self, sequences: Sequence[bool]) -> torch.Tensor:
        """Return the tokens of some sequences as bool `[flat tokens]`; `sequences` has a truth for each of them."""
        return per_token(sequences, self.sequence_lengths, self.token_ids.device).bool()


def stacks(rows: list[MicroBatch], tokens_per_forward: int, device: torch.device) -> Iterator[Stack]:
    """Stack rows, longest first, so that rows x longest row stays within `tokens_per_forward`; one row at least."""
    order = sorted(range(len(rows)), key=lambda number: sum(rows[number].sequence_lengths), reverse=True)
    while order:
        length = max(1, sum(rows[order[0]].sequence_lengths))
        count = max(1, tokens_per_forward // length)
        yield _stack({number: rows[number] for number in order[:count]}, length, device)
        order = order[count:]


def empty_stack(device: torch.device) -> Stack:
    """Return a stack with one token and no sequence, for a rank that has nothing to train while others do."""
    row = MicroBatch([0], [False], [0.0], [0.0], [0], sequence_lengths=[], env_names=[], losses=[])
    return _stack({0: row}, 1, device)


def _stack(numbered: dict[int, MicroBatch], length: int, device: torch.device) -> Stack:
    """Make tensors of `length` tokens per row of the rows, which have their number in the batch as key."""
    rows = list(numbered.values())

    def tensor(name: str, dtype: type, fill: float | None = None) -> torch.Tensor:
        values = [(getattr(row, name) or [fill] * length)[:length] for row in rows]
        return torch.from_numpy(np.array(values, dtype=dtype))  # in a third of the time of torch.tensor

    used = torch.tensor([[sum(row.sequence_lengths)] for row in rows])
    flat = (torch.arange(length) < used).flatten().nonzero().squeeze(1)
    streams = {
        name: tensor(name, np.float32, fill)
        for name, fill in STREAM_FILL.items()
        if any(getattr(row, name) is not None for row in rows)
    }
    input_ids, position_ids, mask = (
        tensor(name, dtype) for name, dtype in (("input_ids", np.int64), ("position_ids", np.int64), ("mask", np.bool_))
    )
    fed = [weighted_tokens(component, mask, streams.get(component.stream)) for component in COMPONENTS.values()]
    streams = {name: stream.flatten()[flat] for name, stream in streams.items()}
    lengths = [n for row in rows for n in row.sequence_lengths]
    starts = accumulate((sum(row.sequence_lengths) for row in rows), initial=0)
    # One number a sequence was shipped: here each of its tokens gets it.
    if shares := [share for row in rows for share in row.rollout_shares]:
        streams["rollout_share"] = torch.tensor(shares)[per_token(range(len(lengths)), lengths, torch.device("cpu"))]
    return Stack(
        input_ids=input_ids.to(device),
        position_ids=position_ids.to(device),
        token_ids=input_ids.flatten()[flat].to(device),
        before=torch.where(position_ids.flatten()[flat] > 0, flat - 1, -1).to(device),
        temperatures=tensor("temperatures", np.float32).flatten()[flat].to(device),
        wanted=torch.stack(fed).any(0).flatten()[flat].to(device),
        mask=mask.flatten()[flat].to(device),
        logprobs=tensor("logprobs", np.float32).flatten()[flat].to(device),
        streams={name: stream.to(device) for name, stream in streams.items()},
        sequence_lengths=lengths,
        references=[each for row in rows for each in row.references or [Reference()] * len(row.sequence_lengths)],
        top=_top(rows, length, flat, device),
        losses=[name for row in rows for name in row.losses],
        envs=[name for row in rows for name in row.env_names],
        origins=[(number, place) for number, row in numbered.items() for place in range(len(row.sequence_lengths))],
        pictures=[picture.moved(start) for row, start in zip(rows, starts, strict=False) for picture in row.pictures],
    )


def _top(rows: list[MicroBatch], length: int, flat: torch.Tensor, device: torch.device) -> Top | None:
    """Return the likeliest tokens that references have shipped with rows, at the places `flat` of them all."""
    k = max((len(ids) for row in rows for ids in row.top_ids or ()), default=0)
    if not k:
        return None
    ids = np.zeros((len(rows), length, k), dtype=np.int64)
    logprobs = np.full(ids.shape, -math.inf, dtype=np.float32)
    for number, row in enumerate(rows):
        for place, (own_ids, own_logprobs) in enumerate(zip(row.top_ids or (), row.top_logprobs or (), strict=True)):
            if own_ids:
                ids[number, place, : len(own_ids)] = own_ids
                logprobs[number, place, : len(own_ids)] = own_logprobs
    tensors = (torch.from_numpy(values).flatten(0, 1)[flat].to(device) for values in (ids, logprobs))
    return Top(*tensors)
