"""Token logprobs from hidden states, without the logits of all tokens in memory at once.

The logits of a step are its largest tensor by far (tokens x vocabulary). They are computed one chunk at a time, in the
forward and again in the backward. Left out: autocast (cast the inputs instead) and second derivatives.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LOGITS, MOST = 2**23, 1024
"""Of a chunk: logits that it may have however small the model, and tokens at most."""
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
    """log_softmax((hidden @ weight.T + bias) / temperature) at the targets, and the entropy of that distribution.

    Shapes: `hidden` `[tokens, dim]`, `weight` `[vocab, dim]`, `bias` `[vocab]`, `targets` `[tokens]` int64,
    `temperatures` `[tokens]`; returns `logprobs` `[tokens]` float32 and `entropy` `[tokens]` float32, in nats. Both
    have a gradient. `chunk` is in tokens: the peak is about one buffer of `[chunk, vocab]` float32, and a second one
    on a GPU and in the backward of an entropy. None is what `usual_chunk` says.

    With `into_grad`, the backward adds the gradient of a parameter `weight` to its `.grad` chunk by chunk, where dtypes
    allow it, and autograd gets none: one buffer as large as the head less. So it must run by `backward()`.

    The matrix products are of the inputs in their own dtype. Logits and softmax are in float32, or in float64 for
    float64 inputs: in bfloat16, logits of 16 and more would be off by up to 0.06. A temperature of 0 (padding, greedy
    sampling) leaves the logits as they are. Tokens that get no gradient, such as prompts, cost nothing in the backward,
    and neither does an entropy that nobody uses. Raises `ValueError` where lengths differ.
    """
    for name, stream in (("targets", targets), ("temperatures", temperatures)):
        if stream.shape != hidden.shape[:1]:
            raise ValueError(f"{name} has shape {list(stream.shape)}, but hidden has {len(hidden)} tokens")
    chunk = usual_chunk(*weight.shape) if chunk is None else chunk
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    return _ChunkedLogprobs.apply(hidden, weight, bias, targets, temperatures, chunk, into_grad)


def usual_chunk(vocab: int, dim: int) -> int:
    """Tokens of a chunk whose logits take little memory beside the head and its optimiser state, or 32 MiB."""
    # Fewer than about half the width would spend more time on passes over the head's weight and gradient.
    return min(MOST, max(dim // 2, LOGITS // vocab))


class _Workspace:
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


def add_product(total: Tensor, one: Tensor, other: Tensor) -> None:
    """Add `one @ other` to `total`, whose dtype may be wider."""
    if total.dtype == one.dtype:
        total.addmm_(one, other)
    elif total.device.type == "cpu":
        total += one @ other
    else:
        total += torch.mm(one, other, out_dtype=total.dtype)


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperatures, chunk, into_grad):
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        scale = torch.where(temperatures > 0, temperatures, 1.0).to(dtype).reciprocal()
        logprobs = torch.empty(len(hidden), dtype=dtype, device=hidden.device)
        lse, entropy = torch.empty_like(logprobs), torch.empty_like(logprobs)
        work = _Workspace(hidden, weight, bias, scale, chunk)
        part = max(1, PART // len(weight)) if hidden.device.type == "cpu" else chunk
        probs = torch.empty_like(work.full[:part])
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            whole = work.logits(hidden[rows], scale[rows])
            for place in range(0, len(whole), part):
                rows = slice(start + place, start + min(place + part, len(whole)))
                logits = whole[place : place + part]
                top = logits.amax(dim=-1)
                exp = torch.exp(logits.sub_(top[:, None]), out=probs[: len(logits)])
                total = exp.sum(dim=-1)
                log_total = total.log()
                lse[rows] = top + log_total
                logprobs[rows] = logits.gather(1, targets[rows, None]).squeeze(1) - log_total
                entropy[rows] = log_total - exp.mul_(logits).sum(dim=-1) / total
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
        work = _Workspace(hidden, weight, bias, scale, min(ctx.chunk, len(active)))
        probs = None if grad_entropy is None else torch.empty_like(work.full)
        for rows in active.split(ctx.chunk) if len(active) else ():
            h = hidden[rows]
            logp = work.logits(h, scale[rows]).sub_(lse[rows, None])
            if probs is None:
                # d logprob / d logits = scale * (onehot - softmax); sign and factor go onto the small matrices below.
                delta = logp.exp_()
                delta.scatter_add_(1, targets[rows, None], delta.new_full((len(rows), 1), -1.0))
                factor = -(grad_logprobs[rows] * scale[rows])
            else:
                # d entropy / d logits = -scale * softmax * (log softmax + entropy) on top of it.
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
