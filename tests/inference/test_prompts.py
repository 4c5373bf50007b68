"""Sequences of a forward pass that are the same."""

import numpy as np

from prl.inference.prompts import distinct


def batch(*sequences, cached=None, tables=None, size=4):
    """What `distinct` says of `sequences`, of whose tokens the cache holds `cached` already."""
    cached = cached or [0] * len(sequences)
    lens = [len(each) for each in sequences]
    return distinct(
        np.array([token for each in sequences for token in each], np.int32),
        np.concatenate([[0], np.cumsum(lens)]).astype(np.int32),
        np.array(cached, np.int32) + np.array(lens, np.int32),
        [(np.array(tables or [[row] for row in range(len(lens))], np.int32), size)],
    )


def test_a_repeated_sequence_is_left_out_and_each_token_finds_the_one_that_it_repeats():
    found = batch([5, 6, 7], [1], [5, 6, 7], [5, 6], [5, 6, 7])
    assert found.rows.tolist() == [0, 1, 3]
    assert found.tokens.tolist() == [0, 1, 2, 3, 7, 8]
    assert found.source.tolist() == [0, 1, 2, 3, 0, 1, 2, 4, 5, 0, 1, 2]
    ran = np.array([10, 11, 12, 13, 14, 15])  # what a model gives for the tokens left
    assert ran[found.source].tolist() == [10, 11, 12, 13, 10, 11, 12, 14, 15, 10, 11, 12]


def test_nothing_repeats():
    assert batch([1, 2], [1, 3], [1, 2, 3]) is None
    assert batch([1], [1], [1]) is None, "the next token of a sequence, whose cached ones may be others"
    assert batch() is None


def test_sequences_repeat_each_other_only_after_the_same_cached_blocks():
    same = batch([5, 6], [5, 6], cached=[4, 4], tables=[[7, 1], [7, 2]])
    assert same is not None and same.rows.tolist() == [0]
    assert batch([5, 6], [5, 6], cached=[4, 4], tables=[[7, 1], [8, 2]]) is None
    assert batch([5, 6], [5, 6], cached=[4, 0], tables=[[7, 1], [7, 2]]) is None
    assert batch([5, 6], [5, 6], cached=[5, 5], tables=[[7, 1], [7, 2]]) is None, "the half-filled block is another"


def test_every_group_of_layers_must_have_the_same_blocks():
    args = np.array([5, 6, 5, 6]), np.array([0, 2, 4]), np.array([6, 6])
    same, other = (np.array([[7, 1], [7, 2]]), 4), (np.array([[7, 1], [8, 2]]), 4)
    assert distinct(*args, [same, same]) is not None
    assert distinct(*args, [same, other]) is None


def test_random_batches_against_a_plain_loop():
    random = np.random.default_rng(0)
    for _ in range(200):
        sequences = [random.integers(0, 2, random.integers(1, 4)).tolist() for _ in range(random.integers(1, 9))]
        seen, rows = [], []
        for row, each in enumerate(sequences):
            if len(each) == 1 or each not in seen:
                rows.append(row)
                seen.append(each)
        found = batch(*sequences)
        if len(rows) == len(sequences):
            assert found is None
        else:
            flat = np.array([token for each in sequences for token in each])
            assert found.rows.tolist() == rows and (flat[found.tokens][found.source] == flat).all()
