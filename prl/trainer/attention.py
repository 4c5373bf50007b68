"""Attention over a token tree: each token attends to the tokens on its path, at the cost of the paths.

A row that is a tree of tokens (`prl.trainer.tree`) has each token after its path and before what branches off later, so
that what goes on from a token is a range of the row that starts with it. The row is cut into blocks of queries; the
keys of a block are the path before its first token and the block itself. Which of these are on a query's own path, its
mask says. Blocks of similar size go through one call of torch's attention. One mask over the whole row would be
quadratic in it.

Left out: layers that attend in another way than to all before or to a window (chunks, states), and attention with
sinks or capped scores, which torch's does not have. On a GPU, FlexAttention could do the same with one block mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "prl_tree"
"""Of this attention among those of transformers."""
KEY = "trainer.share_prefixes"
"""The config key that does without it."""
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
    """Made so far, by window and dtype."""

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """What is added to the scores, `[blocks, 1, queries, keys]`."""
        if (window, dtype) not in self.masks:
            query, key = self.queries[:, :, None], self.keys[:, None]
            hidden = (key > query) | (query >= self.ends[:, None])
            if window is not None:
                hidden |= self.depths[query] - self.depths[key] >= window
            self.masks[window, dtype] = torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf)[:, None]
        return self.masks[window, dtype]


@dataclass
class TokenTree:
    """How the tokens of one row attend."""

    blocks: list[Blocks]
    order: Tensor
    """int64 `[tokens]`: place of each token of the row among the queries of all blocks, their filling included."""

    @classmethod
    def of_row(cls, depths: np.ndarray, starts: Sequence[int], device: torch.device) -> Self:
        """Make it of the place of each token on its path, int64 `[tokens]`, and where in the row branches start."""
        parts = block_ranges(depths, starts)
        ends, befores = walk(depths, starts, [start for start, _ in parts])
        order = np.empty(len(depths), dtype=np.int64)
        depth = torch.from_numpy(depths).to(device)
        blocks, filled = [], 0
        for group in group_sizes([(stop - start, len(befores[start]) + stop - start) for start, stop in parts]):
            members = [parts[number] for number in group]
            first, stop = np.array(members).T[:, :, None]
            queries = np.minimum(first + np.arange((stop - first).max()), stop - 1)
            found = [np.concatenate((befores[start], np.arange(start, stop))) for start, stop in members]
            keys = np.zeros((len(found), -(-max(map(len, found)) // ALIGNED) * ALIGNED), dtype=np.int64)
            until = np.zeros_like(keys)
            for row, places in enumerate(found):
                keys[row, : len(places)], until[row, : len(places)] = places, ends[places]
            order[queries.ravel()] = filled + np.arange(queries.size)
            filled += queries.size
            places = (torch.from_numpy(each).to(device) for each in (queries, keys, until))
            blocks.append(Blocks(depth, *places))
        return cls(blocks, torch.from_numpy(order).to(device))


def walk(depths: np.ndarray, starts: Sequence[int], wanted: Sequence[int]) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """Where in the row what goes on from each token ends, int64 `[tokens]`, and the path before each wanted one.

    Args:
        depths: place of each token on its path, int64 `[tokens]`.
        starts: where in the row branches start, in order, 0 among them.
        wanted: tokens of the row, in order.
    """
    size = len(depths)
    ends, path = np.full(size, size), np.empty(int(depths.max()) + 1, dtype=np.int64)
    befores, length, left = {}, 0, list(wanted[::-1])
    for start, stop in zip(starts, [*starts[1:], size], strict=True):
        depth = int(depths[start])
        ends[path[depth:length]] = start
        length = depth + stop - start
        path[depth:length] = np.arange(start, stop)
        while left and left[-1] < stop:
            befores[left[-1]] = path[: depths[left[-1]]].copy()
            left.pop()
    return ends, befores


def block_ranges(depths: np.ndarray, starts: Sequence[int]) -> list[tuple[int, int]]:
    """Cut a row into blocks of queries, of at most `MOST`; arguments as of `walk`.

    A long branch comes in several. Short ones share a block as long as their queries meet few enough of its keys in
    vain, which are not on their paths: it takes less time than another block, with its path to be gathered again.
    """
    depth_of = depths.tolist()
    parts, start, vain = [], 0, 0
    for branch, stop in pairwise([*starts, len(depth_of)]):
        shared = depth_of[branch]
        vain += (stop - branch) * (depth_of[start] + branch - start - shared)
        if branch > start and (stop - start > MOST or vain > BLOCK + GATHER * shared):
            parts.append((start, branch))
            start, vain = branch, 0
        while stop - start > MOST:
            parts.append((start, start + MOST))
            start += MOST
    return [*parts, (start, len(depth_of))]


def group_sizes(sizes: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Numbers of the blocks that go through one call, by their count of queries and of keys.

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


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree: TokenTree | None = None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, as transformers calls it: over `tree`, or as `sdpa` does it where there is none.

    Args:
        module: the layer's attention.
        query: `[1, heads, tokens, size]`.
        key: `[1, key heads, tokens, size]`, as `value`.
        value: see `key`.
        attention_mask: for rows without a tree.
        tree: of the row.
        scaling: of the scores; None = 1 / sqrt(size).
        others: `sliding_window` is how many tokens each attends to, itself among them; None = all before.

    Returns:
        `[1, tokens, heads, size]`, and None where other implementations have weights.

    Raises ValueError for a model with a window that the layer does not tell.
    """
    if tree is None:
        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return sdpa(module, query, key, value, attention_mask, scaling=scaling, **others)
    if "sliding_window" not in others and getattr(module.config, "sliding_window", None):
        raise ValueError(f"{type(module).__name__} keeps its sliding window to itself; set {KEY}=false")
    window, grouped = others.get("sliding_window"), query.shape[1] != key.shape[1]
    if grouped and query.is_cuda:  # torch has no fast kernel there for a mask with fewer key heads
        key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (key, value))
        grouped = False
    rows = [each.transpose(1, 2)[0] for each in (query, key, value)]
    found = []
    for part in tree.blocks:
        places = (part.queries, part.keys, part.keys)
        # index_select and not an index: its backward adds up in one order whatever the number of threads.
        q, k, v = (
            each.index_select(0, place.flatten()).unflatten(0, place.shape).transpose(1, 2)
            for each, place in zip(rows, places, strict=True)
        )
        mask = part.mask(window, q.dtype)
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=grouped)
        found.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(found).index_select(0, tree.order)[None], None


def use_tree_attention(model: PreTrainedModel) -> None:
    """Have the model attend over trees, where all of its layers can; rows without a tree stay as they are."""
    config = model.config
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    if model._supports_attention_backend and layers <= {"full_attention", "sliding_attention"}:
        model.set_attn_implementation(NAME)


def can_attend_over_trees(model: PreTrainedModel) -> bool:
    """Whether `use_tree_attention` has found it able to."""
    return bool(model.config._attn_implementation == NAME)


AttentionInterface.register(NAME, tree_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
