"""The sink: whole groups in, batches out, oldest policy first."""

import math

import pytest

from prl.orchestrator.batcher import Batcher
from prl.orchestrator.types import Group


@pytest.fixture
def make_group(make_rollout):
    def make(number, *, version=0, size=2, failed=0, tokens=4, excused=False) -> Group:
        """`version=None`: of a frozen model."""
        rollouts = [make_rollout(version=version, lengths=(tokens,)) for _ in range(size)]
        for rollout in rollouts[:failed]:
            rollout.error = "ValueError: no"
        return Group(number, "toy", math.inf if version is None else version, rollouts, excused=excused)

    return make


def test_a_batch_is_the_oldest_groups_in_order_of_arrival(make_group):
    sink = Batcher(4, None)
    for number, version in ((1, 2), (2, 0), (3, 1), (4, 0)):
        sink.add(make_group(number, version=version))
    assert sink.full() and sink.rollouts == 8
    assert [group.id for group in sink.cut(-1)] == [2, 4]
    assert [group.id for group in sink.cut(-1)] == [3, 1]
    assert not sink.full()


def test_groups_are_never_split_and_failed_rollouts_do_not_count(make_group):
    sink = Batcher(4, None)
    sink.add(make_group(1, size=3, failed=1))
    assert sink.rollouts == 2 and not sink.full()
    sink.add(make_group(2, size=3))
    assert [group.id for group in sink.cut(-1)] == [1, 2]


def test_a_batch_takes_what_would_be_too_old_for_the_next(make_group):
    sink = Batcher(2, None)
    for number, version in ((1, 3), (2, 3), (3, 4)):
        sink.add(make_group(number, version=version))
    assert [group.id for group in sink.cut(3)] == [1, 2]
    assert [group.id for group in sink.groups] == [3]


def test_a_token_batch_takes_groups_until_it_has_enough_tokens(make_group):
    sink = Batcher(None, 20)
    for number in range(3):
        assert not sink.full()
        sink.add(make_group(number, size=2, tokens=4))
    assert sink.full() and len(sink.cut(-1)) == 3


def test_the_rollouts_of_a_token_batch_are_estimated_from_those_seen(make_group):
    sink = Batcher(None, 100)
    assert sink.batch_rollouts(8) == 8
    sink.add(make_group(1, tokens=5))
    assert sink.batch_rollouts(8) == 20
    sink.add(make_group(2, tokens=15))  # a tenth of the new mean: 6 tokens
    assert sink.batch_rollouts(8) == 17


def test_a_group_without_survivors_is_discarded(make_group):
    sink = Batcher(2, None)
    sink.add(make_group(1, failed=2))
    sink.add(make_group(2, failed=2))
    assert len(sink.discarded) == 4 and sink.rollouts == 0
    sink.add(make_group(3, failed=1))
    assert sink.rollouts == 1


def test_stale_groups_are_discarded_with_their_reason(make_group):
    sink = Batcher(8, None)
    for number, version in ((1, 0), (2, 1), (3, 2)):
        sink.add(make_group(number, version=version))
    assert sink.drop_stale(3, 1) == 4
    assert [group.id for group in sink.groups] == [3]
    assert [(rollout.error, rollout.left_out) for rollout in sink.discarded] == [
        *[(None, "stale: started from version 0, now 3")] * 2,
        *[(None, "stale: started from version 1, now 3")] * 2,
    ]
    assert sink.drop_stale(3, 1) == 0


def test_only_what_had_a_place_can_lose_it(make_group):
    def spoilt():
        group = drop(make_group(1, size=4), 1)
        group.rollouts[1].left_out = "nothing was sampled"
        group.rollouts[2].error = "ValueError: no"
        return group

    stale, surplus = Batcher(8, None), Batcher(8, None)
    stale.add(spoilt())
    surplus.add(spoilt())
    assert (stale.rollouts, stale.drop_stale(3, 1), surplus.drop_surplus(0)) == (1, 1, 1)
    for sink, reason in ((stale, "stale: "), (surplus, "surplus: ")):
        *others, lost = sink.discarded
        assert lost.left_out.startswith(reason)
        assert [(rollout.error, rollout.left_out) for rollout in others] == [
            (None, None),
            (None, "nothing was sampled"),
            ("ValueError: no", None),
        ]


def test_a_side_that_was_never_asked_takes_no_place(make_group):
    sink, group = Batcher(2, None), make_group(1, size=3)
    group.rollouts[0].left_out = group.rollouts[1].left_out = "nothing was sampled"
    sink.add(group)
    assert sink.rollouts == 1 and not sink.full() and not group.rollouts[0].in_batch
    sink.add(make_group(2, size=1))
    assert sink.full() and [len(group.rollouts) for group in sink.cut(-1)] == [3, 1], "it comes with its group"


def test_what_survived_while_the_model_was_away_is_taken_as_any_other(make_group):
    sink = Batcher(2, None)
    sink.add(make_group(1, failed=2))
    sink.add(make_group(2, failed=1, excused=True))
    assert sink.rollouts == 1 and [group.id for group in sink.groups] == [2]


def drop(group, count):
    for rollout in group.rollouts[:count]:
        rollout.pre_filtered_by, rollout.dropped = "gibberish", True
    return group


def test_what_a_filter_dropped_takes_no_place(make_group):
    sink = Batcher(4, None)
    sink.add(drop(make_group(1, size=4), 2))
    assert sink.rollouts == 2 and not sink.full() and not sink.discarded
    sink.add(drop(make_group(2, size=4, failed=1), 2))  # one failed, one was dropped
    assert sink.rollouts == 4 and sink.full()
    assert [(group.id, len(group.rollouts)) for group in sink.cut(-1)] == [(1, 4), (2, 4)], "it comes with its group"


def test_nor_do_its_tokens(make_group):
    sink = Batcher(None, 12)
    sink.add(drop(make_group(1, size=3, tokens=4), 1))
    assert not sink.full()
    sink.add(make_group(2, size=1, tokens=4))
    assert sink.full()


def test_a_group_that_filters_leave_nothing_of_never_enters(make_group):
    sink = Batcher(4, None)
    sink.add(drop(make_group(1, size=3), 3))
    sink.add(drop(make_group(2, size=3, failed=1), 3))
    assert not sink.groups and len(sink.discarded) == 6
    assert sink.filtered_in_a_row == 5, "the one that failed is another's matter"
    sink.add(make_group(3, failed=2))
    assert sink.filtered_in_a_row == 5
    sink.add(drop(make_group(4, size=3), 2))
    assert sink.filtered_in_a_row == 0 and sink.rollouts == 1


def test_what_was_filtered_does_not_grow_stale(make_group):
    sink = Batcher(8, None)
    sink.add(drop(make_group(1, size=2), 1))
    assert sink.drop_stale(3, 1) == 1
    assert [rollout.left_out for rollout in sink.discarded] == [None, "stale: started from version 0, now 3"]


def test_a_frozen_models_groups_never_grow_stale(make_group):
    sink = Batcher(8, None)
    for number, version in ((1, None), (2, 0), (3, None)):
        sink.add(make_group(number, version=version))
    assert sink.drop_stale(1000, 0) == 2
    assert [group.id for group in sink.groups] == [1, 3] and not any(
        r.left_out for g in sink.groups for r in g.rollouts
    )


def test_a_frozen_models_groups_can_wait_and_let_the_policys_own_go_first(make_group):
    sink = Batcher(4, None)
    for number, version in ((1, None), (2, 7), (3, None), (4, 5)):
        sink.add(make_group(number, version=version))
    assert [group.id for group in sink.cut(-1)] == [4, 2]
    assert [group.id for group in sink.cut(-1)] == [1, 3]


def test_no_step_is_the_last_chance_of_a_frozen_models_group(make_group):
    sink = Batcher(2, None)
    for number, version in ((1, None), (2, 7), (3, 8), (4, None)):
        sink.add(make_group(number, version=version))
    assert [group.id for group in sink.cut(1000)] == [2, 3]
    assert [group.id for group in sink.groups] == [1, 4]


def test_what_is_left_is_a_batch_where_nothing_else_comes(make_group):
    sink = Batcher(8, None)
    sink.add(make_group(1))
    assert not sink.full() and [group.id for group in sink.cut(-1)] == [1] and sink.cut(-1) == []
    tokens = Batcher(None, 100)
    tokens.add(make_group(1))
    assert len(tokens.cut(-math.inf)) == 1 and tokens.cut(-1) == []


def test_surplus_is_discarded_up_to_a_version_and_says_so(make_group):
    sink = Batcher(2, None)
    for number, version in ((1, 0), (2, 1), (3, 2), (4, None)):
        sink.add(make_group(number, version=version, failed=number == 1))
    assert sink.drop_surplus(1) == 3 and [group.id for group in sink.groups] == [3, 4]
    reasons = [(rollout.error, rollout.left_out) for rollout in sink.discarded]
    surplus = (None, "surplus: the batch was full (buffer.oversampling_factor)")
    assert reasons == [("ValueError: no", None), surplus, surplus, surplus]
    assert sink.drop_surplus(1) == 0 and sink.drop_surplus(math.inf) == 4 and not sink.groups
