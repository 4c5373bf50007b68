"""Attention over a token tree: each token attends to the tokens on its path, at the cost of the paths.

A row that is a tree of tokens (`prl.trainer.tree`) consists of segments: the tokens that a sequence adds to those
that it shares. The queries of a segment meet the keys of its path, from the first token of the tree to the end of the
segment. Segments of similar size go through one call of torch's attention. A path is a sequence, so all that it needs
of a mask is causality, and a window where the layer has one; one mask over the whole row would be quadratic in it.

Left out: layers that attend in another way than to all before or to a window (chunks, states), and attention with
sinks or capped scores, which torch's does not have. On a GPU, FlexAttention could do the same with one block mask: of
two tokens of a row, the later one sees the earlier where it stands in its subtree, which is a range of the row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "prl_tree"
"""Of this attention among those of transformers."""
KEY = "trainer.share_prefixes"
"""The config key that does without it."""
PIECE = 128
"""Queries of one segment that attend together: longer segments come in pieces, of which the first have fewer keys."""
ALIGNED = 16
"""Keys of a call are a multiple of this: the CPU's kernel is a fifth faster then."""
CALL = 16_384
"""Pairs of query and key that take as long as one call more, about, on a core of a CPU."""


@dataclass
class Segments:
    """Segments of similar size, which attend in one call."""

    queries: Tensor
    """int64 `[segments, queries]`: places in the row, filled up with 0."""
    keys: Tensor
    """int64 `[segments, keys]`: the places of each path, filled up with 0."""
    first: Tensor
    """int64 `[segments, 1]`: place on the path of the first query."""
    masks: dict[tuple[int | None, torch.dtype], Tensor] = field(default_factory=dict)
    """Made so far, by window and dtype."""

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """What is added to the scores, `[segments, 1, queries, keys]`."""
        if (window, dtype) not in self.masks:
            key = torch.arange(self.keys.shape[1], device=self.keys.device)
            # Padding must see something too: attention over nothing is NaN.
            query = (self.first + key[: self.queries.shape[1]]).clamp(max=len(key) - 1)[:, :, None]
            hidden = key > query
            if window is not None:
                hidden |= key <= query - window
            self.masks[window, dtype] = torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf)[:, None]
        return self.masks[window, dtype]


@dataclass
class TokenTree:
    """How the tokens of one row attend."""

    segments: list[Segments]
    order: Tensor
    """int64 `[tokens]`: place of each token of the row among the queries of all segments, their padding included."""

    @classmethod
    def of_paths(cls, paths: Sequence[Tensor], sizes: Sequence[int], device: torch.device) -> Self:
        """Make it of each path, int64 `[tokens]` of places in the row, whose last `sizes` tokens are the segment's own.

        The segments' own places are 0, 1, 2, ... from one segment to the next; a segment may have none.
        """
        pieces = [
            (path[: first + PIECE], first)
            for path, size in zip(paths, sizes, strict=True)
            for first in range(len(path) - size, len(path), PIECE)
        ]
        order = torch.empty(sum(sizes), dtype=torch.int64)
        segments, before = [], 0
        for part in group_sizes([(len(path) - first, len(path)) for path, first in pieces]):
            queries = [path[first:] for path, first in (pieces[number] for number in part)]
            placed = pad_sequence(queries, True)
            own = torch.tensor([len(each) for each in queries])[:, None] > torch.arange(placed.shape[1])
            order[placed[own]] = before + own.flatten().nonzero().squeeze(1)
            before += own.numel()
            keys = pad_sequence([pieces[number][0] for number in part], True)
            keys = pad(keys, (0, -keys.shape[1] % ALIGNED))
            first = torch.tensor([pieces[number][1] for number in part])
            segments.append(Segments(placed.to(device), keys.to(device), first[:, None].to(device)))
        return cls(segments, order.to(device))


def group_sizes(sizes: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Numbers of the segments that go through one call, by their count of queries and of keys.

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
    for part in tree.segments:
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
