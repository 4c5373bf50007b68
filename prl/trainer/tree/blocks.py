"""Attention over a token tree on a CPU: blocks of queries, each with the keys of its path.

The row is cut into blocks of queries; the keys of a block are the path before its first token and the block itself.
Which of these are on a query's own path, is in its mask. Blocks of similar size go through one call of torch's
attention. One mask over the whole row would be quadratic in it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from prl.trainer.tree.attention import Scores, TokenTree, walk, with_sinks

MOST = 128
"""Queries of a block, at most."""
ALIGNED = 16
"""Keys of a call are a multiple of this: the CPU's kernel is a fifth faster then."""
GATHER, BLOCK, CALL = 16, 200, 16_384
"""Pairs of query and key that take as long as one more key to gather, one more block, one more call, about, on a core
of a CPU."""


@dataclass
class Blocks:
    """Blocks of similar size, which attend in one call."""

    depths: Tensor
    """int64 `[tokens]`: place of each token of the row on its path."""
    queries: Tensor
    """int64 `[blocks, queries]`: places in the row, filled up with the block's last."""
    keys: Tensor
    """int64 `[blocks, keys]`: places in the row, filled up with 0."""
    ends: Tensor
    """int64 `[blocks, keys]`: the place where what goes on from each key ends; 0 = it is filling."""
    masks: dict[tuple[int | None, torch.dtype], Tensor] = field(default_factory=dict)
    """Masks that were made so far, by window and dtype."""

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return the mask that is added to the scores, `[blocks, 1, queries, keys]`."""
        # Layers of one kind have the same mask: it is made once a forward, not once a layer.
        if (window, dtype) not in self.masks:
            query, key = self.queries[:, :, None], self.keys[:, None]
            hidden = (key > query) | (query >= self.ends[:, None])
            if window is not None:
                hidden |= self.depths[query] - self.depths[key] >= window
            self.masks[window, dtype] = torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf)[:, None]
        return self.masks[window, dtype]


@dataclass
class BlockTree(TokenTree):
    """The row in blocks of queries."""

    blocks: list[Blocks]
    order: Tensor
    """int64 `[tokens]`: place of each token of the row among the queries of all blocks, their filling included."""

    @classmethod
    def of_row(cls, depths: np.ndarray, starts: Sequence[int], device: torch.device) -> Self:
        """Make it of the place of each token on its path, int64 `[tokens]`, and where in the row branches start."""
        ranges = block_ranges(depths, starts)  # of each block of queries, in the row: first and stop
        ends, paths = walk(depths, starts, [first for first, _ in ranges])  # a path: what is before a block's first
        # Where each token of the row comes out, [tokens]: blocks attend group by group, with their filling.
        order = np.empty(len(depths), dtype=np.int64)
        come_out = 0
        blocks = list[Blocks]()
        for group in group_sizes([(stop - first, len(paths[first]) + stop - first) for first, stop in ranges]):
            members = [ranges[number] for number in group]
            queries = queries_of_blocks(members)  # [blocks, queries]
            keys, key_ends = keys_of_blocks(members, paths, ends)  # both [blocks, keys]
            # A block's last query fills it up: what comes out of the copies is that of the query itself.
            order[queries.ravel()] = come_out + np.arange(queries.size)
            come_out += queries.size
            depth, query, key, key_end = (torch.from_numpy(a).to(device) for a in (depths, queries, keys, key_ends))
            blocks.append(Blocks(depth, query, key, key_end))
        return cls(blocks, torch.from_numpy(order).to(device))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        grouped, size = query.shape[1] != key.shape[1], query.shape[3]
        scale = size**-0.5 if scores.scale is None else scores.scale
        rows = [tensor.transpose(1, 2)[0] for tensor in (query, key, value)]
        outputs = []
        for part in self.blocks:
            places = (part.queries, part.keys, part.keys)
            # index_select and not an index: its backward adds up in one order whatever the number of threads.
            q, k, v = (
                row.index_select(0, place.flatten()).unflatten(0, place.shape).transpose(1, 2)
                for row, place in zip(rows, places, strict=True)
            )
            mask = part.mask(scores.window, q.dtype)
            if scores.sinks is not None:
                q, k, v = with_sinks(q, k, v, scores.sinks, scale)
                mask = pad(mask, (0, 1))
            out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)
            outputs.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs).index_select(0, self.order)[None, ..., :size]


def queries_of_blocks(blocks: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return where queries of blocks are in the row, int64 `[blocks, queries]`; their last one fills short blocks."""
    first, stop = np.array(blocks).T[:, :, None]  # both [blocks, 1]
    longest = (stop - first).max()
    filled: np.ndarray = np.minimum(first + np.arange(longest), stop - 1)
    return filled


def keys_of_blocks(
    blocks: Sequence[tuple[int, int]], paths: Mapping[int, np.ndarray], ends: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return where keys of blocks are in the row, and where what goes on from each ends, int64 `[blocks, keys]` both.

    The keys of a block are the path before its first token and the block itself; 0 fills up, with an end of 0.
    """
    of_blocks = [np.concatenate((paths[first], np.arange(first, stop))) for first, stop in blocks]
    longest = max(map(len, of_blocks))
    keys = np.zeros((len(blocks), math.ceil(longest / ALIGNED) * ALIGNED), dtype=np.int64)
    key_ends = np.zeros_like(keys)
    for row, places in enumerate(of_blocks):
        keys[row, : len(places)] = places
        key_ends[row, : len(places)] = ends[places]
    return keys, key_ends


def block_ranges(depths: np.ndarray, starts: Sequence[int]) -> list[tuple[int, int]]:
    """Cut a row into blocks of queries, of at most `MOST`; arguments as of `walk`.

    A long branch comes in several. Short ones share a block as long as their queries meet few enough of its keys in
    vain, which are not on their paths: it takes less time than another block, with its path to be gathered again.
    """
    depth_of = depths.tolist()
    parts, start, vain = [], 0, 0
    for branch, stop in pairwise([*starts, len(depth_of)]):
        shared = depth_of[branch]
        # Queries of this branch times keys of the block that are not on their path.
        vain += (stop - branch) * (depth_of[start] + branch - start - shared)
        if branch > start and (stop - start > MOST or vain > BLOCK + GATHER * shared):
            parts.append((start, branch))
            start, vain = branch, 0
        while stop - start > MOST:
            parts.append((start, start + MOST))
            start += MOST
    return [*parts, (start, len(depth_of))]


def group_sizes(sizes: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Group the numbers of blocks that go through one call, by their count of queries and of keys.

    A group grows until its padding costs more than another call, or a third of its own work if that is more.
    """
    groups: list[list[int]] = []
    work = queries = longest = 0
    for number in sorted(range(len(sizes)), key=lambda number: sizes[number][::-1], reverse=True):
        size, length = sizes[number]
        work, queries = work + size * length, max(queries, size)
        if groups and queries * longest * (len(groups[-1]) + 1) - work <= max(CALL, work / 3):
            groups[-1].append(number)
            continue
        groups.append([number])
        work, queries, longest = size * length, size, length
    return groups
