"""What went wrong once: credit at the edges of floats, streams of one's own, history that is rendered again."""

import asyncio
import functools

import numpy as np
import pytest
import torch

from prl.errors import ConfigError, EngineError
from prl.orchestrator.algo.advantage import mean_normalized
from prl.orchestrator.algo.base import Algorithm
from prl.orchestrator.algo.custom import CustomAlgorithm
from prl.orchestrator.algo.echo import EchoAlgorithm
from prl.orchestrator.algo.opd import ReferenceLogprobs

THINK = "<think>\nhm\n</think>\n\n"


def test_rewards_that_cancel_have_no_mean_to_divide_by():
    assert sum([0.1, 0.2, -0.3]) > 0, "in floats"
    assert mean_normalized([0.1, 0.2, -0.3]) == [0.0, 0.0, 0.0]
    assert mean_normalized([1e-9, 3e-9]) == pytest.approx([-0.5, 0.5])


@pytest.mark.parametrize("kind", [torch.tensor, np.array, np.float32])
async def test_a_credit_may_be_a_tensor_without_dimensions(make_rollout, play, kind):
    def credit(group):
        return [kind(1.0)]

    (rollout,) = await play(CustomAlgorithm(fn=credit), [make_rollout()])
    assert rollout.advantages == [0.0, 1.0, 1.0, 1.0]


def test_a_credit_that_is_no_number_leaves_none(make_rollout):
    rollout = make_rollout()
    for bad in (float("nan"), float("inf"), None):
        with pytest.raises(ValueError, match="advantage"):
            rollout.assign_advantages(bad)
    assert rollout.advantages is None


class OwnStreams(Algorithm):
    """Leaves a sampled token out of its own component, and trains another by policy gradient."""

    action_loss_type = "ce"

    async def score_rollout(self, rollout):
        rollout.samples[0].ce_weights = [0.0, 1.0, 0.0, 1.0]
        rollout.samples[0].rl_weights = [0.0, 0.0, 1.0, 0.0]
        rollout.assign_advantages(1.0)


async def test_a_zero_that_a_hook_wrote_stays_zero(make_rollout, play):
    (rollout,) = await play(OwnStreams(), [make_rollout()])
    (sample,) = rollout.samples
    assert (sample.ce_weights, sample.rl_weights) == ([0.0, 1.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0])


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        ({"name": "t", "base_url": 5}, "base_url=5 is not a URL"),
        ({"name": "t", "timeout_s": "abc"}, "timeout_s="),
        ({"name": "t", "timeout_s": None}, "timeout_s="),
        ({"name": 5}, "algo.teacher"),
        ({"name": "t", "base_url": "http://h", "api_key_var": 5}, "api_key_var"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(teacher, message, validated):
    with pytest.raises(ConfigError, match=message):
        validated({"_target_": "prl.orchestrator.algo.opd.OPDAlgorithm", "teacher": teacher})


@pytest.fixture
def broken_prefix(talk, user, tool, call):
    """The template drops past thinking once a user speaks: the last turn starts a branch of its own."""
    messages = talk.turn([user("u0")], call)
    messages = talk.turn([*messages, tool("first tool")], THINK + call)
    messages = talk.turn([*messages, tool("second tool")], "done")
    talk.turn([*messages, user("u1")], "again")
    return talk


def test_a_tools_answer_costs_once_however_often_it_is_rendered(broken_prefix):
    rollout, encode = broken_prefix.rollout(), broken_prefix.tokenizer.encode
    assert len(rollout.samples) == 2
    assert rollout.num_tool_response_tokens == len(encode("first tool")) + len(encode("second tool"))


async def test_echo_trains_on_a_message_once_however_often_it_is_rendered(broken_prefix, play):
    roles = {"tool": {"alpha": 0.1}, "user": {"alpha": 0.1}, "assistant": {"alpha": 0.5}}
    (rollout,) = await play(EchoAlgorithm(roles=roles), [broken_prefix.rollout()])
    trained = [text for sample in rollout.samples for _, text in broken_prefix.spans(sample)]
    assert sorted(trained) == ["first tool", "second tool", "u1"], "and never on the model's own words"


async def test_a_tools_answer_is_the_same_where_the_thinking_before_it_was_dropped(talk, user, tool, call, play):
    messages = talk.turn([user("What is at 1?")], "<think>\nhm\n</think>\n\n" + call)
    messages = talk.turn([*messages, tool("a lamp")], "A lamp.")
    assert messages[1].reasoning_content == "hm"
    stripped = [m.model_copy(update={"reasoning_content": None}) if m.role == "assistant" else m for m in messages]
    talk.turn([*stripped, user("Why?")], "See.")
    (rollout,) = await play(EchoAlgorithm(), [talk.rollout()])
    assert [talk.spans(sample) for sample in rollout.samples] == [[(0.1, "a lamp")], []]
    assert rollout.num_tool_response_tokens == len(talk.encode("a lamp"))


async def test_echo_sees_the_model_has_spoken_where_its_turn_is_rendered_again(talk, user, play):
    messages = talk.turn([user("u0")], THINK + "a0")
    messages = talk.turn([*messages, user("u1")], THINK + "a1")
    talk.turn([*messages, user("u2")], THINK + "a2")
    (rollout,) = await play(EchoAlgorithm(roles={"user": {"alpha": 0.1}}), [talk.rollout()])
    assert sorted(text for sample in rollout.samples for _, text in talk.spans(sample)) == ["u1", "u2"]


async def test_a_filter_may_leave_a_shared_message_to_a_later_branch(talk, user, tool, call, play):
    shared = [*talk.turn([user("?")], call), tool("lamp")]
    talk.turn(shared, "A")
    talk.turn(shared, "B")

    def keep(rollout):
        return [[branch.index == 1] * len(branch.token_ids) for branch in rollout.branches]

    (rollout,) = await play(EchoAlgorithm(filter=keep), [talk.rollout()])
    assert [talk.spans(sample) for sample in rollout.samples] == [[], [(0.1, "lamp")]]


@pytest.mark.parametrize(("masks", "message"), [(None, "per trainable branch"), ([True], "span the branch's tokens")])
async def test_a_filter_that_returns_no_masks_is_told_so(talk, user, tool, call, play, masks, message):
    talk.turn([*talk.turn([user("?")], call), tool("lamp")], "A")

    def keep(rollout, masks):
        return masks

    with pytest.raises(ValueError, match=message):
        await play(EchoAlgorithm(filter=functools.partial(keep, masks=masks)), [talk.rollout()])


async def test_nothing_more_of_a_rollout_is_scored_once_one_request_failed(reference, make_rollout, make_sample):
    reference.failing = {1000}
    rollout = make_rollout()
    rollout.samples = [make_sample(start=1000), *(make_sample() for _ in range(20))]
    with pytest.raises(EngineError):
        await ReferenceLogprobs(reference, 1).compute(rollout)
    asked = len(reference.asked)
    await asyncio.sleep(0.1)
    assert len(reference.asked) == asked


class Broken(Algorithm):
    """Writes a reference logprob that is none."""

    action_loss_type = "ref_kl"

    async def score_rollout(self, rollout):
        rollout.samples[0].ref_logprobs = [0.0, float("nan"), 0.0, 0.0]


async def test_a_number_that_is_not_finite_is_refused_where_it_was_written(make_rollout, play):
    with pytest.raises(ValueError, match="ref_logprobs of a sample holds a number that is not finite"):
        await play(Broken(), [make_rollout()])
