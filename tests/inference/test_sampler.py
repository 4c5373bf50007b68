"""The sampler: what a request carries."""

from types import SimpleNamespace

import pytest

from prl.inference.sampler import OverlongPrompt, Sampler, derive_seed
from prl.inference.sampling import SamplingConfig


class Pool:
    """Remembers what it was asked."""

    version = 3
    model = "policy"

    @property
    def cache_salt(self):
        return f"v{self.version}"

    async def generate(self, prompt_ids, sampling, *, n, cache_salt):
        self.asked = SimpleNamespace(prompt_ids=prompt_ids, n=n, cache_salt=cache_salt, **sampling)
        return []


def make(renderer, seed=0, **sampling):
    return Sampler(SamplingConfig(**sampling), Pool(), renderer, max_model_len=10, seed=seed)


async def test_a_request_carries_the_sampling_the_version_and_the_stop_tokens(renderer):
    sampler = make(renderer, temperature=0.7)
    await sampler.complete([1, 2, 3], n=4, key="math/1+1/0")
    asked = sampler.pool.asked
    assert (asked.prompt_ids, asked.n, asked.temperature, asked.cache_salt) == ([1, 2, 3], 4, 0.7, "v3")
    assert asked.stop_token_ids == renderer.get_stop_token_ids() and asked.stop_token_ids
    sampler.pool.version = 4
    await sampler.complete([1], n=1, key="k")
    assert sampler.pool.asked.cache_salt == "v4" and sampler.version == 4


@pytest.mark.parametrize(("max_tokens", "expected"), [(None, 6), (5, 5), (9, 6)])
async def test_max_tokens_is_what_is_asked_for_or_what_the_model_has_room_for(renderer, max_tokens, expected):
    sampler = make(renderer, max_tokens=max_tokens)
    await sampler.complete([1, 2, 3], n=1, key="k")
    assert sampler.pool.asked.max_tokens == expected


async def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers(renderer):
    with pytest.raises(OverlongPrompt, match="9 tokens leaves no room for an answer: model.max_model_len is 10"):
        await make(renderer).complete([1] * 9, n=1, key="k")
    await make(renderer).complete([1] * 8, n=1, key="k")


async def test_the_seed_of_a_request_depends_on_the_run_and_its_name_alone(renderer):
    seeds = []
    for seed, key in ((0, "a"), (0, "a"), (0, "b"), (1, "a")):
        sampler = make(renderer, seed=seed)
        await sampler.complete([1], n=1, key=key)
        seeds.append(sampler.pool.asked.seed)
    assert seeds[0] == seeds[1] and len(set(seeds)) == 3


def test_derived_seeds_stay_the_same_across_processes_and_releases():
    assert derive_seed(0, "math/1+1/0") == 1527478518
    assert all(0 <= derive_seed(seed, "k") < 2**31 for seed in range(200))
    assert len({derive_seed(seed, "k") for seed in range(200)}) == 200


@pytest.mark.parametrize("max_tokens", [None, 1, 3, 100])
@pytest.mark.parametrize("length", range(1, 9))
async def test_the_last_place_stays_free_for_the_token_that_scoring_samples(renderer, max_tokens, length):
    sampler = make(renderer, max_tokens=max_tokens)
    await sampler.complete([1] * length, n=1, key="k")
    longest = length + sampler.pool.asked.max_tokens
    assert longest <= 9 and (longest == 9 or sampler.pool.asked.max_tokens == max_tokens)


class Frozen(Pool):
    """Remembers what was done with it."""

    version = cache_salt = None
    timeout_s = 7.5
    done = ()

    async def wait_ready(self, timeout_s):
        self.done += (timeout_s,)

    async def close(self):
        self.done += ("closed",)


async def test_a_frozen_source_is_waited_for_by_its_own_deadline_and_closed(renderer):
    sampler = Sampler(SamplingConfig(), pool := Frozen(), renderer, max_model_len=10, seed=0)
    assert sampler.version is None
    await sampler.setup()
    await sampler.complete([1], n=2, key="k")
    assert pool.asked.cache_salt is None and pool.asked.n == 2
    await sampler.close()
    assert pool.done == (7.5, "closed")


async def test_the_policys_client_belongs_to_the_run(renderer):
    sampler = make(renderer)  # its pool has no wait_ready and no close
    await sampler.setup()
    await sampler.close()
    await sampler.complete([1], n=1, key="k")
