"""All continuations of a prompt are one call of the engine's core, and one reply."""

import asyncio
import json
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from prl.engines.vllm.cpu import replies
from prl.engines.vllm.cpu.replies import Group


def output(*tokens: int, logprob: float = -0.5, reason: str | None = None, drawn: int | None = None):
    """What a continuation has sampled in a pass; `drawn` is the token that the logprob is of."""
    ids = np.array([[token if drawn is None else drawn] for token in tokens])
    logprobs = (ids, np.full((len(tokens), 1), logprob), None)
    return SimpleNamespace(new_token_ids=list(tokens), new_logprobs=logprobs, finish_reason=reason)


def test_a_group_is_complete_once_its_last_continuation_has_ended():
    group = Group([1, 2], 2)
    group.take(1, output(7))
    group.take(0, output(5, reason="stop"))
    assert not group.result.done()
    group.take(1, output(8, logprob=float("-inf"), reason="length"))
    choices = [
        {"index": 0, "token_ids": [5], "logprobs": [-0.5], "finish_reason": "stop"},
        {"index": 1, "token_ids": [7, 8], "logprobs": [-0.5, -9999.0], "finish_reason": "length"},
    ]
    assert json.loads(group.result.result()) == {
        "prompt_token_ids": [1, 2],
        "choices": choices,
        "prompt_logprobs": None,
        "prompt_top": None,
    }


@pytest.mark.parametrize("last", [output(6, drawn=4, reason="stop"), output(6, reason="error")])
def test_a_group_of_which_one_fails_has_no_reply(last):
    group = Group([1], 2)
    group.take(0, last)
    group.take(1, output(5, reason="stop"))
    assert group.result.result() is None


class Engine:
    """An `AsyncLLM` whose core does not answer."""

    errored, dead_error = False, RuntimeError("the core is dead")

    def __init__(self):
        self.aborted = []
        self.called = asyncio.Event()
        self.engine_core = SimpleNamespace(
            client_index=0, call_utility_async=self.call, abort_requests_async=self.abort
        )
        self.input_processor = SimpleNamespace(process_inputs=lambda *_, **__: Request())

    async def get_supported_tasks(self):
        return ("generate",)

    async def call(self, method, data):
        self.called.set()
        await asyncio.sleep(3600)

    async def abort(self, names):
        self.aborted += names


class Request(msgspec.Struct):
    client_index: int = -1


async def test_a_cancelled_group_is_aborted():
    engine = Engine()
    work = asyncio.create_task(replies.sample(engine, None, SimpleNamespace(n=2), "prl-a", 0, None))
    await engine.called.wait()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert engine.aborted == ["0_prl-a", "1_prl-a"]


async def test_a_core_that_dies_fails_the_group(monkeypatch):
    monkeypatch.setattr("prl.engines.vllm.alive.ALIVE_S", 0.01)
    engine = Engine()
    engine.errored = True
    with pytest.raises(RuntimeError, match="dead"):
        await replies.sample(engine, None, SimpleNamespace(n=2), "prl-a", 0, None)
