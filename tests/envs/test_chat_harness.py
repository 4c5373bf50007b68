"""The chat harness, against an endpoint that answers from a list."""

import json
from types import SimpleNamespace

import pytest
from aiohttp import web
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.task import TaskData
from verifiers.v1.utils.loaders import harness_class

import prl
from prl.envs.harness import ChatHarness


def reply(content=None, *calls):
    message = {"role": "assistant", "content": content, "reasoning_content": "hm"}
    if calls:
        message["tool_calls"] = [
            {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(calls)
        ]
    return message


PATH = "/v1/chat/completions"


@pytest.fixture
def endpoint(server):
    """`(url, replies, requests)`: the replies still to give, and the bodies that came."""
    replies = []

    async def chat():
        choice = {"index": 0, "message": replies.pop(0), "finish_reason": "stop"}
        return web.json_response(
            {"id": "x", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
        )

    server.replies[PATH] = chat
    yield f"{server.url}/v1", replies, server.bodies[PATH]
    assert not server.calls or server.headers["Authorization"] == "Bearer s3cret"


async def play(url, **data):
    context = SimpleNamespace(model="policy")
    return await ChatHarness(HarnessConfig(id="prl")).launch(context, None, None, url, "s3cret", {}, TaskData(**data))


def test_verifiers_finds_it_by_the_name_of_the_package():
    assert harness_class("prl") is ChatHarness is prl.ChatHarness


async def test_one_answer_ends_the_conversation(endpoint):
    url, replies, requests = endpoint
    replies += [reply("4")]
    result = await play(url, prompt="2+2=", system_prompt="Be brief.")
    assert result.exit_code == 0
    assert requests[0]["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2="}]
    assert "tools" not in requests[0]


async def test_model_reads_what_is_wrong_with_its_call(endpoint):
    url, replies, requests = endpoint
    replies += [reply(None, ("nope", "{}"), ("nope", "")), reply("done")]
    await play(url, prompt="hi")
    echoed, *answers = requests[1]["messages"][1:]
    assert echoed["tool_calls"] == replies_of(echoed) and echoed["reasoning_content"] == "hm"
    assert [answer["tool_call_id"] for answer in answers] == ["c0", "c1"]
    assert all(answer["content"] == "error: unknown tool 'nope'" for answer in answers)


def replies_of(message):
    return [
        {"id": f"c{i}", "type": "function", "function": {"name": "nope", "arguments": arguments}}
        for i, arguments in enumerate(("{}", ""))
    ]


@pytest.mark.parametrize(("arguments", "error"), [("{", "not JSON"), (json.dumps([1]), "must be a JSON object")])
async def test_bad_arguments_never_reach_the_tool(arguments, error):
    call = SimpleNamespace(name="add", arguments=arguments)
    assert error in await ChatHarness(HarnessConfig(id="prl"))._call(call, {"add": ("s", "add")}, {})
