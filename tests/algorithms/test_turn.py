"""Credit by turn: rewards of turns, their returns and baselines, on the tokens of each turn."""

import itertools
import math
from types import SimpleNamespace

import pytest
import verifiers.v1 as vf

from prl.algorithms.advantage import discounted_returns
from prl.algorithms.turn import TurnAlgorithm
from prl.envs.group import complete
from prl.orchestrator.state import restored, saved_group
from prl.orchestrator.types import Group


@pytest.fixture
def episode(new_talk, user):
    """`episode(2, [1, 0.5], weight=2.0)`: a rollout of two turns; a reward function returned the list."""

    def make(turns, given, *, weight=1.0, also=0.0):
        talk, messages = new_talk(), []
        for number in range(turns):
            messages = talk.turn([*messages, user("more")], "4" * (number + 1))
        talk.trace.record_reward("by_turn", given, weight)
        rollout = talk.rollout(also)
        return rollout

    return make


class Played:
    """What credit by turn reads of a rollout, and the advantages that it gives."""

    def __init__(self, rewards):
        self.turns = [SimpleNamespace(reward=reward) for reward in rewards]
        self.reward = sum(rewards)

    def assign_turns(self, advantages):
        self.advantages = advantages


def credit_of_turns(rollout, tokenizer):
    """The text and the one advantage of each run of sampled tokens."""
    runs = []
    for sample in rollout.samples:
        before = False
        for token, trains, advantage in zip(sample.token_ids, sample.mask, sample.advantages, strict=True):
            assert trains or advantage == 0.0
            if trains and not before:
                runs.append(([], set()))
            if trains:
                runs[-1][0].append(token)
                runs[-1][1].add(advantage)
            before = trains
    assert all(len(values) == 1 for _, values in runs)
    return [(tokenizer.decode(tokens, skip_special_tokens=True), values.pop()) for tokens, values in runs]


def test_rewards_of_turns_add_up_and_a_number_is_the_last_turns(episode):
    rollout = episode(3, [1.0, 0.0, 0.25], weight=2.0, also=-0.125)
    assert [turn.reward for turn in rollout.turns] == [2.0, 0.0, 0.375] and rollout.reward == 2.375
    assert [turn.message.content for turn in rollout.turns] == ["4", "44", "444"]
    assert [turn.reward for turn in episode(2, 1.0, also=0.5).turns] == [0.0, 1.5]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ([1.0], "by_turn returned 1 rewards for 2 turns"),
        ([], "by_turn returned 0 rewards"),
        ([3e38, -3e38], "by_turn returned 2 rewards for 2 turns"),
        ([float("nan"), 0.0], "the grader gave reward nan"),
    ],
)
def test_list_of_rewards_that_credit_cannot_use_fails_its_rollout(episode, given, why):
    with pytest.raises(ValueError, match=why):
        complete(episode(2, given))


class ByTurn(vf.Task):
    @vf.reward(weight=0.5)
    async def steps(self, trace: vf.Trace) -> list[float]:
        return [1.0, 3.0]


async def test_reward_function_may_return_a_list(episode):
    rollout = episode(2, 0.0)
    await ByTurn(vf.TaskData(idx=0, prompt="?")).score(rollout.trace)
    assert [turn.reward for turn in rollout.turns] == [0.5, 1.5] and rollout.reward == 2.0


def test_discounted_returns_by_hand():
    assert discounted_returns([1.0, 2.0, 4.0], 0.5) == [1 + 1 + 1, 2 + 2, 4]
    assert discounted_returns([1.0, 2.0], 0.0) == [1.0, 2.0] and discounted_returns([], 0.5) == []


async def test_credit_by_hand(episode, play, tokenizer):
    """Returns by turn at gamma 1/2: [2, 2], [0.5, 1], [3], whose means are 11/6 and, of two turns, 3/2."""
    group = [episode(2, [1.0, 2.0]), episode(2, [0.0, 1.0]), episode(1, [3.0])]
    await play(TurnAlgorithm(gamma=0.5), group)
    found = [credit_of_turns(rollout, tokenizer) for rollout in group]
    assert [[text for text, _ in turns] for turns in found] == [["4", "44"], ["4", "44"], ["4"]]
    numbers = [[advantage for _, advantage in turns] for turns in found]
    expected = [[2 - 11 / 6, 0.5], [0.5 - 11 / 6, -0.5], [3 - 11 / 6]]
    assert [n for turns in numbers for n in turns] == pytest.approx([n for turns in expected for n in turns], rel=1e-12)


async def test_rollout_with_the_most_turns_alone_has_no_credit_for_the_last(episode, play, tokenizer):
    group = [episode(2, [0.0, 1.0]), episode(1, 0.0)]
    await play(TurnAlgorithm(), group)
    assert [credit_of_turns(r, tokenizer) for r in group] == [[("4", 0.5), ("44", 0.0)], [("4", -0.5)]]


async def test_length_penalty_is_the_last_turns(episode, play, tokenizer):
    """Costs 1 and 2 turns, rewards 1 and 1: m is 1.5, so the first reward is shaped to 1 + 1/3."""
    group = [episode(1, 1.0), episode(2, [1.0, 0.0])]
    await play(TurnAlgorithm(length_penalty="turns", gamma=0.0), group)
    numbers = [advantage for r in group for _, advantage in credit_of_turns(r, tokenizer)]
    assert numbers == pytest.approx([1 / 6, -1 / 6, 0.0])


@pytest.mark.parametrize(
    ("size", "reaching", "factors"),
    [(4, 0.6, (0.75, 0.594)), (4, 0.3, (0.75, 0.367)), (4, 0.1, (0.75, 0.140)), (8, 0.6, (0.875, 0.792))],
)
def test_share_of_the_exact_gradient_by_turn_is_that_of_the_page(size, reaching, factors):
    """By all groups of an episode that stops, with .2, or goes on to a turn that earns 1 with probability .3."""
    episodes = {("stop",): 1 - reaching, ("go", "right"): 0.3 * reaching, ("go", "wrong"): 0.7 * reaching}
    rewards = {("stop",): [0.2], ("go", "right"): [0.0, 1.0], ("go", "wrong"): [0.0, 0.0]}
    # Derivatives of each action's log probability by the logit of `go`, and by that of `right`.
    scores = {"go": 1 - reaching, "stop": -reaching, "right": 1 - 0.3, "wrong": -0.3}
    exact = [reaching * (1 - reaching) * (0.3 - 0.2), reaching * 0.3 * (1 - 0.3) * 1.0]
    expected = [0.0, 0.0]
    for group in itertools.combinations_with_replacement(episodes, size):
        played = [Played(rewards[episode]) for episode in group]
        TurnAlgorithm().score_group(played)
        counts = [group.count(episode) for episode in episodes]
        orders = math.factorial(size) / math.prod(map(math.factorial, counts))
        probability = orders * math.prod(episodes[episode] for episode in group)
        for episode, rollout in zip(group, played, strict=True):
            for turn, (action, advantage) in enumerate(zip(episode, rollout.advantages, strict=True)):
                expected[turn] += probability * advantage * scores[action] / size
    assert [found / right for found, right in zip(expected, exact, strict=True)] == pytest.approx(factors, abs=5e-4)


def test_turns_survive_a_checkpoint(episode, make_env):
    rollout = episode(2, [1.0, 0.5])
    saved = saved_group(Group(0, make_env(), 0, None, [rollout]))
    saved.rollouts[0].trace = rollout.trace.model_dump_json()
    [again] = restored(saved, make_env()).rollouts
    assert again.turns == rollout.turns


def test_credit_of_another_number_of_turns_is_refused(episode):
    with pytest.raises(ValueError, match="align with turns: got 1 values for 2 turns"):
        episode(2, 1.0).assign_turns([1.0])
