"""Attention over a token tree: each token attends to the tokens on its path, at the cost of the paths.

A row that is a tree of tokens (`prl.trainer.tree`) has each token after its path and before what branches off later, so
that what goes on from a token is a range of the row that starts with it. Two numbers a token say all of it: its place
on its path, and where that range ends. Sequences that share nothing are such a row too.

One way for each device: on a CPU blocks of queries (`prl.trainer.blocks`), on a GPU FlexAttention
(`prl.trainer.flex`). Neither has anything as large as tokens x tokens.

Left out: layers that attend in another way than to all before or to a window (chunks, states), and attention with
sinks or capped scores.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "prl_tree"
"""Of this attention among those of transformers."""
KEY = "trainer.share_prefixes"
"""The config key that does without it, on a CPU."""


class TokenTree(ABC):
    """How the tokens of one row attend."""

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, window: int | None, scale: float | None) -> Tensor:
        """Attention of one layer, `[1, tokens, heads, size]`.

        Args:
            query: `[1, heads, tokens, size]`.
            key: `[1, key heads, tokens, size]`, as `value`.
            value: see `key`.
            window: tokens of its path that each attends to, itself among them; None = all.
            scale: of the scores; None = 1 / sqrt(size).
        """


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
        raise ValueError(f"{type(module).__name__} keeps its sliding window to itself; set {without(query.device)}")
    return tree.attend(query, key, value, window=others.get("sliding_window"), scale=scaling), None


def without(device: torch.device) -> str:
    """The settings that do without attention over trees, for messages."""
    return f"{KEY}=false" + " and trainer.device=cpu" * (device.type == "cuda")


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
