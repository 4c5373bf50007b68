"""Attention over a token tree: each token attends to the tokens on its path, at the cost of the paths.

A row that is a tree of tokens (`prl.trainer.tree.tree`) has each token after its path and before what branches off
later, so that what goes on from a token is a range of the row that starts with it. Two numbers a token say all of it:
its place on its path, and where that range ends. Sequences that share nothing are such a row too.

One way for each device: on a CPU blocks of queries (`prl.trainer.tree.blocks`), on a GPU FlexAttention
(`prl.trainer.tree.flex`). Neither has anything as large as tokens x tokens.

Layers may have sinks (gpt-oss): for each head a learned number, one more score in the softmax, of a key whose value
is zero. Left out: layers that attend in another way than to all before or to a window (chunks, states); scores with a
cap.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from prl.trainer.architecture import language_of

NAME = "prl_tree"
"""Name of this attention among those of transformers."""
KEY = "trainer.share_prefixes"
"""Config key that turns this attention off, on a CPU."""


@dataclass(frozen=True)
class Scores:
    """The weighing of the tokens on a path by a layer."""

    window: int | None = None
    """Tokens of its path that each attends to, itself among them; None = all."""
    scale: float | None = None
    """Factor of the scores; None = 1 / sqrt(size)."""
    sinks: Tensor | None = None
    """Score of the sink of each head, `[heads]`; None = the layer has none."""


class TokenTree(ABC):
    """The tree of the tokens of one row, by which they attend."""

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Compute the attention of one layer, `[1, tokens, heads, size]`.

        Args:
            query: `[1, heads, tokens, size]`.
            key: `[1, key heads, tokens, size]`, as `value`.
            value: see `key`.
            scores: the layer's weighing of tokens.
        """


def walk(depths: np.ndarray, starts: Sequence[int], wanted: Sequence[int]) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """Return where in the row what goes on from each token ends, int64 `[tokens]`, and the path before each wanted one.

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
        # A branch starts here: what was deeper on the path before it ends.
        ends[path[depth:length]] = start
        length = depth + stop - start
        path[depth:length] = np.arange(start, stop)
        while left and left[-1] < stop:
            befores[left[-1]] = path[: depths[left[-1]]].copy()
            left.pop()
    return ends, befores


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree: TokenTree | None = None,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of one layer, as transformers calls it: over `tree`, or as `sdpa` does it without one.

    Args:
        module: the layer's attention.
        query: `[1, heads, tokens, size]`.
        key: `[1, key heads, tokens, size]`, as `value`.
        value: see `key`.
        attention_mask: for rows without a tree.
        tree: the tree of the row; None = packed sequences.
        scaling: factor of the scores; None = 1 / sqrt(size).
        s_aux: the layer's sinks, `[heads]`; None = it has none.
        others: `sliding_window` is how many tokens each attends to, itself among them; None = all before.

    Returns:
        `[1, tokens, heads, size]`, and None where other implementations have weights.

    Raises ValueError for a model with a window that the layer does not pass on.
    """
    if tree is None:
        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        if s_aux is None:
            return sdpa(module, query, key, value, attention_mask, scaling=scaling, **others)
        tokens, size = query.shape[2], query.shape[3]
        if attention_mask is None:  # `sdpa` would take it that each token sees all before
            attention_mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=query.device).tril()
        scale = size**-0.5 if scaling is None else scaling
        query, key, value = with_sinks(query, key, value, s_aux, scale)
        out, _ = sdpa(module, query, key, value, pad(attention_mask, (0, 1), value=True), scaling=scale, **others)
        return out[..., :size], None
    if "sliding_window" not in others and getattr(module.config, "sliding_window", None):
        raise ValueError(f"{type(module).__name__} keeps its sliding window to itself; set {without(query.device)}")
    return tree.attend(query, key, value, Scores(others.get("sliding_window"), scaling, s_aux)), None


def with_sinks(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Make query, key and value with which torch's attention, which has no sinks, computes those of a layer that has.

    One more key is last, whose value is zero. Of the heads that share it, each finds its own sink there: a vector is
    longer by as many numbers as these heads, of which a query has 1 in its own head's and the key the sinks. What the
    attention gives is as long: the numbers beyond `size` are zero.

    Args:
        query: `[rows, heads, queries, size]`.
        key: `[rows, key heads, keys, size]`, as `value`.
        value: see `key`.
        sinks: the sink of each head, `[heads]`.
        scale: factor of the scores, by which sinks are not multiplied.
    """
    rows, heads, queries, size = query.shape
    sharing = heads // key.shape[1]
    own = torch.eye(sharing, dtype=query.dtype, device=query.device).repeat(key.shape[1], 1)
    last = pad((sinks.to(key.dtype) / scale).view(1, -1, 1, sharing), (size, 0)).expand(rows, -1, -1, -1)
    query = torch.cat((query, own[None, :, None].expand(rows, -1, queries, -1)), 3)
    return query, torch.cat((pad(key, (0, sharing)), last), 2), pad(value, (0, sharing, 0, 1))


def without(device: torch.device) -> str:
    """Return the settings that turn attention over trees off, for messages."""
    return f"{KEY}=false" if device.type == "cpu" else f"{KEY}=false and trainer.device=cpu"


def use_tree_attention(model: PreTrainedModel) -> None:
    """Have the model attend over trees, where all of its layers can; rows without a tree stay as they are."""
    language = language_of(model)  # a vision tower sees all of a picture
    layers = set(getattr(language.config, "layer_types", None) or ["full_attention"])
    if language._supports_attention_backend and layers <= {"full_attention", "sliding_attention"}:
        language.set_attn_implementation(NAME)


def can_attend_over_trees(model: PreTrainedModel) -> bool:
    """Return whether the model attends over trees, by `use_tree_attention`."""
    return bool(language_of(model).config._attn_implementation == NAME)


AttentionInterface.register(NAME, tree_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
