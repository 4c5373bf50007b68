"""The batcher: whole groups in, batches out, oldest policy first."""

import math
from types import SimpleNamespace

import pytest

from prl.orchestrator.batcher import Batcher
from prl.orchestrator.types import Group
from prl.rollouts.rollout import Outcome, Stage


def drop_stale(batcher, version, limit):
    """Drop what started more than `limit` versions before `version`, as the orchestrator does."""
    return batcher.drop(version - limit - 1, Stage.STALE, f"started from version {{start}}, now {version}")


@pytest.fixture
def make_group(make_rollout):
    def make(number, *, version=0, size=2, failed=0, tokens=4, excused=False, env=None) -> Group:
        """`version=None`: of a frozen model."""
        rollouts = [make_rollout(version=version, lengths=(tokens,)) for _ in range(size)]
        for rollout in rollouts[:failed]:
            rollout.leave(Stage.FAILED, "ValueError: no", "env")
        return Group(number, env, math.inf if version is None else version, None, rollouts, excused)

    return make


def test_batch_is_the_oldest_groups_in_order(make_group):
    batcher = Batcher(4, None)
    for number, version in ((1, 2), (2, 0), (3, 1), (4, 0)):
        batcher.add(make_group(number, version=version))
    assert batcher.full() and batcher.rollouts == 8
    assert [group.id for group in batcher.cut(-1)] == [2, 4]
    assert [group.id for group in batcher.cut(-1)] == [3, 1]
    assert not batcher.full()


def test_batch_takes_what_is_too_old_for_the_next(make_group):
    batcher = Batcher(2, None)
    for number, version in ((1, 3), (2, 3), (3, 4)):
        batcher.add(make_group(number, version=version))
    assert [group.id for group in batcher.cut(3)] == [1, 2]
    assert [group.id for group in batcher.groups] == [3]


def test_token_batch_takes_groups_until_full(make_group):
    batcher = Batcher(None, 20)
    for number in range(3):
        assert not batcher.full()
        batcher.add(make_group(number, size=2, tokens=4))
    assert batcher.full() and len(batcher.cut(-1)) == 3


def test_rollouts_of_a_token_batch_are_estimated(make_group):
    batcher = Batcher(None, 100)
    assert batcher.batch_rollouts(8) == 8
    batcher.add(make_group(1, tokens=5))
    assert batcher.batch_rollouts(8) == 20
    batcher.add(make_group(2, tokens=15))  # a tenth of the new mean: 6 tokens
    assert batcher.batch_rollouts(8) == 17


def test_a_group_without_survivors_is_discarded(make_group):
    batcher = Batcher(2, None)
    assert not batcher.add(make_group(1, failed=2))
    assert not batcher.add(make_group(2, failed=2))
    assert batcher.groups == [] and batcher.rollouts == 0
    assert batcher.add(make_group(3, failed=1))
    assert batcher.rollouts == 1


def drop(group, count):
    for rollout in [rollout for rollout in group.rollouts[:count] if rollout.is_active]:
        rollout.leave(Stage.PRE_FILTERED, "filter gibberish", "gibberish")
    return group


def test_what_a_filter_dropped_takes_no_place(make_group):
    batcher = Batcher(4, None)
    batcher.add(drop(make_group(1, size=4), 2))
    assert batcher.rollouts == 2 and not batcher.full()
    batcher.add(drop(make_group(2, size=4, failed=1), 2))  # one failed, one was dropped
    assert batcher.rollouts == 4 and batcher.full()
    assert [(group.id, len(group.rollouts)) for group in batcher.cut(-1)] == [(1, 4), (2, 4)], "it comes with its group"


def test_dropping_marks_only_rollouts_that_had_a_place(make_group):
    batcher = Batcher(8, None)
    for number, version in ((1, 0), (2, 1), (3, 2)):
        group = make_group(number, version=version, size=3, failed=number == 1)
        batcher.add(drop(group, 2) if number == 2 else group)
    outcomes = [rollout.outcome for rollout in drop_stale(batcher, 3, 1)]
    filtered = Outcome(Stage.PRE_FILTERED, "filter gibberish", "gibberish")
    assert outcomes == [
        Outcome(Stage.FAILED, "ValueError: no", "env"),
        *[Outcome(Stage.STALE, "started from version 0, now 3")] * 2,
        *[filtered] * 2,
        Outcome(Stage.STALE, "started from version 1, now 3"),
    ]
    assert [group.id for group in batcher.groups] == [3] and drop_stale(batcher, 3, 1) == []


def test_frozen_models_groups_wait_and_never_grow_stale(make_group):
    batcher = Batcher(4, None)
    for number, version in ((1, None), (2, 7), (3, None), (4, 5), (5, 8)):
        batcher.add(make_group(number, version=version))
    assert len(drop_stale(batcher, 7, 1)) == 2
    assert [group.id for group in batcher.cut(1000)] == [2, 5], "the policy's own go first"
    assert [group.id for group in batcher.cut(1000)] == [1, 3] and batcher.cut(1000) == []


@pytest.mark.parametrize(("size", "warns"), [(20, True), (10, True), (9, False)])
def test_batch_that_trains_a_tenth_or_less_warns(make_group, caplog, size, warns):
    rollouts = make_group(1, size=size).rollouts
    rollouts[0].leave(Stage.TRAINED)
    for rollout in rollouts[1:]:
        rollout.leave(Stage.POST_FILTERED, "filter most", "most")
    Batcher(size, None).check_batch(3, rollouts)
    message = f"step 3: only 1 of {size} rollouts train: filter most: {size - 1}"
    assert [record.getMessage() for record in caplog.records] == [message] * warns


# --- the mix of envs --------------------------------------------------------------------------------------------------


@pytest.fixture
def mixing(make_group):
    """`mixing(size, weights, arrived, …)`: a batcher in which groups of envs wait, one for each letter."""

    def make(size, weights, arrived, *, tokens=None, versions=None, ended=""):
        envs = {
            name: SimpleNamespace(name=name, ended=name in ended, weight=weight) for name, weight in weights.items()
        }
        batcher = Batcher(*((None, size) if tokens else (size, None)), list(envs.values()))
        for number, name in enumerate(arrived):
            version = versions[number] if versions else 0
            batcher.add(make_group(number, size=2, env=envs[name], tokens=tokens or 4, version=version))
        return batcher

    return make


def cut_of(batcher, last_chance=-1):
    """The envs of its groups, sorted."""
    return "".join(sorted(group.env.name for group in batcher.cut(last_chance)))


ONE_ONE, ONE_THREE, THREE = {"a": 1, "b": 1}, {"a": 1, "b": 3}, {"a": 1, "b": 1, "c": 2}


@pytest.mark.parametrize(
    ("size", "weights", "arrived", "coming", "missing", "cut"),
    [
        # 10 groups of 2: of each env at most .65 of 20 rollouts, 6 groups
        (20, ONE_ONE, "aaaaaaaaaa", "b", "b", "aaaaaaaaaa"),  # what is cut where nothing else comes after all
        (20, ONE_ONE, "aaaaaaaaaa", "a", "", "aaaaaaaaaa"),
        (20, ONE_ONE, "aaaaaaaaaabbb", "b", "b", "aaaaaaabbb"),
        (20, ONE_ONE, "aaaaaaaaaabbbb", "b", "", "aaaaaabbbb"),
        (20, ONE_ONE, "abababababab", "ab", "", "aaaaabbbbb"),
        # weights 1 and 3: at most 4 and 9
        (20, ONE_THREE, "aaaaaabbbbb", "b", "b", "aaaaabbbbb"),
        (20, ONE_THREE, "bbbbbbbbbb", "a", "a", "bbbbbbbbbb"),
        (20, {"a": 1, "b": 9}, "bbbbbbbbbb", "a", "", "bbbbbbbbbb"),  # .9 + .15: no limit
        (20, {"a": 1, "b": 9}, "aaaaaaaaaa", "b", "b", "aaaaaaaaaa"),
        # three envs: at most 4, 4 and 6
        (20, THREE, "aaaaaaaaaabbbb", "bc", "c", "aaaaaabbbb"),  # b has its four
        (20, THREE, "aaaaaaaaaabbbbcc", "ab", "", "aaaabbbbcc"),
        # a third group fits in none of two halves: whose it is does not matter to the other
        (6, ONE_ONE, "aab", "ab", "", "aab"),
        # one group of each env always has room
        (2, ONE_ONE, "ab", "ab", "", "a"),
        (4, ONE_THREE, "bb", "a", "a", "bb"),
        (4, {"a": 1, "b": 99}, "ab", "b", "", "ab"),
    ],
)
def test_batch_limits_each_env_to_its_share(mixing, size, weights, arrived, coming, missing, cut):
    batcher = mixing(size, weights, arrived)
    assert batcher.full()
    assert batcher.waits_for(set(coming), -1) == set(missing)
    assert cut_of(batcher) == cut
    assert len(batcher.groups) + len(cut) == len(arrived)


def test_envs_of_one_version_take_turns(mixing):
    batcher = mixing(12, ONE_THREE, "aaaaaabbbbb", versions=[0] * 11)
    assert [group.id for group in batcher.cut(-1)] == [0, 6, 7, 8, 1, 9]
    assert [group.id for group in batcher.groups] == [2, 3, 4, 5, 10]
    older = mixing(12, ONE_ONE, "aaabbbbb", versions=[1, 0, 0, 1, 1, 1, 1, 1])
    assert [group.id for group in older.cut(-1)] == [1, 2, 0, 3, 4, 5], "older ones of whatever env come first"


def test_last_chance_goes_above_the_limit(mixing):
    batcher = mixing(8, ONE_ONE, "aaaaaabb", versions=[0, 0, 0, 0, 0, 1, 1, 1])
    assert batcher.waits_for({"b"}, 0) == set()
    assert cut_of(batcher, 0) == "aaaaa" and [group.start_version for group in batcher.groups] == [1, 1, 1]
    batcher = mixing(8, ONE_ONE, "aaaaaabb", versions=[0, 0, 0, 1, 1, 1, 1, 1])
    assert cut_of(batcher, 0) == "aaab", "and takes the place of others of its env"


def test_a_token_batch_counts_tokens(mixing):
    """Groups of 2 rollouts with 5 tokens; at most 65 of 100."""
    batcher = mixing(100, ONE_ONE, "aaaaaaaaaabbb", tokens=5)
    assert batcher.waits_for({"b"}, -1) == {"b"} and cut_of(batcher) == "aaaaaaabbb"
    assert cut_of(mixing(100, ONE_ONE, "aaaaaaaaaabbbb", tokens=5)) == "aaaaaabbbb"


def test_ended_env_leaves_its_share_to_others(mixing):
    weights = {"a": 1, "b": 1, "c": 8}
    assert cut_of(mixing(20, weights, "aaaaaaaaaabbbb", ended="c")) == "aaaaaabbbb"
    assert cut_of(mixing(20, weights, "aaaaaaaaaabbbbc", ended="c")) == "aaaaaaabbc", "but for what still waits of it"
    assert mixing(20, weights, "aaaaaaaaaa", ended="bc").waits_for({"b"}, -1) == set(), "the last one has no limit"


def test_without_a_mix_a_batch_takes_what_comes_first(mixing):
    batcher = mixing(20, ONE_ONE, "aaaaaaaaaabbbb")
    batcher.mixed_envs = []
    assert batcher.waits_for({"b"}, -1) == set() and cut_of(batcher) == "aaaaaaaaaa"
