"""Real conversations in verifiers' graph, a reference model that answers by formula, a package of the user's own."""

import asyncio

import pytest
import verifiers.v1 as vf
from orchestrating import *  # noqa: F403  # a toy run and its parts
from verifiers.v1 import graph
from verifiers.v1.clients.train import response_from_generate
from verifiers.v1.configs.agent import WireAgentConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.trace import AgentInfo, Trace, TraceTask

from prl.envs.turn import parse
from prl.errors import EngineError
from prl.rollouts.rollout import Rollout


class Talk:
    """One rollout's conversation, rendered and committed turn by turn as verifiers' client does, bridges included."""

    def __init__(self, renderer):
        self.renderer, self.tokenizer = renderer, renderer._tokenizer
        self.trace = Trace(
            task=TraceTask.model_construct(type="Toy", data=vf.TaskData(idx=3, prompt="?"), key="k", hash="h"),
            agent=AgentInfo.model_construct(
                config=WireAgentConfig.model_construct(), runtime=None, name="agent", trainable=True
            ),
        )

    def turn(self, messages, reply):
        """Commit the model's answer `reply` to `messages`; returns the messages so far."""
        turn = graph.prepare_turn(self.trace, messages)
        previous, tail = turn.previous_renderer_token_ids(), [message_to_wire(m) for m in turn.tail]
        rendered = previous and tail and self.renderer.bridge_to_next_turn(*previous, tail)
        bridged = turn if rendered else None
        rendered = rendered or self.renderer.render([message_to_wire(m) for m in messages], add_generation_prompt=True)
        ids = [*self.encode(reply), self.tokenizer.convert_tokens_to_ids("<|im_end|>")]
        result = {
            "prompt_ids": rendered.token_ids,
            "prompt_attribution": rendered,
            "finish_reason": "stop",
            "completion_ids": ids,
            "completion_logprobs": [-1.0 - i for i in range(len(ids))],
        }
        response = response_from_generate(result, "policy", bridged)
        response.message = parse(ids, self.renderer)
        turn.commit(response)
        return [*messages, response.message]

    def encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False)

    def rollout(self, reward=0.0):
        self.trace.record_reward("answer", reward)
        rollout = Rollout(self.trace, env_name="toy", group_id=0, start_version=0, temperature=1.0)
        rollout.attach_samples()
        return rollout

    def spans(self, sample):
        """Each run of tokens of one weight in `ce_weights`: that weight and the text. What weighs 0.0 is left out."""
        runs, last = [], 0.0
        for token, weight in zip(sample.token_ids, sample.ce_weights or [0.0] * len(sample.token_ids), strict=True):
            if weight and weight == last:
                runs[-1][1].append(token)
            elif weight:
                runs.append((weight, [token]))
            last = weight
        return [(weight, self.tokenizer.decode(tokens)) for weight, tokens in runs]


@pytest.fixture
def new_talk(renderer):
    return lambda: Talk(renderer)


@pytest.fixture
def talk(new_talk):
    return new_talk()


@pytest.fixture
def user():
    return lambda text: vf.UserMessage(content=text)


@pytest.fixture
def answers(new_talk, user):
    """A rollout of one turn."""

    def make(reward, answer):
        talk = new_talk()
        talk.turn([user("2+2=")], answer)
        return talk.rollout(reward)

    return make


@pytest.fixture
def tool():
    return lambda text, call="call_0": vf.ToolMessage(tool_call_id=call, content=text)


CALL = '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'


@pytest.fixture
def call():
    """What a model says to call a tool."""
    return CALL


class Reference:
    """Scores by formula, notes what it was asked, and fails where a sequence starts with a token of `failing`."""

    model = "reference"
    version = None
    up = True

    def __init__(self, config=None, token=None):
        self.config, self.token = config, token
        self.asked, self.waited = [], []
        self.in_flight = self.most_in_flight = 0
        self.failing, self.error = set(), EngineError("no answer", 500)
        self.closed = False

    @staticmethod
    def logprobs(token_ids):
        return [0.0] + [-(position + token / 1000) for position, token in enumerate(token_ids)][1:]

    async def prompt_logprobs(self, token_ids):
        self.asked.append(list(token_ids))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(0.002)
        self.in_flight -= 1
        if token_ids[0] in self.failing:
            raise self.error
        return self.logprobs(token_ids)

    async def wait_ready(self, timeout_s):
        self.waited.append(timeout_s)

    async def close(self):
        self.closed = True


@pytest.fixture
def reference():
    return Reference()


@pytest.fixture
def frozen(monkeypatch):
    """The reference that `connect` makes, in place of an HTTP client."""
    made = []
    monkeypatch.setattr("prl.engines.frozen.FrozenPool", lambda *given: made.append(Reference(*given)) or made[-1])
    return made


@pytest.fixture
def attached(reference, renderer):
    """`attached(algorithm)`: the algorithm with the reference as its policy, and a renderer."""

    def attach(algorithm, renderer=renderer, **live):
        algorithm.attach(policy_pool=live.pop("policy_pool", reference), renderer=renderer, **live)
        return algorithm

    return attach


@pytest.fixture
def play():
    """Runs a group through an algorithm the way the pipeline does."""

    async def run(algorithm, group):
        if not hasattr(algorithm, "pools"):
            algorithm.attach(policy_pool=None, renderer=None)
        await algorithm.setup()
        for rollout in group:
            await algorithm.finalize_rollout(rollout)
        await algorithm.finalize_group(group)
        return group

    return run


@pytest.fixture
def credit():
    """The one advantage that all of a rollout's trained tokens have, on each of its samples; 0.0 off the mask."""

    def of(rollout):
        pairs = [pair for s in rollout.samples for pair in zip(s.advantages, s.mask, strict=True)]
        assert all(advantage == 0.0 for advantage, trains in pairs if not trains)
        (value,) = {advantage for advantage, trains in pairs if trains}
        return value

    return of
