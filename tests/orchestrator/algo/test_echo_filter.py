"""echo's filter: it narrows, token by token, and says what is wrong with a mask."""

import pytest

from prl.config.build import build
from prl.orchestrator.algo.base import Algorithm


@pytest.fixture
def echo(user_package):
    def make(fn, **kwargs):
        fn.__name__ = "keep"
        node = {
            "_target_": "prl.orchestrator.algo.echo.EchoAlgorithm",
            "filter": {"_target_": user_package(fn), **kwargs},
        }
        return build(node, Algorithm, "algo")

    return make


@pytest.fixture
def forked(talk, user, tool, call):
    """Two branches, each with a tool's message of its own."""
    start = [user("Where?")]
    for found in ("a lamp", "a shoe"):
        messages = talk.turn(start, f"I look for {found}.\n{call}")
        talk.turn([*messages, tool(found)], "Found.")
    return talk


def everything(rollout):
    return [[True] * len(branch.token_ids) for branch in rollout.branches]


async def test_a_filter_that_keeps_everything_changes_nothing_and_widens_nothing(forked, play, echo):
    (rollout,) = await play(echo(everything), [forked.rollout()])
    assert [forked.spans(sample) for sample in rollout.samples] == [[(0.1, "a lamp")], [(0.1, "a shoe")]]


async def test_a_filter_that_keeps_nothing_leaves_plain_grpo(forked, play, echo):
    (rollout,) = await play(
        echo(lambda rollout: [[False] * len(branch.token_ids) for branch in rollout.branches]), [forked.rollout()]
    )
    assert all(sample.ce_weights is None and sample.advantages is not None for sample in rollout.samples)


async def test_a_filter_narrows_token_by_token_with_its_own_arguments(forked, play, echo):
    def keep(rollout, *, drop, by):
        assert by == {"letters": True}
        return [[token != drop for token in branch.token_ids] for branch in rollout.branches]

    (letter,) = forked.encode("a")
    (rollout,) = await play(echo(keep, drop=letter, by={"letters": True}), [forked.rollout()])
    assert [forked.spans(sample) for sample in rollout.samples] == [[(0.1, " l"), (0.1, "mp")], [(0.1, " shoe")]]


async def test_each_branch_has_its_own_mask(forked, play, echo):
    def second(rollout):
        return [[branch.index == 1] * len(branch.token_ids) for branch in rollout.branches]

    (rollout,) = await play(echo(second), [forked.rollout()])
    assert [forked.spans(sample) for sample in rollout.samples] == [[], [(0.1, "a shoe")]]
    assert rollout.samples[0].ce_weights is None


async def test_masks_may_be_a_generator_of_tuples_or_arrays(forked, play, echo):
    import numpy as np

    def keep(rollout):
        yield from (np.ones(len(branch.token_ids), dtype=bool) for branch in rollout.branches)

    (rollout,) = await play(echo(keep), [forked.rollout()])
    assert [forked.spans(sample) for sample in rollout.samples] == [[(0.1, "a lamp")], [(0.1, "a shoe")]]


async def test_a_branch_that_does_not_train_has_no_mask(forked, play, echo, monkeypatch):
    cls = type(forked.trace)
    real = cls.branches.fget

    def last_only(trace):
        branches = real(trace)
        branches[0].trainable = False
        return branches

    monkeypatch.setattr(cls, "branches", property(last_only))
    rollout = forked.rollout()

    def keep(rollout):
        return [[True] * len(branch.token_ids) for branch in rollout.branches if branch.trainable]

    await play(echo(keep), [rollout])
    assert [forked.spans(sample) for sample in rollout.samples] == [[(0.1, "a shoe")]]
    with pytest.raises(ValueError, match="one keep-mask per trainable branch: 1, got 2"):
        await play(echo(everything), [rollout])


@pytest.mark.parametrize("count", [0, 1, 3])
async def test_another_number_of_masks_raises_with_both_counts(forked, play, echo, count):
    rollout = forked.rollout()
    masks = [[True] * len(branch.token_ids) for branch in [*rollout.branches] * 2]
    with pytest.raises(
        ValueError, match=rf"a_users_package.keep must return one keep-mask per trainable branch: 2, got {count}"
    ):
        await play(echo(lambda rollout: masks[:count]), [rollout])


@pytest.mark.parametrize("change", [-1, 1])
async def test_a_mask_of_another_length_raises_with_the_branch_and_both_lengths(forked, play, echo, change):
    rollout = forked.rollout()
    one, two = (len(branch.token_ids) for branch in rollout.branches)
    match = rf"a_users_package.keep: the keep-mask of branch 1 must span the branch's tokens: {two}, got {two + change}"
    with pytest.raises(ValueError, match=match):
        await play(echo(lambda rollout: [[True] * one, [True] * (two + change)]), [rollout])


async def test_the_first_model_turn_is_no_observation_even_where_the_filter_keeps_it(
    talk, user, tool, call, play, echo
):
    talk.turn([*talk.turn([user("?"), tool("given")], call), tool("a lamp")], "Done.")
    (rollout,) = await play(echo(everything), [talk.rollout()])
    assert talk.spans(rollout.samples[0]) == [(0.1, "a lamp")]
