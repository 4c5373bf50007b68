"""Attention over several blocks of a row, checked as a trainer starts: in a model's own forms, on random numbers.

The model itself would take seconds for as many tokens on a CPU, and rounds by more in bfloat16 than a wrong key does.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from prl.trainer.attention import TokenTree, without

BRANCHES = ((0, 150), (135, 106), (5, 64))
"""Of the row: the place on its path where each branch starts, and its tokens. Of blocks of 128 queries and 128 keys,
some see all, some a part, and one pair nothing."""
LONGEST = 4096
"""Of the windows whose edges are checked, in tokens; a longer one is taken to be as long."""
NEAR = 64
"""Queries before a long window's edge, and after it in each of two branches, that are checked."""
TOLERANCE, HALF_TOLERANCE = 0.01, 0.05
"""By which a token's numbers may be off in float32 and in half precision: norm, to that of the right ones and their
mean norm together."""
OUTCOMES = ("results", *(f"gradients of {inputs}" for inputs in ("queries", "keys", "values", "sinks")))
Attend = Callable[..., Tensor]
MakeTree = Callable[[np.ndarray, list[int], torch.device], TokenTree]


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


def check_blocks(heard: Heard, make: MakeTree) -> None:
    """Raise ValueError where attention over several blocks, or its gradient, is not that of all pairs of tokens.

    A window that the row does not reach is checked at its edge in a longer one. On a CPU, where that takes time and
    all heads go one way, it is a single small head's.

    Args:
        heard: a row that went through the model.
        make: a row from the place of each token on its path, where branches start, and a device.
    """
    for form, sinks in heard.forms.items():
        _check(form, sinks, make, BRANCHES)
        if form.window is None or form.window < max(place + tokens for place, tokens in BRANCHES):
            continue
        window = min(form.window, LONGEST)
        form = form._replace(window=window)
        if form.device.type == "cpu":
            form = form._replace(heads=(1, 1, 1), sizes=(16, 16, 16), scale=None)
            sinks = None if sinks is None else sinks[:1]
        _check(form, sinks, make, ((0, window + NEAR), (window, NEAR)), first=window - NEAR)


def _check(
    form: Form, sinks: Tensor | None, make: MakeTree, branches: tuple[tuple[int, int], ...], first: int = 0
) -> None:
    """Compare attention over a row of `branches` with that of all pairs, of the queries from `first` on.

    Keys that are far from all that is special, the edge of the window or the query itself, hardly count: one key more
    or less is noticed as among few.
    """
    depths, starts, on_path = row(branches)
    tree, generator = make(depths, starts, form.device), torch.Generator().manual_seed(0)
    distance = torch.from_numpy(depths[first:, None] - depths)
    seen = (on_path[first:] & (distance < (form.window or len(depths)))).to(form.device)

    def numbers(heads: int, size: int) -> Tensor:
        # In memory as a model has them: a GPU's kernels are compiled for that.
        drawn = torch.randn(1, len(depths), heads, size, generator=generator)
        return drawn.to(form.device, form.dtype).transpose(1, 2)

    inputs = [numbers(heads, size) for heads, size in zip(form.heads, form.sizes, strict=True)]
    weight = numbers(form.heads[0], form.sizes[2]).transpose(1, 2)[:, first:]
    if first:
        scale = form.sizes[0] ** -0.5 if form.scale is None else form.scale
        inputs[0][..., 0], inputs[1][..., 0] = 1.0, 0.0
        inputs[1][:, :, 2 * NEAR : first - NEAR, 0] = -30 / scale
    if sinks is not None:
        inputs.append(sinks)

    def ours(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        return tree.attend(query, key, value, window=form.window, scale=form.scale, sinks=sinks)[:, first:]

    def exact(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        return of_all_pairs(query[:, :, first:], key, value, seen=seen, scale=form.scale, sinks=sinks)

    found = with_gradients(ours, inputs, weight)
    expected = with_gradients(exact, [each.float() for each in inputs], weight.float())
    tolerance = TOLERANCE if form.dtype.itemsize > 2 else HALF_TOLERANCE
    for what, one, other in zip(OUTCOMES, found, expected, strict=False):
        if not (gap := difference(one.float(), other)) < tolerance:
            raise ValueError(
                f"attention over several blocks of a row: {what} off by {gap:.2g} of their size in {form.dtype}"
                f"{'' if form.window is None else f', window {form.window}'}; set {without(form.device)}"
            )


def row(branches: tuple[tuple[int, int], ...]) -> tuple[np.ndarray, list[int], Tensor]:
    """A row of branches: the place on its path where each starts, and its tokens.

    Returns:
        Places of tokens on their path, int64 `[tokens]`; where branches start; which tokens are on the path to each,
        itself among them, bool `[tokens, tokens]`.
    """
    depths = np.concatenate([np.arange(place, place + tokens) for place, tokens in branches])
    on_path = torch.zeros(len(depths), len(depths), dtype=torch.bool)
    starts, path, start = list[int](), list[int](), 0
    for place, tokens in branches:
        own = range(start, start + tokens)
        on_path[start : start + tokens, path[:place]] = True
        on_path[start : start + tokens, start : start + tokens] = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        starts, path, start = [*starts, start], [*path[:place], *own], start + tokens
    return depths, starts, on_path


def of_all_pairs(
    query: Tensor, key: Tensor, value: Tensor, *, seen: Tensor, scale: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention as `TokenTree.attend`, from the scores of all pairs of tokens; `seen` is bool `[queries, keys]`."""
    sharing = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(sharing, 1) for each in (key, value))
    scores = query @ key.mT * (query.shape[3] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), 3)
    return (scores.softmax(3)[..., : key.shape[2]] @ value).transpose(1, 2)


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
