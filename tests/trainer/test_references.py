"""References of the trainer: divergences from them in a whole step, behind prefixes, and how they follow the policy."""

import copy
import functools

import pytest
import torch
from divergences import merged, plain

from prl.config.trainer import AdamWConfig
from prl.losses import default_loss
from prl.rollouts.messages import Reference, StepBatch
from prl.rollouts.packing import pack
from prl.trainer.trainer import Trainer

HINT = (60, 61, 62)
ASKED = [
    Reference("initial", "reverse_kl"),
    Reference("initial", "forward_kl", prefix=HINT),
    Reference("initial", "jsd", 0.1, prefix=HINT[:1]),
    Reference("ema:0.9", "reverse_kl", prefix=HINT),
    Reference("", "forward_kl"),
    Reference("", "reverse_kl"),
]


def make_trainer(model, references, **settings):
    loads = {name: functools.partial(copy.deepcopy, reference) for name, reference in references.items()}
    options = {"rl_losses": {"": default_loss}, "max_steps": 4, "head_chunk": 7, "max_grad_norm": 1e9} | settings
    return Trainer(model=model, references=loads, optim=AdamWConfig(lr=1e-2), **options)


def probabilities(model, token_ids, temperatures):
    """Of the token in each place but the first, `[tokens - 1, vocab]`."""
    logits = model(torch.tensor([token_ids]), use_cache=False).logits[0, :-1]
    return (logits / torch.tensor(temperatures[1:])[:, None]).softmax(-1)


@pytest.fixture
def policy(tiny):
    """In float64, some updates after the model that the run began with."""
    model, generator = copy.deepcopy(tiny).double(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.fixture
def samples(make_sample, tiny):
    """Two of each comparison, with a prompt in common; without an advantage, so that ref_kl is all they feed."""
    made = []
    for number in range(12):
        sample = make_sample(14, 4, seed=3, advantages=None, rl_weights=[0.0] * 14, reference=ASKED[number % 6])
        sample.token_ids = [*sample.token_ids[:4], *make_sample(14, 4, seed=number).token_ids[4:]]
        sample.temperatures = [[0.5, 1.0, 2.0][place % 3] for place in range(14)]
        sample.ref_kl_weights = [0.0] * 4 + [0.25 + 0.5 * (place % 2) for place in range(9)] + [0.0]
        sample.logprobs[6] = float("nan")  # no member, as in the sampled form
        if not sample.reference.model:
            logprobs, ids = probabilities(tiny, sample.token_ids, [1.0] * 14).log().topk(5 + number % 2)
            sample.top_ids, sample.top_logprobs = [[], *ids.tolist()], [[], *logprobs.tolist()]
            sample.ref_logprobs = [-1.0] * 14
        made.append(sample)
    # One that is compared with nothing: it feeds ce alone.
    ce = make_sample(14, 4, seed=2, advantages=None, rl_weights=[0.0] * 14, reference=ASKED[-1])
    ce.ref_kl_weights, ce.ce_weights = [0.0] * 14, [0.0] * 10 + [1.0] * 4
    return [*made, ce]


def expected_loss(model, initial, samples):
    total, count = 0.0, 0
    for sample in samples:
        how, p = sample.reference, probabilities(model, sample.token_ids, sample.temperatures)
        if how.model:
            temperatures = [1.0] * len(how.prefix) + sample.temperatures
            q = probabilities(initial, [*how.prefix, *sample.token_ids], temperatures)[len(how.prefix) :].detach()
        elif sample.top_ids:
            ids = torch.tensor(sample.top_ids[1:])
            top = torch.tensor(sample.top_logprobs[1:]).double().exp()
            p, q = merged(p, ids), torch.cat([top, 1 - top.sum(1, keepdim=True)], 1)
        if not any(sample.ref_kl_weights):
            rest = p.gather(1, torch.tensor(sample.token_ids[1:])[:, None]).log().squeeze(1)
            ce = -(rest * torch.tensor(sample.ce_weights[1:])).sum() / 4
            continue
        values = plain(p, q, how.divergence, how.beta)
        weights = torch.tensor(sample.ref_kl_weights[1:]) * torch.tensor(sample.logprobs[1:]).isfinite()
        total, count = total + (values * weights).sum(), count + int((weights != 0).sum())
    return total / count, ce, count


@pytest.mark.parametrize(("share", "tokens"), [(True, 64), (False, 64), (True, 10_000)])
def test_a_step_equals_the_whole_vocabulary_in_float64(policy, tiny, samples, share, tokens):
    initial = copy.deepcopy(tiny).double()
    loss, ce, count = expected_loss(policy, initial, samples)
    expected = torch.autograd.grad(loss + ce, list(policy.parameters()))
    rows, _ = pack(samples, 32, 1)
    references = {"initial": initial, "ema:0.9": policy}
    trainer = make_trainer(policy, references, share_prefixes=share, tokens_per_forward=tokens)
    trainer.references["ema:0.9"] = initial
    found = trainer.train_step(StepBatch(1, rows[0], 0))
    assert found["tokens/ref_kl"] == count == 12 * 8
    assert found["loss/ref_kl"] == pytest.approx(loss.item(), rel=1e-6)
    assert found["ref_kl/divergence"] > 0
    for parameter, gradient in zip(policy.parameters(), expected, strict=True):
        assert (parameter.grad - gradient).norm() <= 1e-6 * gradient.norm() + 1e-12


def test_ema_and_lagged_follow_the_policy(tiny, make_sample):
    """From what it is at the start, in the first parameter, step by step."""
    trainer = make_trainer(tiny, dict.fromkeys(["initial", "ema:0.75", "lagged:2"], tiny))
    first = next(tiny.parameters())
    initial = mean = older = first.detach().clone()
    for step in (1, 2, 3):
        trainer.train_step(StepBatch(step, pack([make_sample(14, 4)], 32, 1)[0][0], 0))
        mean = 0.75 * mean + 0.25 * first.detach()
        older = first.detach().clone() if step == 2 else older
        values = {name: next(model.parameters()) for name, model in trainer.references.items()}
        torch.testing.assert_close(values["ema:0.75"], mean)
        assert torch.equal(values["initial"], initial) and torch.equal(values["lagged:2"], older)
    assert not torch.equal(mean, first) and not torch.equal(older, first)


@pytest.mark.parametrize("cut", ["top_ids", "top_logprobs"])
def test_a_sample_without_the_references_top_is_refused(samples, cut):
    sample = samples[4]
    setattr(sample, cut, getattr(sample, cut)[:5] + [[]] + getattr(sample, cut)[6:])
    with pytest.raises(ValueError, match=r"asks for the forward_kl .* lacks its top_ids or top_logprobs"):
        pack([sample], 32, 1)
