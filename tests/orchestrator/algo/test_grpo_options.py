"""grpo's baseline, normalisation and overlong penalty: by hand, by brute force, and together."""

import random
import statistics

import numpy as np
import pytest

from prl.errors import ConfigError
from prl.orchestrator.algo.advantage import centred, leave_one_out, overlong_penalty, std_normalized
from prl.orchestrator.algo.grpo import GRPOAlgorithm, OverlongPenalty

GROUPS = [(1.0, 0.0, 0.0, 1.0, 0.5), (0.7,), (0.1,) * 8, (-2.0, 3.5), (1e6, 0.0, 1e-6)]
EPS = 1e-6


@pytest.fixture
def credits(make_rollout, credit):
    async def of(rewards, **knobs):
        group = [make_rollout(reward) for reward in rewards]
        await GRPOAlgorithm(**knobs).finalize_group(group)
        return [credit(rollout) for rollout in group]

    return of


@pytest.mark.parametrize("rewards", GROUPS)
async def test_leave_one_out_is_the_reward_minus_the_mean_of_the_others(credits, rewards):
    others = [[*rewards[:i], *rewards[i + 1 :]] for i in range(len(rewards))]
    expected = [r - statistics.fmean(rest) if rest else 0.0 for r, rest in zip(rewards, others, strict=True)]
    assert await credits(rewards, baseline="leave_one_out") == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("rewards", GROUPS)
async def test_std_is_that_of_the_sample(credits, rewards):
    std = float(np.std(rewards, ddof=1)) if len(rewards) > 1 else 0.0
    expected = [(r - statistics.fmean(rewards)) / (std + EPS) for r in rewards]
    found = await credits(rewards, normalize="std")
    if len(set(rewards)) == 1:
        assert all(value == 0.0 for value in found), "no noise of rounding, which 1 / eps would blow up"
    else:
        assert found == pytest.approx(expected, rel=1e-9)


async def test_by_hand(credits):
    """Rewards 1, 0, 0: mean 1/3, sample variance (4/9 + 1/9 + 1/9) / 2 = 1/3."""
    std = (1 / 3) ** 0.5 + EPS
    assert await credits((1.0, 0.0, 0.0), normalize="std") == pytest.approx([2 / 3 / std, -1 / 3 / std, -1 / 3 / std])
    assert await credits((1.0, 0.0, 0.0), baseline="leave_one_out") == pytest.approx([1.0, -0.5, -0.5])
    both = await credits((1.0, 0.0, 0.0), baseline="leave_one_out", normalize="std")
    assert both == pytest.approx([1 / std, -0.5 / std, -0.5 / std])


@pytest.mark.parametrize("knobs", [{"normalize": "std"}, {"baseline": "leave_one_out"}])
async def test_only_survivors_count(make_rollout, credit, knobs):
    """Of four rollouts one failed and two remain beside it, or one alone."""
    group = [make_rollout(1.0), make_rollout(0.0), make_rollout(9.0, error="ValueError: no")]
    await GRPOAlgorithm(**knobs).finalize_group(group)
    expected = 0.5 / (0.5**0.5 + EPS) if "normalize" in knobs else 1.0
    assert [credit(rollout) for rollout in group[:2]] == pytest.approx([expected, -expected])
    assert group[2].advantages is None
    group = [make_rollout(1.0), make_rollout(9.0, error="ValueError: no")]
    await GRPOAlgorithm(**knobs).finalize_group(group)
    assert credit(group[0]) == 0.0


def test_empty_groups_and_random_ones():
    assert leave_one_out([]) == std_normalized([], []) == []
    rng = random.Random(0)
    for size in range(2, 9):
        rewards = [rng.choice([0.0, 0.25, 1.0, -3.0]) + rng.random() for _ in range(size)]
        middle = centred(rewards)
        assert statistics.stdev(std_normalized(middle, middle)) == pytest.approx(1.0, abs=1e-4)
        assert sum(leave_one_out(middle)) == pytest.approx(0.0, abs=1e-12)


# --- overlong


@pytest.mark.parametrize(
    ("tokens", "penalty"),
    [(1, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (99, -0.95), (100, -1.0), (101, -1.0), (5000, -1.0)],
)
def test_overlong_penalty_of_100_tokens_with_a_buffer_of_20(tokens, penalty):
    assert overlong_penalty(tokens, 100, 20) == pytest.approx(penalty)


@pytest.mark.parametrize(("tokens", "penalty"), [(99, 0.0), (100, 0.0), (101, -1.0)])
def test_without_a_buffer_it_is_a_step(tokens, penalty):
    assert overlong_penalty(tokens, 100, 0) == penalty


def test_a_buffer_of_all_tokens_falls_from_the_first():
    assert [overlong_penalty(tokens, 4, 4) for tokens in range(6)] == [0.0, -0.25, -0.5, -0.75, -1.0, -1.0]


async def test_the_penalty_shapes_credit_and_leaves_the_reward(new_talk, user, credit, play):
    """10, 15 and 31 sampled tokens, the last one of each the end of the turn; max 20, buffer 10: 0, -0.5, -1."""
    group = []
    for reward, length in ((1.0, 9), (1.0, 14), (0.0, 30)):
        talk = new_talk()
        talk.turn([user("2+2=")], "4" * length)
        group.append(talk.rollout(reward))
    assert [rollout.num_completion_tokens for rollout in group] == [10, 15, 31]
    shaped = [1.0, 0.5, -1.0]
    for knobs in ({}, {"normalize": "std"}, {"baseline": "leave_one_out"}):
        for rollout in group:
            rollout.advantages = None
        grpo = GRPOAlgorithm(overlong_penalty=OverlongPenalty(max_tokens=20, buffer=10), **knobs)
        await play(grpo, group)
        middle = [value - sum(shaped) / 3 for value in shaped]
        scale = 1 / (np.std(shaped, ddof=1) + EPS) if "normalize" in knobs else 1.5 if knobs else 1.0
        assert [credit(rollout) for rollout in group] == pytest.approx([value * scale for value in middle])
    assert [rollout.reward for rollout in group] == [1.0, 1.0, 0.0]


async def test_turns_of_a_conversation_add_up(new_talk, user, credit, play):
    talk, short = new_talk(), new_talk()
    talk.turn([*talk.turn([user("2+2=")], "4" * 9), user("again")], "4" * 9)  # twice 10 tokens
    short.turn([user("2+2=")], "4")
    group = [talk.rollout(1.0), short.rollout(1.0)]
    await play(GRPOAlgorithm(overlong_penalty=OverlongPenalty(max_tokens=19)), group)
    assert [credit(rollout) for rollout in group] == [-0.5, 0.5]


async def test_the_length_penalty_comes_before_baseline_and_deviation(new_talk, user, credit, play):
    """Costs 10, 30 and 2: shaped rewards 1.5, 1 and 0."""
    group = []
    for reward, length in ((1.0, 9), (1.0, 29), (0.0, 1)):
        talk = new_talk()
        talk.turn([user("2+2=")], "4" * length)
        group.append(talk.rollout(reward))
    await play(GRPOAlgorithm(length_penalty="tokens", baseline="leave_one_out", normalize="std"), group)
    std = np.std([1.5, 1.0, 0.0], ddof=1) + EPS
    assert [credit(rollout) for rollout in group] == pytest.approx([1.0 / std, 0.25 / std, -1.25 / std])


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"overlong_penalty": {"max_tokens": 9}, "length_penalty": "turns"}, "algo: length_penalty and overlong_penal"),
        ({"overlong_penalty": {"buffer": 3}}, "algo.overlong_penalty.buffer=3 must be at most .*max_tokens=null"),
        ({"overlong_penalty": {"max_tokens": 2, "buffer": 3}}, "buffer=3 must be at most .*max_tokens=2"),
        ({"overlong_penalty": {"max_tokens": 0}}, "algo.overlong_penalty.max_tokens="),
        ({"overlong_penalty": {"bufer": 1}}, "algo.overlong_penalty.*bufer"),
        ({"normalize": "mean"}, "algo.normalize=mean: "),
        ({"baseline": "rloo"}, "algo.baseline=rloo: "),
    ],
)
@pytest.mark.parametrize("algorithm", ["grpo.GRPOAlgorithm", "echo.EchoAlgorithm"])
def test_refusals(validated, algorithm, knobs, message):
    with pytest.raises(ConfigError, match=message):
        validated({"_target_": f"prl.orchestrator.algo.{algorithm}", **knobs})
