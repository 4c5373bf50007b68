"""Attention over several blocks of a row, checked as a trainer starts: in a model's own forms, on random numbers.

The model itself would take seconds for as many tokens on a CPU, and rounds by more in bfloat16 than a wrong key does.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from prl.trainer.attention import TokenTree, without

BRANCHES = ((0, 150), (135, 106), (5, 64))
"""Of the row: the place on its path where each branch starts, and its tokens. Of blocks of 128 queries and 128 keys,
some see all, some a part, and one pair nothing."""
TOLERANCE, HALF_TOLERANCE = 0.01, 0.05
"""By which a token's numbers may be off in float32 and in half precision: norm, to that of the right ones and their
mean norm together."""
OUTCOMES = ("results", "gradients of queries", "gradients of keys", "gradients of values")
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Form(NamedTuple):
    """How layers attend alike."""

    heads: tuple[int, ...]
    """Of queries, keys and values, as the sizes."""
    sizes: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    window: int | None
    scale: float | None
    has_sinks: bool


@dataclass
class Heard(TokenTree):
    """A row that remembers how layers attend over it."""

    tree: TokenTree
    forms: dict[Form, Tensor | None] = field(default_factory=dict)
    """With the sinks of the first layer of each."""

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        window: int | None,
        scale: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        heads, sizes = (tuple(each.shape[axis] for each in (query, key, value)) for axis in (1, 3))
        form = Form(heads, sizes, query.dtype, query.device, window, scale, sinks is not None)
        if form not in self.forms:  # a copy: what ranks share is there for the pass alone
            self.forms[form] = None if sinks is None else sinks.detach().clone()
        return self.tree.attend(query, key, value, window=window, scale=scale, sinks=sinks)


def check_blocks(heard: Heard, make: Callable[[np.ndarray, list[int], torch.device], TokenTree]) -> None:
    """Raise ValueError where attention over several blocks, or its gradient, is not that of all pairs of tokens.

    Args:
        heard: a row that went through the model.
        make: a row from the place of each token on its path, where branches start, and a device.
    """
    depths, starts, on_path = row()
    distance = torch.from_numpy(depths[:, None] - depths)
    for form, sinks in heard.forms.items():
        tree, generator = make(depths, starts, form.device), torch.Generator().manual_seed(0)

        def numbers(heads: int, size: int, form: Form = form, generator: torch.Generator = generator) -> Tensor:
            # In memory as a model has them: a GPU's kernels are compiled for that.
            drawn = torch.randn(1, len(depths), heads, size, generator=generator)
            return drawn.to(form.device, form.dtype).transpose(1, 2)

        inputs = [numbers(heads, size) for heads, size in zip(form.heads, form.sizes, strict=True)]
        weight = numbers(form.heads[0], form.sizes[2]).transpose(1, 2)
        seen = (on_path & (distance < (form.window or len(depths)))).to(form.device)
        found = with_gradients(partial(tree.attend, window=form.window, scale=form.scale, sinks=sinks), inputs, weight)
        exact = [each.float() for each in inputs]
        expected = with_gradients(
            partial(of_all_pairs, seen=seen, scale=form.scale, sinks=sinks), exact, weight.float()
        )
        tolerance = TOLERANCE if form.dtype.itemsize > 2 else HALF_TOLERANCE
        for what, one, other in zip(OUTCOMES, found, expected, strict=True):
            if not (gap := difference(one.float(), other)) < tolerance:
                raise ValueError(
                    f"attention over several blocks of a row: {what} off by {gap:.2g} of their size in {form.dtype}; "
                    f"set {without(form.device)}"
                )


def row() -> tuple[np.ndarray, list[int], Tensor]:
    """The row of `BRANCHES`.

    Returns:
        Places of tokens on their path, int64 `[tokens]`; where branches start; which tokens are on the path to each,
        itself among them, bool `[tokens, tokens]`.
    """
    depths = np.concatenate([np.arange(place, place + tokens) for place, tokens in BRANCHES])
    on_path = torch.zeros(len(depths), len(depths), dtype=torch.bool)
    starts, path, start = list[int](), list[int](), 0
    for place, tokens in BRANCHES:
        own = range(start, start + tokens)
        on_path[start : start + tokens, path[:place]] = True
        on_path[start : start + tokens, start : start + tokens] = torch.ones(tokens, tokens).tril().bool()
        starts, path, start = [*starts, start], [*path[:place], *own], start + tokens
    return depths, starts, on_path


def of_all_pairs(
    query: Tensor, key: Tensor, value: Tensor, *, seen: Tensor, scale: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention as `TokenTree.attend`, from the scores of all pairs of tokens."""
    sharing = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(sharing, 1) for each in (key, value))
    scores = query @ key.mT * (query.shape[3] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), 3)
    return (scores.softmax(3)[..., : len(seen)] @ value).transpose(1, 2)


def with_gradients(attend: Attend, inputs: list[Tensor], weight: Tensor) -> list[Tensor]:
    """What `attend` makes of the inputs, and the gradients of these for a gradient `weight` of that."""
    with torch.enable_grad():
        leaves = [each.detach().requires_grad_() for each in inputs]
        out = attend(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, weight)]


def difference(one: Tensor, other: Tensor) -> float:
    """The largest difference of two vectors of `[…, size]`, to the norm of the second and the mean norm together."""
    size = other.norm(dim=-1)
    return ((one - other).norm(dim=-1) / (size + size.mean())).max().item()
