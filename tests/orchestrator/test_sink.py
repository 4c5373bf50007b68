"""The sink: whole groups in, batches out, oldest policy first."""

import pytest

from prl.orchestrator.dispatcher import Group
from prl.orchestrator.sink import Sink


@pytest.fixture
def make_group(make_rollout):
    def make(number, *, version=0, size=2, failed=0, tokens=4) -> Group:
        rollouts = [make_rollout(version=version, lengths=(tokens,)) for _ in range(size)]
        for rollout in rollouts[:failed]:
            rollout.error = "ValueError: no"
        return Group(number, "toy", version, rollouts)

    return make


def test_a_batch_is_the_oldest_groups_in_order_of_arrival(make_group):
    sink = Sink(4, None)
    for number, version in ((1, 2), (2, 0), (3, 1), (4, 0)):
        sink.add(make_group(number, version=version))
    assert sink.full() and sink.rollouts == 8
    assert [group.id for group in sink.cut(-1)] == [2, 4]
    assert [group.id for group in sink.cut(-1)] == [3, 1]
    assert not sink.full()


def test_groups_are_never_split_and_failed_rollouts_do_not_count(make_group):
    sink = Sink(4, None)
    sink.add(make_group(1, size=3, failed=1))
    assert sink.rollouts == 2 and not sink.full()
    sink.add(make_group(2, size=3))
    assert [group.id for group in sink.cut(-1)] == [1, 2]


def test_a_batch_takes_what_would_be_too_old_for_the_next(make_group):
    sink = Sink(2, None)
    for number, version in ((1, 3), (2, 3), (3, 4)):
        sink.add(make_group(number, version=version))
    assert [group.id for group in sink.cut(3)] == [1, 2]
    assert [group.id for group in sink.groups] == [3]


def test_a_token_batch_takes_groups_until_it_has_enough_tokens(make_group):
    sink = Sink(None, 20)
    for number in range(3):
        assert not sink.full()
        sink.add(make_group(number, size=2, tokens=4))
    assert sink.full() and len(sink.cut(-1)) == 3


def test_the_rollouts_of_a_token_batch_are_estimated_from_those_seen(make_group):
    sink = Sink(None, 100)
    assert sink.batch_rollouts(8) == 8
    sink.add(make_group(1, tokens=5))
    assert sink.batch_rollouts(8) == 20
    sink.add(make_group(2, tokens=15))  # a tenth of the new mean: 6 tokens
    assert sink.batch_rollouts(8) == 17


def test_a_group_without_survivors_is_discarded_and_counted_until_one_succeeds(make_group):
    sink = Sink(2, None)
    sink.add(make_group(1, failed=2))
    sink.add(make_group(2, failed=2))
    assert sink.failed_in_a_row == 2 and len(sink.discarded) == 4 and sink.rollouts == 0
    sink.add(make_group(3, failed=1))
    assert sink.failed_in_a_row == 0 and sink.rollouts == 1


def test_stale_groups_are_discarded_with_their_reason(make_group):
    sink = Sink(8, None)
    for number, version in ((1, 0), (2, 1), (3, 2)):
        sink.add(make_group(number, version=version))
    assert sink.drop_stale(3, 1) == 4
    assert [group.id for group in sink.groups] == [3]
    assert {rollout.error for rollout in sink.discarded} == {
        "stale: started from version 0, now 3",
        "stale: started from version 1, now 3",
    }
    assert sink.drop_stale(3, 1) == 0
