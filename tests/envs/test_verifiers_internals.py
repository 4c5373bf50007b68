"""What prl uses of verifiers beyond its public interface: is there, is needed, in the version it was read in."""

import asyncio
import importlib.metadata
import inspect

import pytest
import verifiers.v1 as vf
from pydantic import SecretStr
from verifiers.v1 import task as verifiers_task
from verifiers.v1.clients import base as client_base
from verifiers.v1.clients import resolve_client
from verifiers.v1.interception import server as interception_server
from verifiers.v1.utils import decorators

from prl.envs import _verifiers_internals as internals


def test_installed_verifiers_has_the_expected_version():
    assert importlib.metadata.version("verifiers") == internals.VERSION


# --- graders ----------------------------------------------------------------------------------------------------------


async def leaves():
    raise SystemExit(3)


def test_verifiers_grader_still_ends_the_event_loop():
    with pytest.raises(SystemExit):
        asyncio.run(decorators.invoke_all([leaves], {}))


def test_a_task_is_graded_with_the_contained_one():
    assert verifiers_task.invoke_all is internals._invoke_all
    with pytest.raises(RuntimeError, match="the env's code let SystemExit escape"):
        asyncio.run(verifiers_task.invoke_all([leaves], {}))


class Graded(vf.Task):
    @vf.reward(priority=2)
    async def late(self, trace): ...

    @vf.reward
    async def ungraded(self, trace): ...

    @vf.metric
    async def counted(self, trace): ...

    @property
    def broken(self):
        raise RuntimeError("asked for a property")


class GradedMore(Graded):
    async def ungraded(self, trace): ...

    @vf.reward(priority=3)
    async def early(self, trace): ...


@pytest.mark.parametrize("cls", [Graded, GradedMore])
@pytest.mark.parametrize("attr", ["reward", "metric"])
def test_the_graders_of_a_task_are_those_that_verifiers_finds(cls, attr):
    task = cls(vf.TaskData(idx=0, prompt="?"))
    assert verifiers_task.discover_decorated is internals.discover_decorated
    found = decorators.discover_decorated(task, attr)
    assert found and sorted(found, key=str) == sorted(internals.discover_decorated(task, attr), key=str)
    assert task.hooks(attr) == found


# --- the client's token -----------------------------------------------------------------------------------------------


@pytest.fixture
def config(server):
    return internals.TokenClientConfig(
        base_url=f"{server.url}/v1", api_key_var="NOT_SET_BY_ANYBODY", token=SecretStr("s3cret")
    )


def test_both_key_lookups_find_the_token(config, monkeypatch):
    monkeypatch.delenv("NOT_SET_BY_ANYBODY", raising=False)
    assert client_base.resolve_api_key(config) == interception_server.resolve_api_key(config) == "s3cret"
    assert "resolve_api_key(config)" in inspect.getsource(client_base.build_async_openai)
    assert "resolve_api_key(config)" in inspect.getsource(interception_server.InterceptionServer.handle_models)


async def test_a_request_of_verifiers_client_carries_the_token(config, server):
    server.replies["/v1/models"] = {"object": "list", "data": []}
    client = resolve_client(config)
    await client.client.models.list()
    await client.close()
    assert server.headers["Authorization"] == "Bearer s3cret"


def test_no_dump_and_no_representation_holds_the_token(config):
    agent = vf.AgentConfig(client=config)
    for text in (config.model_dump_json(), repr(config), str(config), agent.model_dump_json(), repr(agent)):
        assert "s3cret" not in text
    assert agent.client.token.get_secret_value() == "s3cret"
    assert agent.model_copy(update={"max_turns": 3}).client.token.get_secret_value() == "s3cret"
