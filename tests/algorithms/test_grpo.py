"""grpo's credit by hand, and its length penalty on what real conversations cost."""

import statistics

import numpy as np
import pytest

from prl.algorithms.advantage import overlong_penalty
from prl.algorithms.grpo import GRPOAlgorithm, OverlongPenalty


def penalised(by, **weights):
    return GRPOAlgorithm(length_penalty=by, **weights)


@pytest.fixture
def asks_a_tool(new_talk, user, tool, call):
    """A rollout of two turns: a call, what the tool answered, and an answer."""

    def make(reward, response, answer="4"):
        talk = new_talk()
        talk.turn([*talk.turn([user("2+2=")], call), tool(response)], answer)
        return talk.rollout(reward)

    return make


async def test_credit_is_reward_minus_group_mean(make_rollout, credit):
    group = [make_rollout(reward) for reward in (1.0, 0.0, 0.0, 1.0, 0.5)]
    await GRPOAlgorithm().finalize_group(group)
    assert [credit(rollout) for rollout in group] == [0.5, -0.5, -0.5, 0.5, 0.0]


@pytest.mark.parametrize("rewards", [(0.7,), (0.7,) * 3, (0.1,) * 8])
async def test_group_of_one_or_of_equals_earns_nothing(make_rollout, credit, rewards):
    group = [make_rollout(reward) for reward in rewards]
    await GRPOAlgorithm().finalize_group(group)
    assert all(credit(rollout) == 0.0 and rollout.advantages is not None for rollout in group)


def test_cost_counts_sampled_tokens_and_tool_answers(asks_a_tool, talk, call):
    rollout = asks_a_tool(1.0, "it is four", "yes")
    sampled = len(talk.encode(call)) + len("yes") + 2  # one token a byte; each turn ends with <|im_end|>
    assert rollout.num_completion_tokens == sampled == sum(map(sum, (s.mask for s in rollout.samples)))
    assert rollout.num_tool_response_tokens == len("it is four")
    assert rollout.trace.num_turns == 2


@pytest.mark.parametrize(("completion", "response"), [(1.0, 1.0), (1.0, 0.0), (0.0, 1.0), (0.5, 2.0), (0.0, 0.0)])
async def test_both_kinds_of_token_have_their_weight(asks_a_tool, answers, credit, play, completion, response):
    group = [asks_a_tool(1.0, "x" * 40), answers(1.0, "4" * 70), answers(0.0, "5")]
    grpo = penalised("tokens", completion_weight=completion, tool_response_weight=response)
    first = completion * group[0].num_completion_tokens + response * 40
    second = completion * 71
    m = (first + second) / 2
    shaped = [1 + max(0.0, 1 - cost / m) if m else 1.0 for cost in (first, second)] + [0.0]
    await play(grpo, group)
    expected = [s - sum(shaped) / 3 for s in shaped]
    assert [credit(r) for r in group] == pytest.approx(expected)
    assert len(set(expected[:2])) == (1 if m == 0 else 2), "the case tells the weights apart"


async def test_the_penalty_by_turns_counts_turns_and_no_tokens(asks_a_tool, answers, credit, play):
    group = [asks_a_tool(1.0, "x"), answers(1.0, "4" * 200), answers(0.5, "4")]  # two turns, one, one: m = 1.5
    await play(penalised("turns", completion_weight=9.0), group)
    shaped = [1.0, 1 + 1 / 3, 0.5]
    assert [credit(r) for r in group] == pytest.approx([s - sum(shaped) / 3 for s in shaped])


GROUPS = [(1.0, 0.0, 0.0, 1.0, 0.5), (0.7,), (0.1,) * 8, (-2.0, 3.5), (1e6, 0.0, 1e-6)]
EPS = 1e-6


@pytest.fixture
def credits(make_rollout, credit):
    async def of(rewards, **options):
        group = [make_rollout(reward) for reward in rewards]
        await GRPOAlgorithm(**options).finalize_group(group)
        return [credit(rollout) for rollout in group]

    return of


@pytest.mark.parametrize("rewards", GROUPS)
async def test_leave_one_out_by_brute_force(credits, rewards):
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


@pytest.mark.parametrize(
    ("max_tokens", "buffer", "penalties"),
    [
        (100, 20, {1: 0.0, 80: 0.0, 85: -0.25, 90: -0.5, 99: -0.95, 100: -1.0, 101: -1.0, 5000: -1.0}),
        (100, 0, {99: 0.0, 100: 0.0, 101: -1.0}),
        (4, 4, {0: 0.0, 1: -0.25, 2: -0.5, 3: -0.75, 4: -1.0, 5: -1.0}),
    ],
)
def test_overlong_penalty_falls_over_its_buffer(max_tokens, buffer, penalties):
    found = {tokens: overlong_penalty(tokens, max_tokens, buffer) for tokens in penalties}
    assert found == pytest.approx(penalties)


async def test_the_penalty_shapes_credit_and_leaves_the_reward(answers, credit, play):
    """10, 15 and 31 sampled tokens, the last one of each the end of the turn; max 20, curriculum 10: 0, -0.5, -1."""
    group = [answers(reward, "4" * length) for reward, length in ((1.0, 9), (1.0, 14), (0.0, 30))]
    assert [rollout.num_completion_tokens for rollout in group] == [10, 15, 31]
    shaped = [1.0, 0.5, -1.0]
    for options in ({}, {"normalize": "std"}, {"baseline": "leave_one_out"}):
        for rollout in group:
            rollout.advantages = None
        grpo = GRPOAlgorithm(overlong_penalty=OverlongPenalty(max_tokens=20, buffer=10), **options)
        await play(grpo, group)
        middle = [value - sum(shaped) / 3 for value in shaped]
        scale = 1 / (np.std(shaped, ddof=1) + EPS) if "normalize" in options else 1.5 if options else 1.0
        assert [credit(rollout) for rollout in group] == pytest.approx([value * scale for value in middle])
    assert [rollout.reward for rollout in group] == [1.0, 1.0, 0.0]


async def test_the_length_penalty_comes_before_baseline_and_deviation(answers, credit, play):
    """Costs 10, 30 and 2: shaped rewards 1.5, 1 and 0."""
    group = [answers(reward, "4" * length) for reward, length in ((1.0, 9), (1.0, 29), (0.0, 1))]
    await play(GRPOAlgorithm(length_penalty="tokens", baseline="leave_one_out", normalize="std"), group)
    std = np.std([1.5, 1.0, 0.0], ddof=1) + EPS
    assert [credit(rollout) for rollout in group] == pytest.approx([1.0 / std, 0.25 / std, -1.25 / std])


async def test_each_reward_is_normalized_by_itself(make_rollout, play, credit):
    """Scores 1, 0, 0 of weight 1, and 10, 20, 30 of weight -0.5: deviations (1/3) ** .5 and 10. A third is equal."""
    group = [make_rollout(1.0), make_rollout(0.0), make_rollout(0.0)]
    for rollout, length in zip(group, (10.0, 20.0, 30.0), strict=True):
        rollout.trace.record_reward("length", length, -0.5)
        rollout.trace.record_reward("format", 0.1, 3.0)
    group[2].trace.rewards["answer"] = None  # ungraded counts as 0
    await play(GRPOAlgorithm(normalize="each"), group)
    std, tens = (1 / 3) ** 0.5 + EPS, 10 + EPS
    expected = [2 / 3 / std + 5 / tens, -1 / 3 / std, -1 / 3 / std - 5 / tens]
    assert [credit(rollout) for rollout in group] == pytest.approx(expected, rel=1e-12)
