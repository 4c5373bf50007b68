"""Divergences of the policy's next-token distribution from a reference's, without the logits of all tokens in memory.

As in `logprobs.py` they are computed one chunk of tokens at a time, in the forward and again in the backward. Where the
reference is in the trainer, over the whole vocabulary; where it is an endpoint, over its most likely tokens and one
token that stands for the rest. That is a lower bound: to merge outcomes never makes distributions differ more.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from prl.trainer.logprobs import Workspace, add_product, usual_chunk

LEAST_REST = 1e-6
"""Least probability of the rest of the tokens under an endpoint, whose float32 logprobs add up to 1 no more exactly."""


@dataclass
class Head:
    """The head that makes a model's distributions, with the hidden states that it gets."""

    hidden: Tensor
    """`[tokens, dim]`."""
    weight: Tensor
    """`[vocab, dim]`."""
    bias: Tensor | None
    """`[vocab]`; None = the head has none."""

    def part(self, tokens: Tensor) -> "Head":
        """Return the head at some tokens alone."""
        return Head(self.hidden.index_select(0, tokens), self.weight, self.bias)


@dataclass
class Top:
    """A distribution's most likely tokens and their logprobs, `[tokens, k]` both.

    Where a token has fewer than k, the others have the logprob -inf. Tokens that the policy lacks count as the rest.
    """

    ids: Tensor
    logprobs: Tensor

    def part(self, tokens: Tensor) -> "Top":
        """Return the likeliest tokens at some places alone."""
        return Top(self.ids[tokens], self.logprobs[tokens])

    def to(self, device: torch.device) -> "Top":
        return Top(self.ids.to(device), self.logprobs.to(device))


def divergence(logp: Tensor, logq: Tensor, kind: str, beta: float) -> tuple[Tensor, Tensor]:
    """Compute a divergence over the last dimension, and p times its derivative by p, where p sums to 1.

    - `reverse_kl`: sum p log(p / q).
    - `forward_kl`: sum q log(q / p).
    - `jsd`: beta KL(q || m) + (1 - beta) KL(p || m) with m = beta q + (1 - beta) p (GKD, arXiv 2306.13649).

    Args:
        logp: logprobs of the policy, `[tokens, outcomes]`; -inf where there is none.
        logq: logprobs of the reference, likewise.
        kind: the divergence.
        beta: share of the reference in the mixture of `jsd`.

    Returns:
        `[tokens]`, at least 0, in nats; and `[tokens, outcomes]`, up to a multiple of p.
    """
    if kind == "forward_kl":
        return product(logq, logq - logp).sum(-1), -logq.exp()
    if kind == "reverse_kl":
        pull = product(logp, logp - logq)
        return pull.sum(-1), pull
    mixed = torch.logaddexp(logq + math.log(beta), logp + math.log1p(-beta))
    pull = (1 - beta) * product(logp, logp - mixed)
    return beta * product(logq, logq - mixed).sum(-1) + pull.sum(-1), pull


def product(log_weights: Tensor, values: Tensor) -> Tensor:
    """Compute exp(log_weights) * values, 0 where the weight is 0: the value may be infinite there."""
    weights = log_weights.exp()
    return torch.where(weights > 0, weights * values, 0.0)


def chunked_divergence(
    policy: Head, reference: Head | Top, temperatures: Tensor, kind: str, beta: float = 0.5, *, chunk: int | None = None
) -> Tensor:
    """Compute the divergence of the policy from its reference at each token, without all logits in memory.

    Tokens that get no gradient cost nothing in the backward.

    Args:
        policy: the policy's head, whose three tensors get a gradient.
        reference: the head of a reference in the trainer, or the likeliest tokens of one in an engine.
        temperatures: divide the logits of both heads, `[tokens]`; 0 leaves them as they are.
        kind: as of `divergence`.
        beta: as of `divergence`.
        chunk: tokens at a time: the peak is a few buffers of `[chunk, vocab]` float32. None = as many as `usual_chunk`
            says, on a GPU a quarter of it.

    Returns:
        `[tokens]`, nats, at least float32.

    Raises ValueError for a vocabulary of another size than the reference's.
    """
    if isinstance(reference, Head) and len(reference.weight) != len(policy.weight):
        raise ValueError(f"the reference has {len(reference.weight)} tokens, the policy {len(policy.weight)}")
    usual = usual_chunk(*policy.weight.shape, cuda=policy.weight.is_cuda)
    chunk = chunk or max(1, usual // 4 if policy.weight.is_cuda else usual)
    values: Tensor = _ChunkedDivergence.apply(
        policy.hidden, policy.weight, policy.bias, temperatures, reference, kind, beta, chunk
    )
    return values


def _over_vocabulary(logp: Tensor, logq: Tensor, kind: str, beta: float) -> tuple[Tensor, Tensor]:
    """Compute the divergence `[tokens]`, and its derivative by the policy's logits, `[tokens, vocab]`."""
    values, pull = divergence(logp, logq, kind, beta)
    return values, pull.sub_(logp.exp() * pull.sum(1, keepdim=True))


def _over_top(logp: Tensor, top: Top, kind: str, beta: float) -> tuple[Tensor, Tensor]:
    """Compute the same as `_over_vocabulary` where the outcomes are the reference's `top` tokens and the rest."""
    # The engine may have tokens that the policy has no row for.
    known = (top.logprobs > -math.inf) & (top.ids < logp.shape[1])
    place = known.nonzero()[:, 0], top.ids[known]
    logq = torch.where(known, top.logprobs.to(logp.dtype), -math.inf)
    own = torch.where(known, logp.gather(1, torch.where(known, top.ids, 0)), -math.inf)
    # Of the rest by its own sum: 1 - the others would have no digits where the policy is sure.
    rest = logp.index_put(place, logp.new_tensor(-math.inf)).logsumexp(1, keepdim=True)
    rest_of_reference = (1 - logq.exp().sum(1, keepdim=True)).clamp_min(LEAST_REST).log()
    rest_of_reference.masked_fill_(rest == -math.inf, -math.inf)
    own, logq = torch.cat([own, rest], 1), torch.cat([logq, rest_of_reference], 1)
    values, pull = divergence(own, logq, kind, beta)
    total = pull.sum(1, keepdim=True)
    slope = (logp - rest).exp_().mul_(pull[:, -1:]).sub_(logp.exp().mul_(total))
    return values, slope.index_put_(place, (pull - own.exp() * total)[:, :-1][known])


class _ChunkedDivergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, temperatures, reference, kind, beta, chunk):
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        scale = torch.where(temperatures > 0, temperatures, 1.0).to(dtype).reciprocal()
        ctx.save_for_backward(hidden, weight, bias, scale)
        ctx.reference, ctx.options, ctx.chunk = reference, (kind, beta), chunk
        compare = _comparing(Head(hidden, weight, bias), reference, scale, chunk)
        tokens = torch.arange(len(hidden), device=hidden.device)
        return torch.cat([scale[:0], *(compare(some, kind, beta)[0] for some in tokens.split(chunk) if len(some))])

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        hidden, weight, bias, scale = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden)
        # As in `logprobs.py`, chunks add up in at least float32.
        grad_weight = torch.zeros_like(weight, dtype=scale.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=scale.dtype) if ctx.needs_input_grad[2] else None
        compare = _comparing(Head(hidden, weight, bias), ctx.reference, scale, ctx.chunk)
        active = upstream.nonzero().squeeze(1)
        for some in active.split(ctx.chunk) if len(active) else ():
            slope = compare(some, *ctx.options)[1].mul_((upstream[some] * scale[some])[:, None])
            if grad_bias is not None:
                grad_bias += slope.sum(0)
            slope = slope.to(hidden.dtype)
            grad_hidden[some] = slope @ weight
            if grad_weight is not None:
                add_product(grad_weight, slope.T, hidden[some])
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None


def _comparing(
    policy: Head, reference: Head | Top, scale: Tensor, chunk: int
) -> Callable[[Tensor, str, float], tuple[Tensor, Tensor]]:
    """Return a function that compares policy and reference at some tokens, given by their places.

    It takes the divergence and its beta too, and returns values and slope as `_over_vocabulary` does.
    """
    logprobs = _logprobs_of(policy, scale, chunk)
    if isinstance(reference, Top):
        return lambda some, *kind: _over_top(logprobs(some), reference.part(some), *kind)
    others = _logprobs_of(reference, scale, chunk)
    return lambda some, *kind: _over_vocabulary(logprobs(some), others(some), *kind)


def _logprobs_of(head: Head, scale: Tensor, chunk: int) -> Callable[[Tensor], Tensor]:
    """Return a function that computes the logprobs `[tokens, vocab]` at some tokens, given by their places."""
    work = Workspace(head.hidden, head.weight, head.bias, scale, chunk)
    return lambda some: work.logits(head.hidden[some], scale[some]).log_softmax(-1)
