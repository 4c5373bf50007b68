"""How a stream of tensors is cut."""

import itertools

import pytest

from prl.wire.buckets import ALIGNED, TensorSpec, buckets


def spec(name, *shape, dtype="bfloat16"):
    return TensorSpec(name, dtype, shape)


def places(tensors, limit):
    return [[(place.spec.name, place.start, place.stop) for place in bucket] for bucket in buckets(tensors, limit)]


def test_tensors_fill_a_bucket_up_to_its_limit_and_one_that_is_larger_is_alone():
    tensors = [
        spec("a", 8),
        spec("b", 3, 2),
        spec("c", 4),
        spec("large", 40),
        spec("d", 1),
        spec("e", 2, dtype="float32"),
    ]
    assert places(tensors, 40) == [
        [("a", 0, 16), ("b", 16, 28), ("c", 32, 40)],  # b has 12 bytes, and c begins at the next multiple of 16
        [("large", 0, 80)],
        [("d", 0, 2), ("e", 16, 24)],
    ]
    assert places(tensors[:3], 39) == [[("a", 0, 16), ("b", 16, 28)], [("c", 0, 8)]]


@pytest.mark.parametrize("limit", [1, 33, 64, 1000, 10**6])
def test_each_tensor_is_sent_once_in_its_order_and_no_bucket_is_larger(limit):
    tensors = [spec(f"t{number}", number % 7, 5 + number % 3) for number in range(60)]  # some are empty
    found = list(buckets(tensors, limit))
    assert [place.spec for bucket in found for place in bucket] == tensors
    for bucket in found:
        assert bucket[-1].stop <= limit or len(bucket) == 1
        assert all(place.start % ALIGNED == 0 for place in bucket)
        assert all(one.stop <= two.start for one, two in itertools.pairwise(bucket))


def test_nothing_is_no_bucket():
    assert list(buckets([], 10)) == []
