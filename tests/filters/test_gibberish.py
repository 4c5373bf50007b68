"""The gibberish filter: one token that could hardly be, or a whole rollout that could hardly be."""

import math

import pytest

from prl.filters.gibberish import Gibberish

LOW = -math.log(150_000) - 2.0  # -13.918...
NOT_MEASURED = (-math.inf, math.nan, math.inf, -9999.0, -9984.0)


def gibberish(*, vocab_size=150_000, **options):
    made = Gibberish(**options)
    made.attach(vocab_size=vocab_size)
    return made


@pytest.mark.parametrize(
    ("token", "logprob", "matches"),
    [
        (100_001, -13.92, True),
        (100_001, -13.91, False),  # -ln 150000 - 2 = -13.918
        (100_000, -13.92, False),  # the threshold itself is no rare token
        (149_999, -40.0, True),
        (5, -40.0, False),
        (100_001, LOW, False),
        (100_001, math.nextafter(LOW, -math.inf), True),
    ],
)
def test_a_rare_token_far_below_a_uniform_draw(rollout_of, says, asks, token, logprob, matches):
    rollout = rollout_of([asks(), says(ids=[3, token, 4], p=logprob)])
    assert gibberish().matches(rollout) is matches


@pytest.mark.parametrize(
    ("vocab_size", "common", "rare"),
    [
        (150_000, 100_000, 100_001),
        (100_002, 100_000, 100_001),
        (100_001, 75_000, 75_001),  # of which no token has an id above 100000
        (100_000, 75_000, 75_001),
        (64, 48, 49),
        (10, 7, 8),
    ],
)
def test_default_threshold_follows_the_vocabulary(rollout_of, says, vocab_size, common, rare):
    made = gibberish(vocab_size=vocab_size)
    assert not made.matches(rollout_of([says(ids=[common], p=-40.0)]))
    assert made.matches(rollout_of([says(ids=[rare], p=-40.0)]))


def test_tokens_that_were_not_sampled_are_not_looked_at(rollout_of, says, asks):
    env, node = asks(), says(-40.0)
    env.token_ids = [120_000] * 3
    node.token_ids[0] = 120_000  # the template's
    assert not gibberish().matches(rollout_of([env, node]))


def test_the_mean_counts_sampled_tokens_alone(rollout_of, says, asks):
    rollout = rollout_of([asks(), says(-1.0, -2.0), asks(), says(-6.0)])  # mean -3
    assert not gibberish(mode="mean_logprob", threshold=-3.0).matches(rollout)
    assert gibberish(mode="mean_logprob", threshold=-2.99).matches(rollout)
    assert not gibberish(mode="mean_logprob").matches(rollout)
    assert gibberish(mode="mean_logprob").matches(rollout_of([says(-4.0, -4.1)]))


def test_a_message_on_two_branches_counts_once(rollout_of, says, asks):
    root, shared = asks(), says(-2.0, -2.0)
    rollout = rollout_of([root, shared, asks(), says(-8.0)], [root, shared, asks(), says(-8.0)])
    assert gibberish(mode="mean_logprob", threshold=-4.9).matches(rollout)  # -20 / 4 = -5; twice it would be -24 / 6
    assert not gibberish(mode="mean_logprob", threshold=-5.0).matches(rollout)


@pytest.mark.parametrize("mode", ["token", "mean_logprob"])
@pytest.mark.parametrize("odd", NOT_MEASURED)
def test_a_value_that_is_no_logprob_is_no_sign(rollout_of, says, mode, odd):
    node = says(-0.1, odd, -0.1)
    node.token_ids[2] = 120_000
    assert not gibberish(mode=mode).matches(rollout_of([node]))
    noisy = says(odd, -20.0, odd)
    noisy.token_ids[2] = 120_000
    assert gibberish(mode=mode).matches(rollout_of([noisy])), "and hides none"
    assert not gibberish(mode=mode).matches(rollout_of([says(ids=[120_000] * 3, p=odd)]))
