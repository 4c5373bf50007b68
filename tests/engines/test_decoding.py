"""Sampling in this process: the distribution that tokens are drawn from, their logprobs, what ends a continuation."""

import math
from collections import Counter

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from prl.engines.decoding import Request, continuations_of, draw, sample, score
from prl.models import model_path

PROMPTS = [[5, 6, 7], [8] * 11, list(range(40, 60)), [3, 3]]


@pytest.fixture(scope="module")
def tiny():
    return AutoModelForCausalLM.from_pretrained(model_path("tiny"), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def toy():
    """A random model of eight tokens, in float64."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    config = Qwen3Config(vocab_size=8, num_attention_heads=2, num_key_value_heads=1, initializer_range=0.5, **sizes)
    return Qwen3ForCausalLM(config).double().eval()


def requests(**options):
    options = {"n": 3, "max_tokens": 12, **options}
    return [Request(prompt_ids=ids, seed=100 * place, **options) for place, ids in enumerate(PROMPTS)]


def tokens(groups):
    return [[continuation.token_ids for continuation in group] for group in groups]


def text(token_ids, skip_special_tokens=True):
    return " ".join(f"<{token}>" if token == 9 and not skip_special_tokens else str(token) for token in token_ids)


@torch.no_grad()
def forward(model, token_ids, temperature=1.0):
    """The logprob of each token but the first, by a plain forward pass over the whole sequence."""
    logits = model(torch.tensor([token_ids])).logits[0, :-1].double() / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(token_ids[1:])[:, None]).squeeze(1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_of_sampled_tokens_equal_a_plain_forward_pass(tiny, temperature):
    for group in sample(tiny, requests(temperature=temperature), text):
        for continuation in group:
            whole = continuation.request.prompt_ids + continuation.token_ids
            expected = forward(tiny, whole, temperature)[-len(continuation.token_ids) :]
            torch.testing.assert_close(torch.tensor(continuation.logprobs).double(), expected, atol=1e-5, rtol=1e-5)


def test_scores_equal_a_plain_forward_pass(tiny):
    for count, sequence in enumerate(PROMPTS):
        scored = score(tiny, PROMPTS, range(len(PROMPTS)))[count]
        assert scored.own[0] == 0.0 and len(scored.own) == len(scored.ids) == len(scored.logprobs) == len(sequence)
        torch.testing.assert_close(torch.tensor(scored.own[1:]).double(), forward(tiny, sequence), atol=1e-5, rtol=1e-5)
        best, ids = tiny(torch.tensor([sequence])).logits[0, :-1].log_softmax(-1).topk(count)
        assert scored.ids == [[], *ids.tolist()]
        torch.testing.assert_close(torch.tensor(scored.logprobs[1:]).view_as(best), best, atol=1e-5, rtol=1e-5)


def test_a_request_has_the_same_tokens_whatever_is_sampled_beside_it(tiny):
    together = tokens(sample(tiny, requests(), text))
    alone = [tokens(sample(tiny, [request], text))[0] for request in requests()]
    reversed_ = tokens(sample(tiny, requests()[::-1], text))[::-1]
    assert together == alone == reversed_
    several, one = requests()[1], requests(n=1)[1]
    assert tokens(sample(tiny, [one], text))[0][0] == tokens(sample(tiny, [several], text))[0][0]
    assert len({tuple(ids) for ids in together[0]}) == 3, "each continuation draws for itself"


def chi_square(counts, probabilities):
    total = sum(counts.values())
    return sum((counts[token] - total * p) ** 2 / (total * p) for token, p in enumerate(probabilities) if p > 0)


def likeliest(probabilities, top_k, top_p):
    """Whether each token is among the `top_k` likeliest, and of these among the first that have `top_p` together."""
    best = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])[:top_k]
    total, taken, share = sum(probabilities[token] for token in best), [], 0.0
    for token in best:
        if share < top_p:
            taken.append(token)
        share += probabilities[token] / total
    return [token in taken for token in range(len(probabilities))]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.5}, {"top_k": 4}, {"top_k": 9, "top_p": 0.6}])
def test_tokens_come_as_often_as_the_softmax_says(toy, options):
    n = 4000
    (group,) = sample(toy, [Request(prompt_ids=[1, 2, 3], n=n, max_tokens=1, seed=7, **options)], text)
    with torch.no_grad():
        logits = toy(torch.tensor([[1, 2, 3]])).logits[0, -1] / options.get("temperature", 1.0)
    left = likeliest(logits.softmax(-1).tolist(), options.get("top_k", 99), options.get("top_p", 1.0))
    expected = torch.where(torch.tensor(left), logits, -math.inf).softmax(-1).tolist()
    counts = Counter(continuation.token_ids[0] for continuation in group)
    assert chi_square(counts, expected) < 7 + 4 * math.sqrt(14)
    for continuation in group[:20]:
        assert continuation.logprobs[0] == pytest.approx(math.log(expected[continuation.token_ids[0]]), abs=1e-5)


def test_the_second_token_follows_the_first_ones_distribution(toy):
    (group,) = sample(toy, [Request(prompt_ids=[1, 2], n=4000, max_tokens=2, seed=1)], text)
    first = Counter(continuation.token_ids[0] for continuation in group).most_common(1)[0][0]
    counts = Counter(each.token_ids[1] for each in group if each.token_ids[0] == first)
    with torch.no_grad():
        expected = toy(torch.tensor([[1, 2, first]])).logits[0, -1].softmax(-1).tolist()
    assert chi_square(counts, expected) < 7 + 4 * math.sqrt(14)


def test_temperature_zero_takes_the_likeliest_token(toy):
    (group,) = sample(toy, [Request(prompt_ids=[1, 2], n=2, max_tokens=6, temperature=0.0)], text)
    ids = [1, 2]
    for _ in range(6):
        with torch.no_grad():
            ids.append(int(toy(torch.tensor([ids])).logits[0, -1].argmax()))
    assert [each.token_ids for each in group] == [ids[2:]] * 2


def test_what_ends_a_continuation_stays_in_it(toy):
    free = tokens(sample(toy, [Request(prompt_ids=[1, 2], max_tokens=30, seed=3)], text))[0][0]
    assert len(free) == 30
    stop = free[4]
    ends = free.index(stop) + 1
    cases = [
        ({"max_tokens": 4}, free[:4], "length"),
        ({"stop_token_ids": [stop]}, free[:ends], "stop"),
        ({"stop_token_ids": [stop], "max_tokens": ends}, free[:ends], "stop"),
        ({"stop": [text(free[2:5])]}, free[:5], "stop"),
    ]
    for options, expected, reason in cases:
        options = {"max_tokens": 30, "seed": 3, **options}
        ((continuation,),) = sample(toy, [Request(prompt_ids=[1, 2], **options)], text)
        assert (continuation.token_ids, continuation.finish_reason) == (expected, reason), options
        assert len(continuation.logprobs) == len(expected)


def test_a_stop_string_may_name_a_special_token():
    (continuation,) = continuations_of(Request(prompt_ids=[1], max_tokens=9, stop=["<9>"], skip_special_tokens=False))
    for token in (4, 9):
        assert continuation.finish_reason is None
        continuation.take(token, -1.0, text)
    assert continuation.finish_reason == "stop"


def test_logits_that_are_not_finite_are_refused():
    continuations = continuations_of(Request(prompt_ids=[1], max_tokens=1))
    with pytest.raises(ValueError, match="finite"):
        draw(torch.tensor([[0.0, float("nan")]]), continuations)


def test_a_token_of_probability_zero_is_never_drawn():
    (continuation,) = continuations_of(Request(prompt_ids=[1], max_tokens=3))
    continuation.uniform = [0.0, 1 - 2**-53, 0.5]
    for place in range(3):
        token_ids, _ = draw(torch.tensor([[-1e9, 5.0, -1e9]]), [continuation])
        continuation.take(int(token_ids[0]), 0.0, text)
        assert continuation.token_ids[place] == 1


def test_tokens_are_drawn_on_the_device_of_the_logits():
    """What is made without a device is on another one here, as on a GPU it would be on the CPU."""
    (continuation,) = continuations_of(Request(prompt_ids=[1], max_tokens=9))
    logits = torch.zeros(1, 5)
    with torch.device("meta"):
        token_ids, logprobs = draw(logits, [continuation])
    assert token_ids.device == logprobs.device == logits.device
