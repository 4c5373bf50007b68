"""Credit of max_rl, reward and custom, and the rules of `assign_advantages`."""

import functools
import re

import numpy as np
import pytest
import torch
from hydra.errors import HydraException

from prl.compose import compose
from prl.config.build import build
from prl.orchestrator.algo.base import Algorithm
from prl.orchestrator.algo.custom import CustomAlgorithm
from prl.orchestrator.algo.echo import EchoAlgorithm
from prl.orchestrator.algo.grpo import GRPOAlgorithm
from prl.orchestrator.algo.max_rl import MaxRLAlgorithm
from prl.orchestrator.algo.reward import RewardAlgorithm


@pytest.fixture
def custom(user_package):
    def make(fn, **kwargs):
        fn.__name__ = "credit"
        node = {
            "_target_": "prl.orchestrator.algo.custom.CustomAlgorithm",
            "fn": {"_target_": user_package(fn), **kwargs},
        }
        return build(node, Algorithm, "algo")

    return make


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ((1.0, 0.0, 0.0, 0.0), [3.0, -1.0, -1.0, -1.0]),
        ((3.0, -1.0), [2.0, -2.0]),
        ((0.0, 0.0), [0.0, 0.0]),
        ((-1.0, 1.0), [0.0, 0.0]),
        ((-1.0, -3.0), [0.0, 0.0]),
        ((0.1,) * 8, [0.0] * 8),
        ((0.3,), [0.0]),
    ],
)
async def test_max_rl_credits_the_distance_from_the_mean_over_the_mean(make_rollout, credit, play, rewards, expected):
    group = await play(MaxRLAlgorithm(), [make_rollout(r) for r in rewards])
    assert [credit(rollout) for rollout in group] == expected


async def test_max_rl_measures_survivors_against_survivors(make_rollout, credit, play):
    group = [make_rollout(1.0), make_rollout(0.0), make_rollout(7.0, error="ValueError: no")]
    await play(MaxRLAlgorithm(), group)
    assert [credit(rollout) for rollout in group[:2]] == [1.0, -1.0] and group[2].advantages is None


async def test_reward_credits_the_reward_without_a_baseline_on_every_sample(make_rollout, credit, play):
    group = [make_rollout(reward, lengths=(4, 2)) for reward in (1.0, 1.0, -0.5, 0.0)]
    await play(RewardAlgorithm(), group)
    assert [credit(rollout) for rollout in group] == [1.0, 1.0, -0.5, 0.0]
    assert group[0].samples[1].advantages == [0.0, 1.0]


async def test_reward_is_credited_on_arrival(make_rollout):
    rollout = make_rollout(0.5)
    await RewardAlgorithm().finalize_rollout(rollout)
    assert rollout.advantages == [0.0, 0.5, 0.5, 0.5]


async def test_a_custom_function_sees_the_group_and_its_keyword_arguments(make_rollout, credit, play, custom):
    def fn(group, *, scale):
        best = max(rollout.reward for rollout in group)
        return [scale * (rollout.reward - best) for rollout in group]

    group = [make_rollout(0.25), make_rollout(1.0), make_rollout(9.0, error="ValueError: no")]
    await play(custom(fn, scale=4), group)
    assert [credit(rollout) for rollout in group[:2]] == [-3.0, 0.0] and group[2].advantages is None


def twice_the_reward(group):
    assert [rollout.num_turns for rollout in group] == [1, 1, 1], "all else is the rollout's own"
    return [2 * rollout.reward for rollout in group]


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (GRPOAlgorithm, [1.5 - 2.5 / 3, 1.0 - 2.5 / 3, -2.5 / 3]),
        (EchoAlgorithm, [1.5 - 2.5 / 3, 1.0 - 2.5 / 3, -2.5 / 3]),
        (MaxRLAlgorithm, [0.8, 0.2, -1.0]),  # (shaped - 5/6) / (5/6)
        (RewardAlgorithm, [1.5, 1.0, 0.0]),
        (functools.partial(CustomAlgorithm, fn=twice_the_reward), [3.0, 2.0, 0.0]),
    ],
)
@pytest.mark.parametrize("by", ["tokens", None])
async def test_the_length_penalty_shapes_what_credit_is_computed_from(answers, credit, play, algorithm, expected, by):
    """10, 30 and 2 tokens: m = 20, so the rewards 1, 1, 0 are shaped to 1.5, 1, 0. The rollouts keep theirs."""
    group = await play(algorithm(length_penalty=by), [answers(1.0, "4" * 9), answers(1.0, "4" * 29), answers(0.0, "5")])
    if by is None:
        plain = await play(algorithm(), [answers(1.0, "4" * 9), answers(1.0, "4" * 29), answers(0.0, "5")])
        expected = [credit(rollout) for rollout in plain]
        assert expected[0] == expected[1]
    assert [credit(rollout) for rollout in group] == pytest.approx(expected)
    assert [rollout.reward for rollout in group] == [rollout.samples[0].reward for rollout in group] == [1.0, 1.0, 0.0]


async def test_a_custom_function_gives_up_a_rollout_under_a_length_penalty_too(answers, play):
    def fn(group):
        group[0].fail(ValueError("no"))
        return [rollout.reward for rollout in group]

    group = await play(CustomAlgorithm(fn=fn, length_penalty="turns"), [answers(1.0, "4"), answers(1.0, "5")])
    assert [rollout.failed for rollout in group] == [True, False]


@pytest.mark.parametrize("name", ["grpo", "max_rl", "reward", "echo", "custom", "opd", "opsd", "sft"])
def test_every_algorithm_that_reads_rewards_has_a_length_penalty_and_no_other(name):
    given = ["run.name=x", f"algo={name}", *["algo.fn._target_=prl.models.model_path"] * (name == "custom")]
    if name in ("opd", "opsd", "sft"):
        with pytest.raises(HydraException):
            compose([*given, "algo.length_penalty=turns"])
    else:
        config = compose([*given, "algo.length_penalty=turns", "algo.completion_weight=2"])
        assert build(config.algo, Algorithm, "algo").length_penalty == "turns"


@pytest.mark.parametrize("kind", [int, float, bool, np.float64, np.float32, np.int64])
async def test_a_custom_scalar_may_be_of_any_number_type(make_rollout, credit, play, custom, kind):
    (rollout,) = await play(custom(lambda group: [kind(1)]), [make_rollout()])
    assert credit(rollout) == 1.0 and {type(a) for a in rollout.advantages} == {float}


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
async def test_custom_lists_span_the_samples_and_are_zero_off_the_mask(make_rollout, play, custom, kind):
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    rollout, other = make_rollout(lengths=(3, 2)), make_rollout(lengths=(2,))
    await play(custom(lambda group: (kind(values), kind([6.0, 7.0]))), [rollout, other])
    assert [sample.advantages for sample in rollout.samples] == [[0.0, 2.0, 3.0], [0.0, 5.0]]
    assert other.samples[0].advantages == [0.0, 7.0]
    assert {type(a) for a in rollout.advantages} == {float}


async def test_a_scalar_and_a_list_may_stand_side_by_side(make_rollout, play, custom):
    group = await play(custom(lambda group: [2, [1.0] * 4]), [make_rollout(), make_rollout()])
    assert [rollout.advantages for rollout in group] == [[0.0, 2.0, 2.0, 2.0], [0.0, 1.0, 1.0, 1.0]]


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        ([1.0], "1 values"),
        ([1.0] * 3, "3 values"),
        ([], "0 values"),
        (0.5, "a float"),
        (None, "a NoneType"),
        ({0: 1.0, 1: 1.0}, "a dict"),
        (np.ones(3), "3 values"),
        (torch.ones(1), "1 values"),
        (np.float64(1), "a float64"),
        (np.array(0.5), "a ndarray"),
        (torch.tensor(0.5), "a Tensor"),
    ],
)
async def test_custom_wants_a_list_of_one_entry_for_each_rollout(make_rollout, play, custom, returned, got):
    match = f"a_users_package.credit must return a list with one entry for each of the 2 rollouts, got {got}"
    with pytest.raises(ValueError, match=match):
        await play(custom(lambda group: returned), [make_rollout(), make_rollout()])


@pytest.mark.parametrize("returned", [(0.5, -1), np.array([0.5, -1.0]), torch.tensor([0.5, -1.0])])
async def test_custom_takes_an_array_of_one_entry_for_each_rollout(make_rollout, play, custom, returned):
    rollouts = [make_rollout(lengths=(2,)), make_rollout(lengths=(2,))]
    await play(custom(lambda group: returned), rollouts)
    assert [rollout.advantages for rollout in rollouts] == [[0.0, 0.5], [0.0, -1.0]]


@pytest.mark.parametrize("length", [0, 6, 8])
async def test_a_custom_list_of_another_length_raises_with_both(make_rollout, play, custom, length):
    with pytest.raises(ValueError, match=rf"align.*got {length} values for 7 token_ids in 2 sample\(s\)"):
        await play(custom(lambda group: [[0.0] * length]), [make_rollout(lengths=(4, 3))])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), np.float32("nan")])
async def test_a_custom_credit_that_is_no_finite_number_raises(make_rollout, play, custom, bad):
    for returned in ([bad], [[0.0, 0.0, bad, 0.0]]):
        with pytest.raises(ValueError, match=re.escape(f"a finite number, got {float(bad)} (reward 0.5)")):
            await play(custom(lambda group, returned=returned: returned), [make_rollout(0.5)])


def test_what_a_list_holds_off_the_mask_is_of_no_consequence(make_rollout):
    rollout = make_rollout(lengths=(3, 3))
    rollout.assign_advantages([float("nan"), 1.0, 2.0, 9.0, 3.0, 4.0])
    assert rollout.advantages == [0.0, 1.0, 2.0, 0.0, 3.0, 4.0]


def test_a_later_credit_replaces_an_earlier_one(make_rollout):
    rollout = make_rollout(advantages=1.0)
    rollout.assign_advantages(-2)
    assert rollout.advantages == [0.0, -2.0, -2.0, -2.0]


@pytest.mark.parametrize("length", [1, 3])
def test_a_list_as_long_as_what_trains_or_as_one_is_no_credit(make_rollout, length):
    rollout = make_rollout(lengths=(4,))  # three of the four tokens train
    with pytest.raises(ValueError, match=f"align.*got {length} values for 4 token_ids"):
        rollout.assign_advantages([1.0] * length)
    assert rollout.advantages is None


def test_a_rollout_without_samples_takes_a_scalar_and_an_empty_list(make_rollout):
    rollout = make_rollout(lengths=())
    for credit in (1.0, []):
        rollout.assign_advantages(credit)
        assert rollout.advantages == []
