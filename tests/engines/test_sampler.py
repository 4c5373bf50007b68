"""The sampler: its options, what a request carries, and what training refuses."""

from dataclasses import asdict, fields
from types import SimpleNamespace
from typing import Any

import pytest

from prl.base.errors import ConfigError, EngineError
from prl.config.build import build
from prl.config.schema import as_run
from prl.engines.replies import Completion
from prl.engines.sampler import NEUTRAL, OverlongPrompt, Sampler, derive_seed, validate_for_training
from prl.rollouts.inputs import ModelInput

OTHERS = {"top_p": 0.9, "top_k": 20, "min_p": 0.05}
"""A value other than the neutral one for each setting that changes the distribution."""


class Pool:
    """Remembers what it was asked."""

    version = 3
    model = "policy"

    async def generate(self, prompt, sampling, *, n, prefix=None):
        self.sent = sampling
        self.asked = SimpleNamespace(prompt_ids=prompt.token_ids, n=n, prefix=prefix, **sampling)
        return []


def make(renderer, run_seed=0, pool=None, **options):
    sampler = Sampler(**options)
    sampler.attach(pool=pool or Pool(), renderer=renderer, max_model_len=10, seed=run_seed)
    return sampler


async def test_a_request_carries_the_sampling_and_the_stop_tokens(renderer):
    sampler = make(renderer, temperature=0.7)
    await sampler.complete(ModelInput([1, 2, 3]), n=4, key="math/1+1/0", prefix="g")
    asked = sampler.pool.asked
    assert (asked.prompt_ids, asked.n, asked.temperature, asked.prefix) == ([1, 2, 3], 4, 0.7, "g")
    assert asked.stop_token_ids == renderer.get_stop_token_ids() and asked.stop_token_ids
    sampler.pool.version = 4
    assert sampler.version == 4


@pytest.mark.parametrize(
    ("token_ids", "says"),
    [
        ([3, 512], "at http://a, http://b sent token 512, which the policy does not have: its embedding has 512 rows"),
        ([-1, 3], "sent token -1, which the policy does not have"),
        ([3] * 7, "sent 7 tokens, where at most 6 were asked for"),
    ],
)
async def test_tokens_that_the_policy_does_not_have_are_no_reply(renderer, token_ids, says):
    class Wrong(Pool):
        urls = ("http://a", "http://b")

        async def generate(self, prompt, sampling, *, n, prefix=None):
            return [Completion([3], [-0.5], "stop"), Completion(token_ids, [-0.5] * len(token_ids), "stop")]

    sampler = Sampler()
    sampler.attach(pool=Wrong(), renderer=renderer, max_model_len=10, seed=0, vocab_size=512)
    with pytest.raises(EngineError, match=says):
        await sampler.complete(ModelInput([1, 2, 3]), n=2, key="k")


async def test_the_default_request_names_nothing_that_is_neutral(renderer):
    sampler = make(renderer)
    await sampler.complete(ModelInput([1, 2, 3]), n=4, key="math/1+1/0")
    assert list(sampler.pool.sent.items()) == [
        ("temperature", 1.0),
        ("seed", 1527478518),
        ("stop_token_ids", renderer.get_stop_token_ids()),
        ("max_tokens", 6),
    ]


@pytest.mark.parametrize(("name", "value"), OTHERS.items())
async def test_a_setting_that_changes_the_distribution_is_sent_alone(renderer, name, value):
    assert OTHERS.keys() == NEUTRAL.keys()
    sampler = make(renderer, **{name: value})
    assert sampler.parameters("k") == make(renderer).parameters("k") | {name: value}
    await sampler.complete(ModelInput([1]), n=1, key="k")
    assert sampler.pool.sent[name] == value


def test_stop_strings_are_searched_for_in_a_text_with_special_tokens(renderer):
    sampler = make(renderer, stop=["\n\n", "<|im_end|>"])
    expected = {"stop": ["\n\n", "<|im_end|>"], "skip_special_tokens": False}
    assert sampler.parameters("k") == make(renderer).parameters("k") | expected


@pytest.mark.parametrize(("max_tokens", "expected"), [(None, 6), (5, 5), (9, 6)])
async def test_max_tokens_is_bounded_by_the_models_room(renderer, max_tokens, expected):
    sampler = make(renderer, max_tokens=max_tokens)
    await sampler.complete(ModelInput([1, 2, 3]), n=1, key="k")
    assert sampler.pool.asked.max_tokens == expected


async def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers(renderer):
    with pytest.raises(OverlongPrompt, match="9 tokens leaves no room for an answer: model.max_model_len is 10"):
        await make(renderer).complete(ModelInput([1] * 9), n=1, key="k")
    await make(renderer).complete(ModelInput([1] * 8), n=1, key="k")


async def test_request_seed_depends_on_run_and_name(renderer):
    seeds = []
    for seed, key in ((0, "a"), (0, "a"), (0, "b"), (1, "a")):
        sampler = make(renderer, seed)
        await sampler.complete(ModelInput([1]), n=1, key=key)
        seeds.append(sampler.pool.asked.seed)
    assert seeds[0] == seeds[1] and len(set(seeds)) == 3


def test_a_seed_of_its_own_replaces_the_runs(renderer):
    def seed_of(run_seed, **options):
        return make(renderer, run_seed, **options).parameters("k")["seed"]

    assert seed_of(0, seed=7) == seed_of(1, seed=7) == seed_of(7) == derive_seed(7, "k")
    assert seed_of(5, seed=0) == seed_of(0), "0 is a seed, not none"


def test_derived_seeds_stay_the_same_across_processes_and_releases():
    assert derive_seed(0, "math/1+1/0") == 1527478518
    assert all(0 <= derive_seed(seed, "k") < 2**31 for seed in range(200))
    assert len({derive_seed(seed, "k") for seed in range(200)}) == 200


@pytest.mark.parametrize("max_tokens", [None, 1, 3, 100])
@pytest.mark.parametrize("length", range(1, 9))
async def test_the_last_place_stays_free_for_the_token_that_scoring_samples(renderer, max_tokens, length):
    sampler = make(renderer, max_tokens=max_tokens)
    await sampler.complete(ModelInput([1] * length), n=1, key="k")
    longest = length + sampler.pool.asked.max_tokens
    assert longest <= 9 and (longest == 9 or sampler.pool.asked.max_tokens == max_tokens)


def test_a_limit_of_a_seat_does_not_replace_the_samplers_own(renderer):
    free, limited = make(renderer), make(renderer, max_tokens=3)
    assert free.limited(5).max_tokens == 5 and free.max_tokens is None
    assert limited.limited(5) is limited


# --- evaluation -------------------------------------------------------------------------------------------------------


def test_a_changed_sampler_has_what_is_named_and_keeps_the_rest(renderer):
    training = make(renderer, temperature=0.7, max_tokens=5, stop=["a"], seed=3)
    before = asdict(training)
    changed = training.changed({"temperature": 0.0, "top_p": 0.9, "stop": ["b"]})
    assert asdict(changed) == before | {"temperature": 0.0, "top_p": 0.9, "stop": ["b"]}
    assert (changed.pool, changed.renderer, changed.max_model_len) == (training.pool, renderer, 10)
    assert asdict(training) == before, "training goes on as before"


async def test_greedy_samples_once_and_answers_for_all(renderer):
    sampler = make(renderer, temperature=0.0)
    await sampler.complete(ModelInput([1]), n=4, key="k")
    assert (sampler.pool.asked.n, sampler.pool.asked.temperature) == (1, 0.0)


def test_an_override_has_every_option_and_none_of_them_set():
    assert as_run() == dict.fromkeys(option.name for option in fields(Sampler))


# --- training ---------------------------------------------------------------------------------------------------------


REFUSED = [
    ({"temperature": -0.1}, "sampling.temperature"),
    ({"temperature": float("nan")}, "sampling.temperature"),
    ({"top_p": 0.0}, "sampling.top_p"),
    ({"min_p": 1.0}, "sampling.min_p"),
    ({"max_tokens": 0}, "sampling.max_tokens"),
    ({"seed": -1}, "sampling.seed"),
    ({"stop": ["a", ""]}, "sampling.stop has an empty string"),
    ({"max_tokens": 10}, "sampling.max_tokens=10 must be below model.max_model_len=10"),
]
OF_THE_POLICY = [
    *(({name: value}, f"sampling.{name}={value}: the engine would give") for name, value in OTHERS.items()),
    ({"temperature": 0.0}, "sampling.temperature must be at least 0.01"),
    ({"temperature": 0.0099}, "sampling.temperature must be at least 0.01"),
]
"""What a frozen source may do: its logprobs are not compared with the trainer's."""


@pytest.mark.parametrize(("options", "key"), REFUSED + OF_THE_POLICY)
def test_what_would_train_wrong_is_refused_by_its_key(options, key):
    node: dict[str, Any] = {"_target_": "prl.engines.sampler.Sampler", **options}
    with pytest.raises(ConfigError) as caught:
        validate_for_training(build(node, Sampler, "sampling"), "sampling", live=True, max_model_len=10)
    assert str(caught.value).startswith(key)
    if (options, key) in OF_THE_POLICY:
        validate_for_training(Sampler(**options), "sampling", live=False, max_model_len=10)
