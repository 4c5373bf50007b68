"""`chunked_divergence` against the whole vocabulary in float64, its gradients, and what it keeps in memory."""

import math

import pytest
import torch
import torch.nn.functional as F
from divergences import merged, plain
from largest_tensor import LargestTensor

from prl.trainer.divergence import LEAST_REST, Head, Top, chunked_divergence

TOKENS, DIM, VOCAB = 13, 6, 29
KINDS = [("reverse_kl", 0.5), ("forward_kl", 0.5), ("jsd", 0.5), ("jsd", 0.1)]
TEMPERATURES = 0.5 + torch.rand(TOKENS, generator=torch.Generator().manual_seed(9))


def make_head(seed, *, bias=False, dtype=torch.float64, tokens=TOKENS, dim=DIM, vocab=VOCAB):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((tokens, dim), (vocab, dim), (vocab,))
    drawn = (torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    hidden, weight, shift = drawn
    return Head(hidden.requires_grad_(), weight.requires_grad_(), shift.requires_grad_() if bias else None)


def leaves(head):
    return [tensor for tensor in (head.hidden, head.weight, head.bias) if tensor is not None]


def logits(head, temperatures=TEMPERATURES):
    return F.linear(head.hidden, head.weight, head.bias) / temperatures.double()[:, None]


def make_top(head, k):
    """The most likely tokens at temperature 1, as an endpoint gives them."""
    logprobs, ids = logits(head, torch.ones(TOKENS)).log_softmax(-1).detach().topk(k)
    return Top(ids, logprobs)


def both(found, expected, tensors, tolerance):
    """Values and gradients agree, where a token has a weight of its own and some have none."""
    weights = torch.randn(TOKENS, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    weights[::4] = 0
    ours = torch.autograd.grad((found.double() * weights).sum(), tensors)
    theirs = torch.autograd.grad((expected * weights).sum(), tensors)
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    for mine, plainly in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, plainly, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("kind", "beta"), KINDS)
@pytest.mark.parametrize("chunk", [1, 5, 13, None])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_over_the_vocabulary(kind, beta, chunk, bias):
    policy, reference = make_head(0, bias=bias), make_head(1, bias=bias)
    found = chunked_divergence(policy, reference, TEMPERATURES, kind, beta, chunk=chunk)
    expected = plain(logits(policy).softmax(-1), logits(reference).detach().softmax(-1), kind, beta)
    both(found, expected, leaves(policy), 1e-10)


@pytest.mark.parametrize(("kind", "beta"), KINDS)
@pytest.mark.parametrize("k", [1, 7, VOCAB])
def test_over_top_tokens_and_the_rest(kind, beta, k):
    """A lower bound of the divergence over the vocabulary, and equal to it where the top is all there is."""
    policy, reference = make_head(0, bias=True), make_head(1)
    top = make_top(reference, k)
    found = chunked_divergence(policy, top, TEMPERATURES, kind, beta, chunk=4)
    p, q = logits(policy).softmax(-1), logits(reference, torch.ones(TOKENS)).detach().softmax(-1)
    whole = plain(p, q, kind, beta)
    mine, theirs = merged(p, top.ids), merged(q, top.ids)
    expected = whole if k == VOCAB else plain(mine, theirs, kind, beta)
    both(found, expected, leaves(policy), 1e-6 if k == VOCAB else 1e-10)
    assert (found <= whole + 1e-9).all()


def test_by_hand():
    """p = (1/4, 3/4), q = (1/2, 1/2)."""
    policy = Head(torch.ones(1, 1), torch.tensor([[0.0], [math.log(3)]]), None)
    reference = Head(torch.ones(1, 1), torch.zeros(2, 1), None)
    expected = {
        "reverse_kl": 0.25 * math.log(0.5) + 0.75 * math.log(1.5),
        "forward_kl": 0.5 * math.log(2) + 0.5 * math.log(2 / 3),
        "jsd": 0.25 * math.log(0.5 / 0.375)
        + 0.25 * math.log(0.5 / 0.625)
        + 0.125 * math.log(0.25 / 0.375)
        + 0.375 * math.log(0.75 / 0.625),
    }
    for kind, value in expected.items():
        assert chunked_divergence(policy, reference, torch.ones(1), kind).item() == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize(("kind", "beta"), KINDS)
@pytest.mark.parametrize("k", [0, 5])
def test_gradcheck(kind, beta, k):
    policy, reference = make_head(2, bias=True, tokens=3, dim=2, vocab=9), make_head(3, tokens=3, dim=2, vocab=9)
    if k:
        logprobs, ids = (reference.hidden @ reference.weight.T).log_softmax(-1).detach().topk(k)
        reference = Top(ids, logprobs)

    def values(*tensors):
        return chunked_divergence(Head(*tensors), reference, torch.tensor([0.5, 1.0, 0.0]), kind, beta, chunk=2)

    assert torch.autograd.gradcheck(values, tuple(leaves(policy)))


@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_missing_and_foreign_tokens_count_as_the_rest(kind, beta):
    """A shorter list beside a longer one, and a token that the policy's vocabulary has not."""
    policy, reference = make_head(0), make_head(1)
    top = make_top(reference, 3)
    last = top.logprobs[:, 2:]
    longer = Top(
        torch.cat([top.ids[:, :2], torch.full((TOKENS, 1), VOCAB + 5), torch.zeros(TOKENS, 2, dtype=torch.int64)], 1),
        torch.cat([top.logprobs[:, :2], last, torch.full((TOKENS, 2), -math.inf)], 1),
    )
    q = torch.cat([top.logprobs[:, :2].exp(), 1 - top.logprobs[:, :2].exp().sum(1, keepdim=True)], 1)
    expected = plain(merged(logits(policy).softmax(-1), top.ids[:, :2]), q, kind, beta)
    both(chunked_divergence(policy, longer, TEMPERATURES, kind, beta), expected, leaves(policy), 1e-10)


@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_sure_distributions_in_float32_stay_finite(kind, beta):
    """One token has all of the mass, for the policy, for the reference, for both, of the same or of another token."""
    hidden = torch.tensor([[300.0, 0.0], [300.0, 0.0], [0.0, 300.0], [0.0, 0.0]], requires_grad=True)
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]], requires_grad=True)
    top = Top(torch.tensor([[0], [1], [0], [0]]), torch.tensor([[0.0], [-1e-7], [1e-5], [0.0]]))
    reference = Head(torch.tensor([[300.0, 0.0], [0.0, 300.0], [300.0, 0.0], [300.0, 0.0]]), weight.detach(), None)
    for against in (top, reference):
        values = chunked_divergence(Head(hidden, weight, None), against, torch.ones(4), kind, beta)
        gradients = torch.autograd.grad(values.sum(), (hidden, weight))
        assert values.isfinite().all() and all(gradient.isfinite().all() for gradient in gradients)
        assert values[0].abs() < 2 * LEAST_REST * 600
        assert (values[1:] > 0.05).all()


@pytest.mark.parametrize("top", [False, True], ids=["vocabulary", "top"])
def test_no_tensor_of_all_tokens_and_the_vocabulary(top):
    vocab, tokens, chunk, k = 5003, 900, 16, 32
    policy = make_head(0, dtype=torch.float32, tokens=tokens, dim=8, vocab=vocab)
    reference = make_head(1, dtype=torch.float32, tokens=tokens, dim=8, vocab=vocab)
    if top:
        reference = Top(torch.arange(k).expand(tokens, k), torch.full((tokens, k), -5.0))
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x.numel()), x)[1], lambda x: x)
    with hooks, LargestTensor() as forward:
        values = chunked_divergence(policy, reference, torch.ones(tokens), "reverse_kl", chunk=chunk)
    with LargestTensor() as backward:
        values.sum().backward()
    assert max(saved) == policy.weight.numel()
    assert forward.elements == backward.elements == chunk * vocab


def test_reference_of_another_vocabulary_is_refused():
    with pytest.raises(ValueError, match="the reference has 30 tokens, the policy 29"):
        chunked_divergence(make_head(0), make_head(1, vocab=30), TEMPERATURES, "reverse_kl")
