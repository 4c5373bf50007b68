"""The gibberish filter: one token that could hardly be, or a whole rollout that could hardly be."""

import math
import warnings

import pytest

from prl.orchestrator.filters.gibberish import Gibberish

LOW = -math.log(150_000) - 2.0  # -13.918...
NOT_MEASURED = (-math.inf, math.nan, math.inf, -9999.0, -9984.0)


def gibberish(*, vocab_size=150_000, **knobs):
    made = Gibberish(**knobs)
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
def test_by_default_the_rare_tokens_are_those_of_the_models_vocabulary(rollout_of, says, vocab_size, common, rare):
    made = gibberish(vocab_size=vocab_size)
    assert not made.matches(rollout_of([says(ids=[common], p=-40.0)]))
    assert made.matches(rollout_of([says(ids=[rare], p=-40.0)]))


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"token_id_threshold": 100_000}, ["filters.pre_batch.g.token_id_threshold=100000"]),
        ({"token_id_threshold": 64}, ["filters.pre_batch.g.token_id_threshold=64"]),
        ({"token_id_threshold": 63}, ["filters.pre_batch.g.token_id_threshold=63"]),  # ids are 0 to 63
        ({"token_id_threshold": 62}, []),
        ({}, []),
        ({"mode": "mean_logprob"}, []),
    ],
)
def test_a_threshold_above_every_token_warns(knobs, said):
    made = Gibberish(**knobs)
    made.check("filters.pre_batch.g")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made.attach(vocab_size=64, longest=64)
    assert [str(warning.message).split()[0] for warning in caught] == said


def test_what_is_low_depends_on_the_vocabulary_and_the_offset(rollout_of, says):
    rollout = rollout_of([says(ids=[9], p=-6.0)])
    for vocab_size, offset, matches in ((100, 2.0, False), (54, 2.0, True), (55, 2.0, False), (100, 1.0, True)):
        # ln 100 = 4.605, ln 54 = 3.989, ln 55 = 4.007
        assert gibberish(vocab_size=vocab_size, token_id_threshold=8, logprob_offset=offset).matches(rollout) is matches


def test_an_unlikely_common_token_beside_a_likely_rare_one_is_none(rollout_of, says):
    node = says(-40.0, -0.1)
    node.token_ids[1:] = [5, 120_000]
    assert not gibberish().matches(rollout_of([node]))
    node.token_ids[1:] = [120_000, 5]
    assert gibberish().matches(rollout_of([node])), "each token has its own logprob"


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


def test_noise_on_the_second_branch_is_found(rollout_of, says, asks):
    first = asks()
    rollout = rollout_of([first, says(ids=[1], p=-0.1)], [first, asks(), says(ids=[130_000], p=-20.0)])
    assert gibberish().matches(rollout)


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


@pytest.mark.parametrize("mode", ["token", "mean_logprob"])
def test_a_frozen_models_rollout_has_no_logprobs(rollout_of, says, mode):
    assert not gibberish(mode=mode).matches(rollout_of([says(ids=[120_000] * 3, p=None)], live=False))
    # An endpoint may send them unasked: they are another model's.
    assert not gibberish(mode=mode).matches(rollout_of([says(ids=[120_000] * 3, p=-20.0)], live=False))


@pytest.mark.parametrize("mode", ["token", "mean_logprob"])
def test_a_rollout_that_sampled_nothing_matches_nothing(rollout_of, says, asks, mode):
    for rollout in (rollout_of([asks()]), rollout_of([asks(), says()])):
        assert rollout.samples == []
        assert not gibberish(mode=mode, threshold=0.0).matches(rollout)
