"""Token logprobs from hidden states, without the logits of all tokens in memory at once.

The logits of a step are its largest tensor by far (tokens x vocabulary). They are computed one chunk at a time, in the
forward and again in the backward. Left out: autocast (cast the inputs instead) and second derivatives.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LOGITS = 2**23
"""Logits that a chunk may have however small the model is, 32 MiB."""
MOST = 1024
"""Tokens of a chunk at most, on a CPU."""
ON_GPU = 2048
"""Tokens of a chunk on a GPU, where each is a pass over the head's weight and its gradient."""
PART = 2**19
"""Logits of a chunk that go through the softmax together on a CPU: as many as a core's cache holds."""


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    *,
    chunk: int | None = None,
    bias: Tensor | None = None,
    into_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute log_softmax((hidden @ weight.T + bias) / temperature) at the targets, and the distribution's entropy.

    Args:
        hidden: hidden states before the head, `[tokens, dim]`.
        weight: the head, `[vocab, dim]`.
        targets: the tokens whose logprob is wanted, int64 `[tokens]`.
        temperatures: divide the logits, `[tokens]`.
        chunk: tokens at a time: the peak is about one buffer of `[chunk, vocab]` float32, and a second one in the
            backward of an entropy. None = as many as `usual_chunk` says.
        bias: of the head, `[vocab]`; None = it has none.
        into_grad: the backward adds the gradient of a parameter `weight` to its `.grad` chunk by chunk, where dtypes
            allow it, and autograd gets none: one buffer as large as the head less. So it must run by `backward()`.

    Returns:
        Logprobs and entropy in nats, both `[tokens]`, float32 (float64 of float64 inputs), both with a gradient.

    The matrix products are of the inputs in their own dtype. Logits and softmax are in float32, or in float64 for
    float64 inputs: in bfloat16, logits of 16 and more would be off by up to 0.06. A temperature of 0 (padding, greedy
    sampling) leaves the logits as they are. Tokens that get no gradient, such as prompts, cost nothing in the backward,
    and neither does an entropy that nobody uses.
    """
    chunk = usual_chunk(*weight.shape, cuda=weight.is_cuda) if chunk is None else chunk
    return _ChunkedLogprobs.apply(hidden, weight, bias, targets, temperatures, chunk, into_grad)


def usual_chunk(vocab: int, dim: int, *, cuda: bool) -> int:
    """Return the tokens of a chunk: on a CPU so many that they take little beside the head and its optimiser state."""
    if cuda:
        return ON_GPU
    # Fewer than about half the width would spend more time on passes over the head's weight and gradient.
    return min(MOST, max(dim // 2, LOGITS // vocab))


class Workspace:
    """Buffers one chunk large, made once: fresh ones per chunk would spend as long in page faults as in arithmetic."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, chunk: int) -> None:
        # A CPU has no product of bfloat16 whose result is float32.
        self.weight, self.bias = weight.to(scale.dtype) if weight.device.type == "cpu" else weight, bias
        self.full = scale.new_empty((min(chunk, len(hidden)), len(weight)))

    def logits(self, hidden: Tensor, scale: Tensor) -> Tensor:
        """`[rows, vocab]`, at least float32, divided by the temperature: a view of the buffer, free to change."""
        logits = self.full[: len(hidden)]
        if self.weight.dtype == scale.dtype:
            torch.mm(hidden * scale[:, None], self.weight.T, out=logits)  # cheaper than scaling the logits
        else:
            torch.mm(hidden, self.weight.T, out_dtype=scale.dtype, out=logits).mul_(scale[:, None])
        return logits if self.bias is None else logits.addr_(scale, self.bias.to(scale.dtype))


def softmax_numbers(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-sum-exp, logprob of the target and entropy of each row of logits `[rows, vocab]`, each `[rows]`."""
    if on_gpu(logits):
        return fused(_softmax_numbers)(logits, targets)
    size = max(1, PART // logits.shape[1])
    exp = torch.empty_like(logits[:size])
    parts = [
        _softmax_numbers(rows, some, exp[: len(rows)])
        for rows, some in zip(logits.split(size), targets.split(size), strict=True)
    ]
    lse, logprobs, entropy = (torch.cat(numbers) for numbers in zip(*parts, strict=True))
    return lse, logprobs, entropy


def _softmax_numbers(logits: Tensor, targets: Tensor, exp: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `softmax_numbers` of some rows; with a buffer for their exponentials in place, which loses the logits."""
    top = logits.amax(dim=-1)
    shifted = logits - top[:, None] if exp is None else logits.sub_(top[:, None])
    exp = torch.exp(shifted, out=exp)
    total = exp.sum(dim=-1)
    # Entropy = log sum(exp) - sum(exp * shifted) / sum(exp): no logarithm of each probability.
    log_total = total.log()
    logprobs = shifted.gather(1, targets[:, None]).squeeze(1) - log_total
    return top + log_total, logprobs, log_total - exp.mul_(shifted).sum(dim=-1) / total


def softmax_less_target(logits: Tensor, lse: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute softmax less one at the target, `[rows, vocab]` of `dtype`. On a CPU the logits are overwritten."""
    if on_gpu(logits):
        return fused(_softmax_less_target)(logits, lse, targets, dtype)
    probs = logits.sub_(lse[:, None]).exp_()
    return probs.scatter_add_(1, targets[:, None], probs.new_full((len(probs), 1), -1.0)).to(dtype)


def _softmax_less_target(logits: Tensor, lse: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    columns = torch.arange(logits.shape[1], device=logits.device)
    return ((logits - lse[:, None]).exp() - (columns == targets[:, None]).to(logits.dtype)).to(dtype)


def on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


@functools.cache
def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function, for a GPU: else each of its operations is a pass over the logits of a chunk."""
    return torch.compile(function, dynamic=True)


def add_product(total: Tensor, one: Tensor, other: Tensor) -> None:
    """Add `one @ other` to `total`, whose dtype may be wider."""
    if total.dtype == one.dtype:
        total.addmm_(one, other)
    elif total.device.type == "cpu":
        total += one @ other
    else:
        torch.addmm(total, one, other, out_dtype=total.dtype, out=total)


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperatures, chunk, into_grad):
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        scale = torch.where(temperatures > 0, temperatures, 1.0).to(dtype).reciprocal()
        logprobs = torch.empty(len(hidden), dtype=dtype, device=hidden.device)
        lse, entropy = torch.empty_like(logprobs), torch.empty_like(logprobs)
        work = Workspace(hidden, weight, bias, scale, chunk)
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            logits = work.logits(hidden[rows], scale[rows])
            lse[rows], logprobs[rows], entropy[rows] = softmax_numbers(logits, targets[rows])
        ctx.save_for_backward(hidden, weight, bias, targets, scale, lse, entropy)
        ctx.chunk = chunk
        ctx.parameter = weight if into_grad and weight.is_leaf and weight.dtype == dtype else None
        ctx.set_materialize_grads(False)  # so that an entropy which no loss uses shows as None
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, weight, bias, targets, scale, lse, entropy = ctx.saved_tensors
        grad_logprobs = torch.zeros_like(lse) if grad_logprobs is None else grad_logprobs
        grad_hidden = torch.zeros_like(hidden)
        # Chunks add up in at least float32: a bf16 sum over many chunks would lose the small ones.
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = None if ctx.parameter is None else ctx.parameter.grad
            grad_weight = torch.zeros_like(weight, dtype=scale.dtype) if grad_weight is None else grad_weight
        grad_bias = torch.zeros_like(bias, dtype=scale.dtype) if ctx.needs_input_grad[2] else None
        used = grad_logprobs != 0 if grad_entropy is None else (grad_logprobs != 0) | (grad_entropy != 0)
        active = used.nonzero().squeeze(1)
        work = Workspace(hidden, weight, bias, scale, min(ctx.chunk, len(active)))
        probs = None if grad_entropy is None else torch.empty_like(work.full)
        for rows in active.split(ctx.chunk) if len(active) else ():
            h = hidden[rows]
            logits = work.logits(h, scale[rows])
            if probs is None:
                # d logprob / d logits = scale * (onehot - softmax); sign and factor go onto the small matrices below.
                dtype = hidden.dtype if grad_bias is None else logits.dtype
                delta = softmax_less_target(logits, lse[rows], targets[rows], dtype)
                factor = -(grad_logprobs[rows] * scale[rows])
            else:
                # d entropy / d logits = -scale * softmax * (log softmax + entropy) on top of it.
                logp = logits.sub_(lse[rows, None])
                p = torch.exp(logp, out=probs[: len(rows)])
                bent = logp.add_(entropy[rows, None]).mul_(grad_entropy[rows, None])
                delta = bent.add_(grad_logprobs[rows, None]).mul_(p)
                delta.scatter_add_(1, targets[rows, None], -grad_logprobs[rows, None])
                factor = -scale[rows]
            if grad_bias is not None:
                grad_bias += factor @ delta
            delta = delta.to(hidden.dtype)
            grad_hidden[rows] = ((delta @ weight) * factor[:, None]).to(hidden.dtype)
            if grad_weight is not None:
                scaled = (h * factor[:, None]).to(h.dtype)
                add_product(grad_weight, delta.T, scaled)
        if grad_weight is not None and ctx.parameter is not None:
            ctx.parameter.grad, grad_weight = grad_weight, None
        # Autograd casts each to the dtype of its input.
        return grad_hidden, grad_weight, grad_bias, None, None, None, None
