"""Sequences of a forward pass that are the same."""

import numpy as np

from prl.engines.vllm.cpu.prefixes import distinct


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


def test_what_saves_a_tenth_at_most_is_not_done():
    assert batch([1, *range(2, 11)], [1, *range(12, 21)], [30]) is None, "1 of 21"
    assert batch([1, 2, 3, *range(4, 11)], [1, 2, 3, *range(14, 21)]) is not None, "3 of 20"


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
    sizes = set()
    for _ in range(300):
        sequences = [random.integers(0, 3, random.integers(1, 6)).tolist() for _ in range(random.integers(1, 9))]
        # Each token by all that ends with it; a sequence of one token is never looked at.
        each = [
            (row if len(sequence) == 1 else -1, *sequence[: end + 1])
            for row, sequence in enumerate(sequences)
            for end in range(len(sequence))
        ]
        found = batch(*sequences)
        if len(each) - len(set(each)) <= 0.1 * len(each):
            assert found is None
            continue
        assert len(found.tokens) == len(set(each)) == found.starts[-1]
        assert [each[found.tokens[place]] for place in found.source] == each
        assert found.source[found.tokens].tolist() == list(range(len(found.tokens)))
        ends = np.cumsum([len(sequence) for sequence in sequences])
        for row, start, stop in zip(found.rows, found.starts[:-1], found.starts[1:], strict=True):
            assert found.tokens[start:stop].tolist() == list(range(ends[row] - (stop - start), ends[row]))
        sizes.add(len(found.rows) < len(sequences))
    assert sizes == {True, False}
