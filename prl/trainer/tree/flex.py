"""Attention over a token tree on a GPU: FlexAttention, whose kernel skips blocks of the mask that nothing is seen in.

What a token sees follows from three numbers a token: its place on its path, where in the row that which goes on from it
ends, and the first place on a path that no longer sees it. From their extremes in each block of the row follows which
pairs of blocks have nothing to see, and which need no mask. So the largest tensor has an entry for each pair of blocks,
one for 16,384 pairs of tokens, and none is made by evaluating a mask, as torch's `create_block_mask` does.

Sequences that share nothing are such a row too. Long ones of them go one by one through torch's causal attention: on a
Hopper GPU cuDNN's kernel takes half of the time there (`experiments/benchmarks/trainer.md`).
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention

from prl.trainer.tree.attention import Scores, TokenTree, walk

BLOCK = 128
"""Tokens of a block: what the kernels take at a time, at most."""
LEAST = 2 * BLOCK
"""Tokens that a shorter row is filled up to: torch compiles anew for what is 1, here tokens or blocks."""
LONG = 4096
"""Tokens that sequences have in the mean, from which on each goes alone: shorter ones take longer so."""
ROUND = 1024
"""Tokens to whose multiple such a sequence is filled up: cuDNN plans anew for each length, which takes .1 s."""
KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Kernels of torch's attention: the first that takes the tensors is used."""
NEVER = torch.iinfo(torch.int32).max
"""Place that no path has: behind all of them."""


@dataclass
class FlexTree(TokenTree):
    """The row in blocks of which pairs are seen wholly, in part, or not at all."""

    depths: Tensor
    """int32, one for each token, `LEAST` at least: place of each token of the row on its path."""
    ends: Tensor
    """int32, as many: the place where what goes on from each token ends."""
    masks: dict[int | None, BlockMask] = field(default_factory=dict)
    """Masks that were made so far, by window."""

    @classmethod
    def of_row(cls, depths: np.ndarray, starts: Sequence[int], device: torch.device) -> Self:
        """Make it of the place of each token on its path, int64 `[tokens]`, and where in the row branches start."""
        ends, _ = walk(depths, starts, [])
        filling = np.arange(len(depths), LEAST)  # tokens that see themselves and are seen by no other
        whole = np.concatenate((depths, 0 * filling)), np.concatenate((ends, filling + 1))
        depth, end = (torch.from_numpy(each.astype(np.int32)).to(device) for each in whole)
        return cls(depth, end)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        tokens = query.shape[2]
        if filling := len(self.depths) - tokens:  # laid out in memory as those of a model
            query, key, value = (
                pad(each.transpose(1, 2), (0, 0, 0, 0, 0, filling)).transpose(1, 2) for each in (query, key, value)
            )
        further = {} if scores.sinks is None else {"return_aux": AuxRequest(lse=True)}
        attended = compiled()(
            query,
            key,
            value,
            block_mask=self.mask(scores.window),
            scale=scores.scale,
            enable_gqa=query.shape[1] != key.shape[1],
            kernel_options={"BACKEND": "TRITON"},
            **further,
        )
        if scores.sinks is None:
            return attended[:, :, :tokens].transpose(1, 2)
        out, aux = attended
        # The softmax without the sink, less the share that the sink has of the sum.
        out = out * torch.sigmoid(aux.lse - scores.sinks[:, None])[..., None].to(out.dtype)
        return out[:, :, :tokens].transpose(1, 2)

    def mask(self, window: int | None) -> BlockMask:
        """Return what each token sees, with `window` tokens of its path at most, itself among them; None = all."""
        if window not in self.masks:
            until = torch.full_like(self.depths, NEVER) if window is None else self.depths + window
            self.masks[window] = block_mask(self.depths, self.ends, until)
        return self.masks[window]


@dataclass
class LongSequences(TokenTree):
    """A row of sequences that share nothing."""

    lengths: list[int]
    tree: FlexTree
    """The same row, for layers with a window or sinks."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        if scores.window is not None or scores.sinks is not None:
            return self.tree.attend(query, key, value, scores)
        split = [each.split(self.lengths, dim=2) for each in (query, key, value)]
        gqa = query.shape[1] != key.shape[1]
        attended = []
        with sdpa_kernel(KERNELS, set_priority=True):
            for queries, keys, values in zip(*split, strict=True):
                length = queries.shape[2]
                filling = (0, 0, 0, -length % ROUND)  # seen by no token of the sequence
                out = scaled_dot_product_attention(
                    pad(queries, filling),
                    pad(keys, filling),
                    pad(values, filling),
                    is_causal=True,
                    scale=scores.scale,
                    enable_gqa=gqa,
                )
                attended.append(out[:, :, :length])
        return torch.cat(attended, dim=2).transpose(1, 2)


def row_on_gpu(depths: np.ndarray, starts: Sequence[int], device: torch.device) -> TokenTree:
    """Return how a row attends, by the place of each token on its path and where in the row branches start."""
    tree = FlexTree.of_row(depths, starts, device)
    # A branch that starts deeper than 0 shares a prefix: only the tree knows it.
    if len(depths) < LONG * len(starts) or depths[list(starts)].any():
        return tree
    return LongSequences(np.diff([*starts, len(depths)]).tolist(), tree)


def block_mask(depths: Tensor, ends: Tensor, until: Tensor) -> BlockMask:
    """Make the mask of a row.

    A token sees another that is not after it, whose range in the row has not ended, and which is near enough.

    Args:
        depths: place of each token on its path, int32 `[tokens]`.
        ends: where in the row what goes on from each token ends, int32 `[tokens]`.
        until: the first place on a path that no longer sees the token, int32 `[tokens]`.
    """

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends[key]) & (depths[query] < until[key])

    tokens = len(depths)
    count = -(-tokens // BLOCK)
    # The last block is filled up with its last token, which changes no extreme.
    places = torch.arange(count * BLOCK, device=depths.device).clamp_(max=tokens - 1).view(count, BLOCK)
    block = torch.arange(count, device=depths.device)
    before, start = block[None] <= block[:, None], BLOCK * block[:, None]
    (last, deepest, furthest), (first, highest, nearest) = (
        [extreme(each[places], 1) for each in (ends, depths, until)] for extreme in (torch.amax, torch.amin)
    )
    some = before & (start < last) & (highest[:, None] < furthest)
    # Not a block with itself, whose tokens do not see those after them; and not the last, which may be a part of one.
    whole = (block[None] < block[:, None]) & (start + BLOCK <= first) & (deepest[:, None] < nearest)
    return BlockMask.from_kv_blocks(
        *ordered(some & ~whole), *ordered(whole), BLOCK_SIZE=BLOCK, mask_mod=seen, seq_lengths=(tokens, tokens)
    )


def ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many columns each row of a bool `[rows, columns]` has, and the columns, its own first."""
    numbers = blocks.int().argsort(dim=1, descending=True, stable=True)
    return blocks.sum(1)[None, None].int(), numbers[None, None].int()


@functools.cache
def compiled() -> Callable[..., Any]:
    """FlexAttention, compiled once for rows of all lengths: as it is, it would compute all pairs of tokens.

    A further form that it cannot be compiled for is an error (`fullgraph`), and does not run as it is.
    """
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)
