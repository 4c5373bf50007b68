"""`chunked_logprobs` against torch's log_softmax in float64, its gradients, and what it keeps in memory."""

import math

import pytest
import torch
import torch.nn.functional as F
from largest_tensor import LargestTensor
from torch.utils._python_dispatch import TorchDispatchMode

from prl.trainer.logprobs import add_product, chunked_logprobs, softmax_less_target, softmax_numbers


def problem(tokens=37, dim=8, vocab=53, seed=0, dtype=torch.float64, bias=False):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    targets = torch.randint(vocab, (tokens,), generator=generator)
    temperatures = (0.3 + torch.rand(tokens, generator=generator, dtype=torch.float64) * 1.5).to(torch.float32)
    return normal(tokens, dim), normal(vocab, dim), targets, temperatures, normal(vocab) if bias else None


def plain(hidden, weight, targets, temperatures, bias=None):
    logits = F.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(torch.float32, hidden.dtype)) / temperatures[:, None]
    logp = logits.log_softmax(-1)
    return logp.gather(1, targets[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


def grads(fn, leaves, upstream, upstream_entropy=None):
    values, entropy = fn()
    total = (values * upstream).sum() + (0.0 if upstream_entropy is None else (entropy * upstream_entropy).sum())
    return values.detach(), entropy.detach(), torch.autograd.grad(total, leaves)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("with_entropy", [False, True], ids=["", "entropy"])
@pytest.mark.parametrize("chunk", [1, 7, 36, 37, 256])
@pytest.mark.parametrize("dtype, tol", [(torch.float64, 1e-12), (torch.float32, 3e-5)])
def test_values_and_gradients_are_those_of_log_softmax(dtype, tol, chunk, with_entropy, bias):
    """Some tokens have a gradient of their logprob, some of their entropy, some both, some neither."""
    hidden, weight, targets, temperatures, b = problem(dtype=dtype, bias=bias)
    leaves = [x for x in (hidden, weight, b) if x is not None]
    upstream = torch.randn(2, 37, generator=torch.Generator().manual_seed(1), dtype=dtype)
    upstream[0, ::3], upstream[1, ::4] = 0.0, 0.0
    upstream = upstream if with_entropy else upstream[:1]

    def found():
        return chunked_logprobs(hidden, weight, targets, temperatures, chunk=chunk, bias=b)

    ours = grads(found, leaves, *upstream)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    expected = grads(lambda: plain(*exact[:2], targets, temperatures.double(), *exact[2:]), exact, *upstream.double())
    for mine, theirs in zip((*ours[:2], *ours[2]), (*expected[:2], *expected[2]), strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.double(), theirs, rtol=tol, atol=tol)


def test_by_hand():
    """Logits (ln 1, ln 3) at temperature 1, and halved (so 1 to sqrt 3) at temperature 2."""
    hidden, weight = torch.ones(2, 1), torch.tensor([[0.0], [math.log(3)]])
    logprobs, entropy = chunked_logprobs(hidden, weight, torch.tensor([1, 0]), torch.tensor([1.0, 2.0]))
    r = math.sqrt(3)
    assert logprobs.tolist() == pytest.approx([math.log(0.75), -math.log(1 + r)])
    assert entropy[0].item() == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))


def test_gradcheck():
    hidden, weight, targets, temperatures, bias = problem(tokens=5, dim=3, vocab=6, bias=True)

    def fn(h, w, b):
        return chunked_logprobs(h, w, targets, temperatures, chunk=2, bias=b)

    for outputs in (fn, lambda *leaves: fn(*leaves)[0], lambda *leaves: fn(*leaves)[1]):  # finite differences
        assert torch.autograd.gradcheck(outputs, (hidden, weight, bias))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("before", [False, True], ids=["first", "second"])
def test_the_heads_gradient_can_be_added_where_it_belongs(tied, before):
    """Also to what an earlier backward left there, and beside the embedding's."""
    hidden, weight, targets, temperatures, _ = problem()
    earlier = torch.randn_like(weight) if before else None

    def gradient(fn, **keywords):
        weight.grad = None if earlier is None else earlier.clone()
        states = weight[targets.flip(0)].tanh() if tied else hidden
        values, _ = fn(states, weight, targets, temperatures, **keywords)
        values.sum().backward()
        return weight.grad

    expected = gradient(plain)
    torch.testing.assert_close(gradient(chunked_logprobs, chunk=5, into_grad=True), expected)
    kept = weight.grad = torch.zeros_like(weight)
    chunked_logprobs(hidden, weight, targets, temperatures, into_grad=True)[0].sum().backward()
    assert weight.grad is kept and kept.any()


def test_a_head_in_another_dtype_has_autograds_gradient():
    hidden, weight, targets, temperatures, _ = problem(dtype=torch.bfloat16)
    found = [
        torch.autograd.grad(chunked_logprobs(hidden, weight, targets, temperatures, into_grad=on)[0].sum(), weight)[0]
        for on in (False, True)
    ]
    assert found[0].dtype == torch.bfloat16 and found[0].any() and torch.equal(*found)


@pytest.mark.parametrize("part", [1, 53, 60, 106, 200])
def test_the_softmax_takes_a_chunk_in_parts(monkeypatch, part):
    """Row by row it is the same arithmetic."""
    hidden, weight, targets, temperatures, _ = problem()
    expected = chunked_logprobs(hidden, weight, targets, temperatures, chunk=16)
    monkeypatch.setattr("prl.trainer.logprobs.PART", part)
    found = chunked_logprobs(hidden, weight, targets, temperatures, chunk=16)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_bf16_has_float32_logits_and_bf16_gradients():
    """Products of bf16 numbers are exact in float32, so that nothing is rounded but the sums of gradients."""
    hidden, weight, targets, temperatures, _ = problem(tokens=200, dim=32, vocab=300, dtype=torch.bfloat16)
    upstream = torch.ones(200)
    values, entropy, ours = grads(
        lambda: chunked_logprobs(hidden, weight, targets, temperatures, chunk=16), (hidden, weight), upstream
    )
    rounded, _, usual = grads(lambda: plain(hidden, weight, targets, temperatures), (hidden, weight), upstream)
    assert values.dtype == entropy.dtype == torch.float32
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    expected, _, reference = grads(lambda: plain(*exact, targets, temperatures.double()), exact, upstream.double())
    torch.testing.assert_close(values.double(), expected, rtol=1e-5, atol=1e-5)
    assert (rounded.double() - expected).abs().max() > 1e-3, "logits in bf16 are far from it"
    for mine, autograd, theirs in zip(ours, usual, reference, strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine.double() - theirs).norm() < 1.1 * (autograd.double() - theirs).norm() < 0.02 * theirs.norm()


def test_a_gpu_multiplies_bf16_into_float32():
    """Its products on a device without numbers: which they are, with arguments that torch takes."""
    hidden, weight, targets, temperatures, _ = problem(tokens=20, dim=32, vocab=300, dtype=torch.bfloat16)
    called = []

    class Called(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.append((str(func), [each.dtype for each in args if isinstance(each, torch.Tensor)]))
            return func(*args, **(kwargs or {}))

    half, total = [torch.bfloat16] * 2, torch.empty(300, 32, device="meta")
    with torch.no_grad(), Called():
        found = chunked_logprobs(*(each.to("meta") for each in (hidden, weight, targets, temperatures)), chunk=16)
        add_product(total, torch.empty(300, 20, dtype=torch.bfloat16, device="meta"), hidden.to("meta"))
    assert [each.dtype for each in (*found, total)] == [torch.float32] * 3
    products = [one for one in called if "mm" in one[0]]
    assert products[:-1] == [("aten.mm.dtype_out", half)] * 2
    assert products[-1] == ("aten.addmm.dtype_out", [torch.float32, *half])


def test_a_gpus_softmax_is_that_of_a_cpu(monkeypatch):
    """What is compiled for it, as it is, against torch's in float64."""
    logits, targets = 5 * torch.randn(6, 40, dtype=torch.float64), torch.randint(0, 40, (6,))
    monkeypatch.setattr("prl.trainer.logprobs.on_gpu", lambda tensor: True)
    monkeypatch.setattr("prl.trainer.logprobs.fused", lambda function: function)
    lse, logprobs, entropy = softmax_numbers(logits.clone(), targets)
    expected = logits.log_softmax(-1)
    torch.testing.assert_close(lse, logits.logsumexp(-1))
    torch.testing.assert_close(logprobs, expected[torch.arange(6), targets])
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1))
    less = softmax_less_target(logits.clone(), lse, targets, torch.float32)
    hot = torch.nn.functional.one_hot(targets, 40)
    torch.testing.assert_close(less, (expected.exp() - hot).float())


def test_large_logits_do_not_overflow():
    hidden, weight = torch.tensor([[1e4], [-1e4]], requires_grad=True), torch.tensor([[1.0], [0.0], [-1.0]])
    logprobs, entropy = chunked_logprobs(hidden, weight, torch.tensor([0, 0]), torch.ones(2))
    logprobs.sum().backward()
    assert logprobs.tolist() == [0.0, -2e4] and entropy.tolist() == [0.0, 0.0]
    assert hidden.grad.flatten().tolist() == [0.0, 2.0]


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_only_what_needs_a_gradient_gets_one(frozen):
    hidden, weight, targets, temperatures, _ = problem()
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    chunked_logprobs(hidden, weight, targets, temperatures, chunk=4)[0].sum().backward()
    assert (hidden.grad is None) == (frozen == "hidden") and (weight.grad is None) == (frozen == "weight")


def test_zero_tokens():
    hidden, weight, targets, temperatures, _ = problem(tokens=0)
    logprobs, entropy = chunked_logprobs(hidden, weight, targets, temperatures)
    logprobs.sum().backward()
    assert logprobs.shape == entropy.shape == (0,) and hidden.grad.shape == (0, 8) and not weight.grad.any()


def test_temperature_zero_leaves_the_logits_alone():
    hidden, weight, targets, _, _ = problem()
    zero, one = (chunked_logprobs(hidden, weight, targets, torch.full((37,), t)) for t in (0.0, 1.0))
    assert torch.equal(zero[0], one[0]) and torch.equal(zero[1], one[1])


def test_tokens_without_gradient_take_no_part_in_the_backward():
    """A broken padding row (NaN) reaches nobody's gradient as long as the loss does not use it."""
    hidden, weight, targets, temperatures, _ = problem()
    upstream = torch.ones(37, dtype=torch.float64)
    upstream[::3] = 0
    _, _, expected = grads(lambda: plain(hidden, weight, targets, temperatures), (hidden, weight), upstream)
    broken = hidden.detach().clone()
    broken[::3] = math.nan
    broken.requires_grad_()
    logprobs, _ = chunked_logprobs(broken, weight, targets, temperatures, chunk=4)
    ours = torch.autograd.grad(torch.where(upstream > 0, logprobs, 0.0).sum(), (broken, weight))
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert not ours[0][::3].any()


@pytest.mark.parametrize("with_entropy", [False, True], ids=["", "entropy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_does_not_grow_with_tokens_times_vocab(dtype, with_entropy):
    """Neither kept for the backward nor made on the way, in either direction."""
    tokens, dim, vocab, chunk = 96, 4, 500, 8
    hidden, weight, targets, temperatures, _ = problem(tokens, dim, vocab, dtype=dtype)
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x)
    with hooks, LargestTensor() as forward:
        logprobs, entropy = chunked_logprobs(hidden, weight, targets, temperatures, chunk=chunk)
    # The engine runs a CPU backward in this thread, so the mode sees it too.
    with LargestTensor() as backward:
        (logprobs.sum() + entropy.sum() if with_entropy else logprobs.sum()).backward()
    assert 0 < max(saved) <= max(hidden.numel(), weight.numel())
    assert forward.elements == chunk * vocab and backward.elements == chunk * vocab
