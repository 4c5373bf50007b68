"""Packing: nothing lost, nothing doubled, nothing misaligned, whatever the lengths."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prl.rollouts.components import STREAM_FILL
from prl.rollouts.inputs import Picture
from prl.rollouts.messages import MicroBatch, Origin, TrainingSample
from prl.rollouts.packing import PER_TOKEN, balance, check_aligned, fit, pack, pack_row, truncate

LENGTHS = st.lists(st.integers(1, 20), max_size=40)


def sample(length: int, first: int = 1, env: str = "toy", **streams) -> TrainingSample:
    """Tokens count up from `first`; every per-token value differs from its neighbour's."""
    ids = list(range(first, first + length))
    streams = {"advantages": [i / 7 for i in ids]} | streams
    streams = {"mask": [i % 3 > 0 for i in ids]} | streams
    return TrainingSample(
        token_ids=ids,
        logprobs=[-i / 100 for i in ids],
        temperatures=[1 + i / 10 for i in ids],
        env_name=env,
        reward=0.0,
        **streams,
    )


def samples_of(lengths: list[int]) -> list[TrainingSample]:
    firsts = [1 + sum(lengths[:i]) for i in range(len(lengths))]
    return [sample(length, first, env=f"env{first}") for length, first in zip(lengths, firsts, strict=True)]


def sequences(row: MicroBatch) -> list[slice]:
    ends = [sum(row.sequence_lengths[: i + 1]) for i in range(len(row.sequence_lengths))]
    return [slice(end - length, end) for end, length in zip(ends, row.sequence_lengths, strict=True)]


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, ranks=st.integers(1, 5), seq_len=st.integers(8, 100))
def test_every_token_is_in_one_row_with_its_values(lengths, ranks, seq_len):
    originals = {s.token_ids[0]: truncate(s, seq_len) for s in samples_of(lengths)}
    dealt, truncated = pack(samples_of(lengths), seq_len, ranks)
    assert truncated == sum(length > seq_len for length in lengths)
    assert len(dealt) == ranks and len({len(rows) for rows in dealt}) == 1 and dealt[0]
    seen = []
    for row in (row for rows in dealt for row in rows):
        assert len(row.input_ids) == seq_len and sum(row.sequence_lengths) <= seq_len
        for at, env in zip(sequences(row), row.env_names, strict=True):
            original = originals[row.input_ids[at][0]]
            seen.append(original.token_ids[0])
            assert row.input_ids[at] == original.token_ids
            assert env == original.env_name
            assert row.position_ids[at] == list(range(len(original.token_ids)))
            for name in ("mask", "logprobs", "temperatures", "advantages"):
                assert getattr(row, name)[at] == getattr(original, name), name
        padding = slice(sum(row.sequence_lengths), None)
        assert not any(row.mask[padding]) and not any(row.logprobs[padding]) and not any(row.input_ids[padding])
        assert not any((row.advantages or [])[padding])
        assert all(value == 1.0 for value in row.temperatures[padding])
    assert sorted(seen) == sorted(originals)
    tokens = [tokens_of(rows) for rows in dealt]
    assert max(tokens) - min(tokens) <= min(seq_len, max(lengths, default=0)), "ranks differ by the longest sample"
    assert any(all(row.sequence_lengths for row in rows) for rows in dealt) or not lengths, "as few rows as one needs"


def tokens_of(rows: list[MicroBatch]) -> int:
    return sum(sum(row.sequence_lengths) for row in rows)


@pytest.mark.parametrize(
    ("count", "length", "seq_len", "ranks"),
    [(8, 8, 64, 4), (256, 20, 512, 2), (256, 20, 64, 2), (256, 20, 6000, 2), (256, 20, 30, 2), (6, 10, 100, 3)],
)
def test_equal_samples_are_shared_out_evenly(count, length, seq_len, ranks):
    """8 samples of 8 tokens fill one row of 64, but four ranks take two samples each."""
    packed, truncated = pack(samples_of([length] * count), seq_len, ranks)
    assert truncated == 0 and [tokens_of(rows) for rows in packed] == [count * length // ranks] * ranks
    assert all(row.sequence_lengths for rows in packed for row in rows)
    per_row = seq_len // length
    assert [len(rows) for rows in packed] == [-(-count // ranks // per_row)] * ranks


def test_longest_samples_go_to_the_emptiest_rank():
    """9 | 7 | 6, then 5 to 6, 4 to 7, 3 to 9."""
    shares = balance([[s] for s in samples_of([3, 9, 4, 7, 5, 6])], 3)
    assert [[len(s.token_ids) for s in share] for share in shares] == [[9, 3], [7, 4], [6, 5]]


def from_rollouts(groups: list[list[list[int]]]) -> list[TrainingSample]:
    """Samples by group, rollout and length; two thirds of their tokens are rl members."""
    return [
        sample(length, origin=Origin(0, group, rollout, "agent"))
        for group, rollouts in enumerate(groups)
        for rollout, lengths in enumerate(rollouts)
        for length in lengths
    ]


@pytest.mark.parametrize("ranks", [1, 3])
def test_updates_have_whole_groups_and_about_as_many_tokens(ranks):
    samples = from_rollouts([[[9], [9]], [[6], [6]], [[3], [3, 3]], [[2], [2]]])
    packed, _ = pack(samples, 12, ranks, 2)
    updates: list[dict[int, int]] = [{}, {}]
    for row in (row for rows in packed for row in rows):
        for origin, length in zip(row.origins, row.sequence_lengths, strict=True):
            updates[row.update][origin.group] = updates[row.update].get(origin.group, 0) + length
    assert updates == [{0: 18, 3: 4}, {1: 12, 2: 9}]
    counts = [[row.update for row in rows] for rows in packed]
    assert counts == [sorted(counts[0])] * ranks, "each rank has as many rows for each, one after the other"


def test_fewer_groups_than_updates_are_as_many_updates():
    packed, _ = pack(from_rollouts([[[4]], [[5]]]), 12, 1, 4)
    assert [row.update for row in packed[0]] == [0, 1]
    assert [row.update for row in pack([], 8, 1, 4)[0][0]] == [0]


def test_shares_of_rollouts_by_hand():
    """Of 3, 6, 3 and 9 tokens 2, 4, 2 and 6 are members; 4 sequences of 3 rollouts. The last sample has no member."""
    samples = [*from_rollouts([[[3, 6], [3]], [[9]]]), sample(3, mask=[False] * 3)]
    (rows,), _ = pack(samples, 24, 1)
    shares = {
        (origin.group, origin.rollout): share
        for row in rows
        for origin, share in zip(row.origins, row.rollout_shares, strict=True)
        if origin is not None
    }
    assert shares == pytest.approx({(0, 0): 4 / (3 * 6), (0, 1): 4 / (3 * 2), (1, 0): 4 / (3 * 6)})
    (rows,), _ = pack(samples[1:], 24, 1)
    assert all(row.rollout_shares == [] for row in rows), "each rollout has one sequence"


@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS)
def test_each_sample_goes_into_the_fullest_row_with_room(lengths):
    rows: list[list[int]] = []  # the same rule, by looking at every row
    for length in sorted(lengths, reverse=True):
        fitting = [row for row in rows if sum(row) + length <= 20]
        best = max(fitting, key=sum, default=None)
        if best is None:
            rows.append([length])
        else:
            best.append(length)
    got = [[len(s.token_ids) for s in row] for row in fit(samples_of(lengths), 20)]
    assert sorted(map(sum, got)) == sorted(map(sum, rows))


def test_no_samples_give_each_rank_one_masked_dummy():
    dealt, truncated = pack([], 8, 3)
    assert truncated == 0 and [len(rows) for rows in dealt] == [1, 1, 1]
    for (row,) in dealt:
        assert row.mask == [False] * 8 and row.sequence_lengths == [] and row.env_names == []
        assert all(getattr(row, name) is None for name in STREAM_FILL)


@pytest.mark.parametrize("has_it_first", [True, False])
@pytest.mark.parametrize(
    ("stream", "fill"),
    [("advantages", 0.0), ("ref_logprobs", 0.0), ("rl_weights", 1.0), ("ce_weights", 0.0), ("ref_kl_weights", 0.0)],
)
def test_missing_stream_has_its_neutral_value(stream, fill, has_it_first):
    with_it = sample(3, 1, **{stream: [0.25, 0.5, 0.75]})
    without = sample(2, 4, **({stream: None} if stream == "advantages" else {}))
    row = pack_row([with_it, without] if has_it_first else [without, with_it], 7)
    expected = [0.25, 0.5, 0.75, fill, fill] if has_it_first else [fill, fill, 0.25, 0.5, 0.75]
    assert getattr(row, stream) == [*expected, 0.0, 0.0]


def test_truncation_cuts_every_array_and_leaves_the_original_alone():
    original = sample(6, ref_logprobs=[-1.0] * 6, ce_weights=[0.5] * 6)
    cut = truncate(original, 4)
    for name in ("token_ids", "mask", "logprobs", "temperatures", "advantages", "ref_logprobs", "ce_weights"):
        assert getattr(cut, name) == getattr(original, name)[:4], name
    assert len(original.token_ids) == 6 and cut.env_name == original.env_name and cut.rl_weights is None


def test_missing_advantages_are_refused_before_truncation():
    hidden = TrainingSample(
        token_ids=[1] * 6,
        mask=[False] * 5 + [True],
        logprobs=[0.0] * 6,
        temperatures=[1.0] * 6,
        env_name="reverse",
        reward=1.0,
    )
    with pytest.raises(ValueError, match="'reverse'.*no advantages"):
        pack([hidden], 4, 1)


@pytest.mark.parametrize("name", PER_TOKEN)
def test_a_misaligned_array_is_named(name):
    top = {"top_ids": [[1]] * 3, "top_logprobs": [[0.0]] * 3}
    row = pack_row([sample(3, **{stream: [0.0] * 3 for stream in STREAM_FILL}, **top)], 4)
    setattr(row, name, getattr(row, name)[:-1])
    with pytest.raises(ValueError, match=f"{name} has 3 values for 4 input_ids"):
        check_aligned(row)


@pytest.mark.parametrize("name", STREAM_FILL)
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([0.5] * 3, "has 3 values for 4"),
        ([0.5] * 5, "has 5 values for 4"),
        ("abcd", "list of numbers"),
        ([None] * 4, "list of numbers"),
    ],
)
def test_stream_that_does_not_fit_is_refused_by_name(make_sample, name, values, message):
    """Also where a neighbour in the row, or truncation, would make up for it."""
    other = make_sample(4, advantages=[0.0] * 4, ref_logprobs=[0.0] * 4)
    setattr(other, name, [0.5] * (8 - len(values)))
    bad = make_sample(4, env="bad", advantages=[0.0] * 4, ref_logprobs=[0.0] * 4)
    setattr(bad, name, values)
    for seq_len in (2, 8):
        with pytest.raises(ValueError, match=f"'bad'.*{name}.*{message}"):
            pack([bad, other], seq_len, 1)


def test_numbers_of_any_kind_become_plain_floats(make_sample):
    sample = make_sample(4, advantages=np.array([0, 1, 2, 3]), ce_weights=tuple(map(np.float32, range(4))))
    pack([sample], 8, 1)
    assert sample.advantages == sample.ce_weights == [0.0, 1.0, 2.0, 3.0]
    assert {type(x) for x in [*sample.advantages, *sample.ce_weights]} == {float}


def with_pictures(length, *places):
    (sample,) = samples_of([length])
    sample.pictures = [Picture(start, count, "a" * 64, 8, 8, "f" * 64) for start, count in places]
    return sample


@pytest.mark.parametrize(
    ("seq_len", "length", "pictures"),
    [(12, 12, 2), (11, 11, 2), (10, 9, 1), (9, 9, 1), (4, 4, 1), (3, 1, 0), (1, 1, 0)],
)
def test_a_sample_ends_before_a_picture_that_does_not_fit_whole(seq_len, length, pictures):
    cut = truncate(with_pictures(12, (1, 3), (9, 2)), seq_len)
    assert len(cut.token_ids) == len(cut.mask) == len(cut.logprobs) == length
    assert len(cut.pictures) == pictures and all(picture.stop <= length for picture in cut.pictures)


def test_pictures_have_their_places_in_the_row():
    row = pack_row([samples_of([5])[0], with_pictures(6, (1, 2)), with_pictures(7, (0, 3), (4, 1))], 20)
    assert [(picture.start, picture.length) for picture in row.pictures] == [(6, 2), (11, 3), (15, 1)]
    assert pack_row(samples_of([5]), 8).pictures == []
