"""What the server saw and what the trainer sees: one token list, or that rollout's failure."""

from types import SimpleNamespace

import msgspec
import pytest
import verifiers.v1 as vf
from verifiers.v1 import graph
from verifiers.v1.trace import ModelCall, TimeSpan
from verifiers.v1.types import Usage

from prl.engines.replies import Completion
from prl.envs.group import GroupRequest, play_group
from prl.envs.turn import commit
from prl.rollouts.inputs import Picture
from prl.rollouts.messages import TrainingSample
from prl.rollouts.rollout import ERROR_KINDS
from prl.rollouts.samples import TokenMismatch, samples_of


def samples(trace):
    return samples_of(trace, env_name="toy", temperature=1.0, live=True)


@pytest.fixture
def three_turns(talk, user, renderer):
    """A trace of three calls, the later prompts bridged from the earlier tokens."""
    sampler = SimpleNamespace(renderer=renderer, pool=SimpleNamespace(model="policy"))
    history, before = [], []
    for text, printed in (("a", [9, 10]), ("b", [11, 12]), ("c", [13, 14])):
        history = [*history, user(text)]
        rendered = renderer.render([{"role": "user", "content": text}], add_generation_prompt=True)
        count = len(before)
        rendered.token_ids = [*before, *rendered.token_ids]
        rendered.message_indices = [-1] * count + [i if i < 0 else len(history) - 1 for i in rendered.message_indices]
        rendered.is_content = [False] * count + rendered.is_content
        rendered.message_roles = [message.role for message in history]
        turn = graph.prepare_turn(talk.trace, history)
        completion = Completion(printed, [-1.0, -2.0], "stop")
        history = [*history, commit(turn, rendered, completion, sampler, TimeSpan(start=0, end=1))]
        before = [*rendered.token_ids, *printed]
    return talk.trace, before


def test_turns_that_hold_what_was_sent_and_sampled_pass(three_turns):
    trace, whole = three_turns
    ((sample, _),) = samples(trace)
    assert sample.token_ids == whole and sum(sample.mask) == 6


@pytest.mark.parametrize(("node", "place"), [(0, 0), (2, -1), (3, -1), (5, 0), (5, -1)])
def test_another_token_is_noticed_in_its_first_turn(three_turns, node, place):
    trace, _ = three_turns
    trace.nodes[node].token_ids[place] += 1
    with pytest.raises(TokenMismatch, match=rf"env 'toy', turn {node // 2 + 1}: the \d+ tokens of the trace"):
        samples(trace)


def with_a_token_too_many(trace):
    trace.nodes[2].token_ids.insert(0, 5)


def without_a_call(trace):
    del trace.calls[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_a_token_too_many, r"turn 2: \d+ tokens were sent and 2 sampled, but the trace has \d+ and 2"),
        (without_a_call, "env 'toy': a sampled message belongs to no model call"),
    ],
)
def test_a_trace_that_differs_from_its_calls_is_refused(three_turns, change, message):
    trace, _ = three_turns
    change(trace)
    with pytest.raises(TokenMismatch, match=message):
        samples(trace)


def test_calls_that_verifiers_records_are_checked_by_their_counts(talk, user):
    talk.turn([user("1+1=")], "12")
    (call,) = talk.sent
    usage = Usage(prompt_tokens=len(call.prompt), completion_tokens=3)
    talk.trace.calls.append(ModelCall(node=1, usage=usage))
    assert len(samples(talk.trace)) == 1
    talk.trace.calls[0].usage = Usage(prompt_tokens=len(call.prompt) - 1, completion_tokens=4)
    with pytest.raises(TokenMismatch, match=r"turn 1: \d+ tokens were sent and 4 sampled, but the trace has \d+ and 3"):
        samples(talk.trace)


class Meddles(vf.Task):
    """Its grader writes over what the model said, if that is a 7."""

    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        if trace.last_reply == "7":
            trace.nodes[-1].token_ids[-1] += 1
        return 1.0


async def test_a_rollout_whose_tokens_changed_fails_alone(scripted):
    task, sampler = Meddles(vf.TaskData(idx=0, prompt="1+1=")), scripted([["2", "7", "3"]])
    request = GroupRequest(env_name="toy", task=task, n=3, sampler=sampler, group_id=0, timeout_s=5.0)
    rollouts = await play_group(request)
    assert [rollout.error is None for rollout in rollouts] == [True, False, True]
    bad = rollouts[1]
    assert bad.error.startswith("TokenMismatch: env 'toy', turn 1: ") and bad.samples == [] and not bad.trace.ok
    assert bad.error_kind == "tokens" and bad.error_kind in ERROR_KINDS
    assert all(len(rollout.samples) == 1 for rollout in (rollouts[0], rollouts[2]))


def test_a_sample_has_the_pictures_of_its_last_call(three_turns):
    trace, whole = three_turns
    seen = [Picture(2, 3, "a" * 64, 8, 8, "f" * 64), Picture(9, 1, "b" * 64, 8, 8, "f" * 64)]
    trace.calls[1].pictures = tuple(seen[:1])
    trace.calls[2].pictures = tuple(seen)
    ((sample, _),) = samples(trace)
    assert sample.pictures == seen and sample.input.pictures == tuple(seen) and sample.token_ids == whole
    keys = sample.input.keys
    assert keys[2] == keys[4] < 0 and keys[9] < 0 and keys[2] != keys[9]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sample), type=TrainingSample) == sample


def test_without_pictures_a_sample_is_sent_as_before(three_turns):
    trace, _ = three_turns
    ((sample, _),) = samples(trace)
    assert sample.pictures is None and b"pictures" not in msgspec.msgpack.encode(sample)
