"""Real conversations in verifiers' graph, a reference model that answers by formula, a package of the user's own."""

import asyncio

import pytest
import verifiers.v1 as vf
from conversation import Talk
from orchestrating import *  # noqa: F403  # a toy run and its parts

from prl.base.errors import EngineError
from prl.engines.replies import Scored


@pytest.fixture
def new_talk(renderer, tokenizer):
    return lambda: Talk(renderer, tokenizer)


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
        self.asked, self.waited, self.probes = [], [], []
        self.inputs = []
        """All that it was asked, pictures included."""
        self.in_flight = self.most_in_flight = 0
        self.failing, self.error = set(), EngineError("no answer", 500)
        self.closed = False

    @staticmethod
    def logprobs(token_ids):
        return [0.0] + [-(position + token / 1000) for position, token in enumerate(token_ids)][1:]

    async def prompt_logprobs(self, sequence):
        token_ids = sequence.token_ids
        self.asked.append(list(token_ids))
        self.inputs.append(sequence)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(0.002)
        self.in_flight -= 1
        if token_ids[0] in self.failing:
            raise self.error
        return self.logprobs(token_ids)

    async def top_logprobs(self, sequence, top_k):
        own = await self.prompt_logprobs(sequence)
        ids = [[token + rank for rank in range(top_k)] for token in sequence.token_ids]
        return Scored(own, ids, [[-1.0 - position - rank for rank in range(top_k)] for position in range(len(own))])

    async def wait_ready(self, timeout_s):
        self.waited.append(timeout_s)

    async def require_tokenizer(self, probe):
        self.probes.append(probe)

    async def close(self):
        self.closed = True


@pytest.fixture
def reference():
    return Reference()


@pytest.fixture
def frozen(monkeypatch):
    """The reference that `connect` makes, in place of an HTTP client."""
    made = []
    monkeypatch.setattr("prl.engines.frozen.FrozenPool", lambda *given, **_: made.append(Reference(*given)) or made[-1])
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
