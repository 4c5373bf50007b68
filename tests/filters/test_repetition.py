"""The repetition filter: long runs of tokens that were certain, and phrases that come again."""

import math

import pytest

from prl.filters.repetition import Repetition

SURE, UNSURE = math.log(0.995), math.log(0.9)
NOT_MEASURED = (math.inf, math.nan, -math.inf, -9999.0)


def repetition(**options):
    return Repetition(**options)


def ngram(n, threshold=0.4):
    return repetition(mode="ngram", n=n, threshold=threshold)


@pytest.mark.parametrize(
    ("logprobs", "matches"),
    [
        ([SURE] * 4, True),
        ([SURE] * 3, False),
        ([UNSURE] + [SURE] * 4, True),
        ([SURE] * 3 + [UNSURE] + [SURE] * 3, False),
        ([SURE] * 3 + [UNSURE] + [SURE] * 5 + [UNSURE], True),
        ([0.0] * 4, True),
        ([math.log(0.99)] * 4, False),  # not above the threshold
        ([math.nextafter(math.log(0.99), 0.0)] * 4, True),
    ],
)
def test_a_window_of_certain_tokens(rollout_of, says, asks, logprobs, matches):
    assert repetition(window=4).matches(rollout_of([asks(), says(*logprobs)])) is matches


@pytest.mark.parametrize(("longest", "window"), [(10_000, 3000), (6000, 3000), (5999, 2999), (64, 32), (2, 1), (1, 1)])
def test_the_default_window_is_half_of_the_longest_completion(rollout_of, says, longest, window):
    made = repetition()
    made.attach(vocab_size=64, longest=longest)
    assert made.matches(rollout_of([says(*[SURE] * window)]))
    assert not made.matches(rollout_of([says(*[SURE] * (window - 1), UNSURE)]))


def test_the_envs_tokens_between_turns_interrupt_no_run(rollout_of, says, asks):
    rollout = rollout_of([asks(), says(UNSURE, SURE, SURE), asks(), says(SURE), asks(), says(SURE, UNSURE)])
    assert repetition(window=4).matches(rollout) and not repetition(window=5).matches(rollout)


def test_a_shared_message_counts_on_each_of_its_branches(rollout_of, says, asks):
    root, shared = asks(), says(SURE, SURE)
    rollout = rollout_of([root, shared, asks(), says(UNSURE)], [root, shared, asks(), says(SURE)])
    assert not any(rollout.samples[1].mask[:6]), "it trains on the first"
    assert repetition(window=3).matches(rollout), "yet the second branch goes on from it"
    assert not repetition(window=4).matches(rollout)


@pytest.mark.parametrize("odd", NOT_MEASURED)
def test_a_value_that_is_no_logprob_ends_a_run(rollout_of, says, odd):
    assert not repetition(window=4).matches(rollout_of([says(SURE, SURE, odd, SURE, SURE)]))
    assert not repetition(window=4).matches(rollout_of([says(*[odd] * 9)]))
    assert repetition(window=2).matches(rollout_of([says(odd, SURE, SURE, odd)]))


def test_a_frozen_models_rollout_matches_by_its_tokens_alone(rollout_of, says):
    silent = rollout_of([says(ids=[5] * 9, p=None)], live=False)
    spoken = rollout_of([says(ids=[5] * 9, p=SURE)], live=False)
    for rollout in (silent, spoken):
        assert not repetition(window=2).matches(rollout)
        assert ngram(2).matches(rollout)


@pytest.mark.parametrize(
    ("ids", "n", "matches"),
    [
        ([1, 2, 1, 2, 1, 2], 2, True),  # 12 21 12 21 12: 3 of 5
        ([1, 2, 3, 1, 2, 3], 2, False),  # 12 23 31 12 23: 2 of 5 is not above 0.4
        ([1, 2, 3, 1, 2, 3, 1], 2, True),  # and 31: 3 of 6
        ([1, 2, 3, 4, 5, 6], 1, False),
        ([1, 1, 2, 2, 3], 1, False),  # 2 of 5
        ([1, 1, 1, 2, 3], 1, False),  # 2 of 5
        ([1, 1, 1, 2, 2], 1, True),  # 3 of 5
        ([7, 7, 7, 7, 7], 5, False),  # one 5-gram
        ([7, 7, 7, 7, 7], 6, False),  # none
        ([7, 7, 7, 7, 7], 4, True),  # 1 of 2
    ],
)
def test_the_share_of_ngrams_that_stood_there_before(rollout_of, says, asks, ids, n, matches):
    assert ngram(n).matches(rollout_of([asks(), says(ids=ids, p=-1.0)])) is matches


def test_the_default_phrase_has_four_tokens(rollout_of, says):
    rollout = rollout_of([says(ids=[1, 2, 3, 4, 5] * 2, p=-1.0)])  # 7 four-grams, 2 of them again: 0.286
    assert not repetition(mode="ngram").matches(rollout) and repetition(mode="ngram", threshold=0.28).matches(rollout)
    again = rollout_of([says(ids=[1, 2, 3, 4, 5] * 3, p=-1.0)])  # 12, 7 of them again: 0.583
    assert repetition(mode="ngram").matches(again)


def test_ngrams_span_turns_without_the_envs_tokens(rollout_of, says, asks):
    turns = [asks(), says(ids=[1], p=-1.0), asks(), says(ids=[2], p=-1.0), asks(), says(ids=[1, 2], p=-1.0)]
    # 1 2 1 2: the pairs 12 21 12, 1 of 3; with the env's own threes in between most would repeat
    assert ngram(2, 0.33).matches(rollout_of(turns)) and not ngram(2, 0.34).matches(rollout_of(turns))


def test_each_branch_has_a_share_of_its_own(rollout_of, says, asks):
    root = asks()
    apart = rollout_of([root, says(ids=[1, 2, 3], p=-1.0)], [root, asks(), says(ids=[1, 2, 3], p=-1.0)])
    assert not ngram(1, 0.0).matches(apart), "the same words on two branches are no repetition"
    second = rollout_of([asks(), says(ids=[1, 2, 3], p=-1.0)], [asks(), says(ids=[4, 4, 4], p=-1.0)])
    assert ngram(1).matches(second)
