"""Credit of max_rl, reward and custom, and the rules of `assign_advantages`."""

import functools
import itertools
import re

import numpy as np
import pytest
import torch

from experiments.max_rl.gradient import share_of_log_likelihood
from prl.algorithms.advantage import centred, mean_normalized
from prl.algorithms.custom import CustomAlgorithm
from prl.algorithms.echo import EchoAlgorithm
from prl.algorithms.grpo import GRPOAlgorithm
from prl.algorithms.max_rl import MaxRLAlgorithm
from prl.algorithms.reinforce_pp import ReinforcePPAlgorithm
from prl.algorithms.reward import RewardAlgorithm


@pytest.fixture
def custom():
    return lambda fn, **kwargs: CustomAlgorithm(fn=functools.partial(fn, **kwargs))


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ((1.0, 0.0, 0.0, 0.0), [3.0, -1.0, -1.0, -1.0]),
        ((3.0, -1.0), [2.0, -2.0]),
        ((-1.0, 1.0), [0.0, 0.0]),
        ((0.3,), [0.0]),
    ],
)
async def test_max_rl_credit_by_hand(make_rollout, credit, play, rewards, expected):
    group = await play(MaxRLAlgorithm(), [make_rollout(r) for r in rewards])
    assert [credit(rollout) for rollout in group] == expected


async def test_reward_credit_has_no_baseline(make_rollout, credit, play):
    group = [make_rollout(reward, lengths=(4, 2)) for reward in (1.0, 1.0, -0.5, 0.0)]
    await play(RewardAlgorithm(), group)
    assert [credit(rollout) for rollout in group] == [1.0, 1.0, -0.5, 0.0]
    assert group[0].samples[1].advantages == [0.0, 1.0]


async def test_custom_function_gets_the_group_and_its_arguments(make_rollout, credit, play, custom):
    def fn(group, *, scale):
        best = max(rollout.reward for rollout in group)
        return [scale * (rollout.reward - best) for rollout in group]

    group = [make_rollout(0.25), make_rollout(1.0), make_rollout(9.0, error="ValueError: no")]
    await play(custom(fn, scale=4), group)
    assert [credit(rollout) for rollout in group[:2]] == [-3.0, 0.0] and group[2].advantages is None


def twice_the_reward(group):
    assert [rollout.trace.num_turns for rollout in group] == [1, 1, 1], "all else is the rollout's own"
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


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
async def test_custom_lists_span_all_samples(make_rollout, play, custom, kind):
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    rollout, other = make_rollout(lengths=(3, 2)), make_rollout(lengths=(2,))
    await play(custom(lambda group: (kind(values), kind([6.0, 7.0]))), [rollout, other])
    assert [sample.advantages for sample in rollout.samples] == [[0.0, 2.0, 3.0], [0.0, 5.0]]
    assert other.samples[0].advantages == [0.0, 7.0]
    assert {type(a) for a in rollout.advantages} == {float}


def test_credit_off_the_mask_is_ignored(make_rollout):
    rollout = make_rollout(lengths=(3, 3))
    rollout.assign_advantages([float("nan"), 1.0, 2.0, 9.0, 3.0, 4.0])
    assert rollout.advantages == [0.0, 1.0, 2.0, 0.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        ([1.0], "2 rollouts, got 1 values"),
        (0.5, "got a float"),
        (None, "got a NoneType"),
        ({0: 1.0, 1: 1.0}, "got a dict"),
        (np.ones(3), "got 3 values"),
        (torch.tensor(0.5), "got a Tensor"),
        ([float("nan"), 0.0], "a finite number, got nan"),
        ([[0.0, 0.0, float("inf"), 0.0], 0.0], "a finite number, got inf"),
        ([[0.0] * 3, 0.0], "got 3 values for 4 token_ids"),
    ],
)
async def test_custom_credit_of_the_wrong_form_is_refused(make_rollout, play, custom, returned, got):
    with pytest.raises(ValueError, match=re.escape(got)):
        await play(custom(lambda group: returned), [make_rollout(), make_rollout()])


@pytest.mark.parametrize(
    ("options", "before"),
    [({}, [0.5, -0.5, -2.0, 2.0, 0.0]), ({"group_baseline": False}, [1.0, 0.0, 0.0, 4.0, 2.0])],
)
async def test_reinforce_pp_normalises_over_the_batch(make_rollout, play, credit, options, before):
    """Groups (1, 0), (0, 4) and (2,), with and without their means; a batch of equal credit has none."""
    algorithm = ReinforcePPAlgorithm(**options)
    groups = [await play(algorithm, [make_rollout(r, lengths=(4, 3)) for r in of]) for of in ((1, 0), (0, 4), (2,))]
    algorithm.finalize_batch(groups)
    mean = sum(before) / 5
    std = (sum((value - mean) ** 2 for value in before) / 4) ** 0.5
    found = [credit(rollout) for group in groups for rollout in group]
    assert found == pytest.approx([(value - mean) / (std + 1e-6) for value in before], rel=1e-12)
    alike = await play(algorithm, [make_rollout(0.1) for _ in range(3)])
    algorithm.finalize_batch([alike])
    assert [credit(rollout) for rollout in alike] == [0.0] * 3


@pytest.mark.parametrize("advantages", [mean_normalized, centred])
def test_expected_gradient_of_a_group_is_that_of_all_its_outcomes(advantages):
    """By brute force: every group of four replies of a policy over three, of which the first earns 1."""
    logits = torch.tensor([-0.4, 0.3, 0.9], dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(0)
    surrogate = torch.tensor(0.0, dtype=torch.float64)
    for replies in itertools.product(range(3), repeat=4):
        chance = logprobs[list(replies)].sum().exp().detach()
        given = advantages([float(reply == 0) for reply in replies])
        surrogate = surrogate + chance * (torch.tensor(given, dtype=torch.float64) * logprobs[list(replies)]).mean()
    [expected] = torch.autograd.grad(surrogate, logits, retain_graph=True)
    [of_log_p] = torch.autograd.grad(logprobs[0], logits)
    p = logprobs[0].exp().item()
    torch.testing.assert_close(expected, share_of_log_likelihood(advantages, p, 4) * of_log_p, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("p", [0.01, 0.2, 0.7])
def test_gradient_of_max_rl_tends_to_that_of_the_log_likelihood_as_the_group_grows(p):
    shares = [share_of_log_likelihood(mean_normalized, p, n) for n in (2, 16, 256, 1000)]
    expected = [1 - (1 - p) ** n - p * (1 - p) ** (n - 1) for n in (2, 16, 256, 1000)]
    assert shares == pytest.approx(expected, rel=1e-9)
    assert 1 - shares[-1] < 0.001
    assert share_of_log_likelihood(centred, p, 1000) == pytest.approx(p * 0.999), "grpo's stays that of p"
