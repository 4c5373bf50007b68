"""What prl uses of verifiers beyond its public interface: is there, is needed, in the version it was read in."""

import asyncio
import functools
import importlib.metadata
import inspect
import re
from types import SimpleNamespace

import pytest
import verifiers.v1 as vf
from pydantic import BaseModel, Field, SecretStr
from pydantic._internal import _typing_extra
from verifiers.v1 import graph
from verifiers.v1 import task as verifiers_task
from verifiers.v1.agent import Agents
from verifiers.v1.clients import base as client_base
from verifiers.v1.clients import resolve_client
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.configs.client import resolve_api_key as own_resolve_api_key
from verifiers.v1.env import Env
from verifiers.v1.interception import server as interception_server
from verifiers.v1.mcp import server as tool_server
from verifiers.v1.utils import decorators

from prl.episodes import _verifiers_internals as internals
from prl.episodes.turn import AGENT


def test_the_installed_verifiers_is_the_one_this_was_written_for():
    assert importlib.metadata.version("verifiers") == internals.VERSION


# --- records ----------------------------------------------------------------------------------------------------------


def test_pydantic_still_inspects_a_factory_each_time_that_it_calls_it(monkeypatch):
    class Model(BaseModel):
        values: list[int] = Field(default_factory=list)

    inspected = []
    plain = _typing_extra.signature_no_eval
    monkeypatch.setattr(_typing_extra, "signature_no_eval", lambda factory: inspected.append(factory) or plain(factory))
    Model.model_construct()
    Model.model_construct()
    assert inspected == [list, list]


def test_a_node_is_made_by_its_constructor():
    message = vf.UserMessage(content="?")
    node = graph.MessageNode.model_construct(message=message, token_ids=[1, 2], timestamp=3.0)
    assert node == graph.MessageNode(message=message, token_ids=[1, 2], timestamp=3.0)
    assert "MessageNode.model_construct(" in inspect.getsource(graph)


def test_the_build_that_a_trace_names_is_the_one_that_verifiers_would_name():
    trace = vf.Trace(task=vf.TraceTask(type="Toy", data=vf.TaskData(idx=0, prompt="?")), agent=AGENT)
    assert trace.verifiers == internals.BUILD


# --- graders ----------------------------------------------------------------------------------------------------------


async def leaves():
    raise SystemExit(3)


def test_a_grader_of_verifiers_own_still_ends_the_event_loop():
    with pytest.raises(SystemExit):
        asyncio.run(decorators.invoke_all([leaves], {}))


def test_a_task_is_graded_with_the_contained_one():
    assert verifiers_task.invoke_all is internals._invoke_all
    with pytest.raises(RuntimeError, match="the env's code let SystemExit escape"):
        asyncio.run(verifiers_task.invoke_all([leaves], {}))


def test_the_contained_one_hands_a_grader_what_it_asks_for():
    async def both(trace, task):
        return f"{task} {trace}"

    assert asyncio.run(verifiers_task.invoke_all([both, both], {"trace": 1, "task": 2, "runtime": 3})) == ["2 1"] * 2


class Grades(vf.Task):
    def plain(self, trace, runtime=None):
        return trace

    @staticmethod
    def alone(task):
        return task


def test_the_signature_of_a_grader_is_the_one_that_python_finds():
    one, two = (Grades(vf.TaskData(idx=idx, prompt="?")) for idx in range(2))
    for code in (one.plain, two.plain, one.alone, leaves, Grades.plain, functools.partial(one.plain, runtime=3)):
        assert internals.signature(code) == inspect.signature(code)


def test_a_method_is_looked_at_once_for_all_tasks(monkeypatch):
    assert verifiers_task.inspect is decorators.inspect and decorators.inspect.signature is internals.signature
    asked = []
    monkeypatch.setattr(inspect, "signature", lambda code: asked.append(code))
    internals._signature_of_method.cache_clear()
    try:
        for idx in range(2):
            internals.signature(Grades(vf.TaskData(idx=idx, prompt="?")).plain)
    finally:
        internals._signature_of_method.cache_clear()
    assert len(asked) == 1


def test_verifiers_uses_no_more_of_inspect_than_it_is_given():
    for module in (verifiers_task, decorators):
        used = set(re.findall(r"(?<!`)inspect\.(\w+)", inspect.getsource(module)))
        assert used <= set(vars(module.inspect)), module


# --- env and agents ---------------------------------------------------------------------------------------------------


class DuoConfig(vf.EnvConfig):
    one: vf.AgentConfig = vf.AgentConfig(max_turns=2)
    two: vf.AgentConfig = vf.AgentConfig()


class Duo(vf.Env[DuoConfig]):
    async def setup(self, agents):
        agents.two.trainable = False

    async def run(self, task, agents):
        pass


def test_an_env_cannot_be_made_the_public_way_without_an_installed_taskset():
    with pytest.raises(ValueError, match="needs a seed taskset"):
        Duo(DuoConfig())


def test_an_episodes_agents_come_from_the_method_that_is_replaced():
    assert list(inspect.signature(Env._episode_agents).parameters) == [
        "self",
        "ctx",
        "completed",
        "on_trace",
        "on_discard",
    ]
    assert "self._episode_agents(ctx, episode.traces," in inspect.getsource(Env.run_episode)


async def test_agents_are_made_by_us_and_listed_after_the_envs_setup():
    made = []

    def make_agent(context, completed, name, spec):
        made.append((context, completed, name, spec.max_turns))
        return SimpleNamespace(name=name, trainable=True)

    env = internals.env_with_agents(Duo, taskset := object(), make_agent)
    assert isinstance(env, Duo) and isinstance(env.config, DuoConfig) and env.taskset is taskset
    agents = await internals.agents_after_setup(env, "context")
    assert [(agent.name, agent.trainable) for agent in agents] == [("one", True), ("two", False)]
    assert made == [("context", [], "one", 2), ("context", [], "two", None)]


def test_agents_have_no_public_list():
    agents = Agents(DuoConfig(), lambda name, spec: name)
    assert list(agents._agents) == ["one", "two"]
    assert not hasattr(Agents, "__iter__") and {name for name in dir(Agents) if not name.startswith("_")} == set()


# --- state of a tool call ---------------------------------------------------------------------------------------------


class Count(vf.State):
    calls: int = 0


class Counter(vf.Toolset[vf.ToolsetConfig, Count]):
    pass


def test_a_toolset_reads_the_state_of_the_call_and_no_other():
    toolset, state = Counter(vf.ToolsetConfig()), Count(calls=7)
    with internals.call_state(state):
        assert toolset.state is state
        with internals.call_state(None):
            assert toolset.state is not state
        assert toolset.state is state
    assert toolset.state is not state and tool_server._call_state.get() is None


def test_a_toolsets_state_still_cannot_be_set_the_public_way():
    assert Counter.state.fset is None


# --- the client's token -----------------------------------------------------------------------------------------------


@pytest.fixture
def config(server):
    return internals.TokenClientConfig(
        base_url=f"{server.url}/v1", api_key_var="NOT_SET_BY_ANYBODY", token=SecretStr("s3cret")
    )


def test_verifiers_clients_still_take_their_key_from_the_environment_only():
    assert not {"token", "api_key", "key"} & TrainClientConfig.model_fields.keys()


def test_both_places_that_look_a_key_up_find_the_token(config, monkeypatch):
    monkeypatch.delenv("NOT_SET_BY_ANYBODY", raising=False)
    assert client_base.resolve_api_key(config) == interception_server.resolve_api_key(config) == "s3cret"
    assert "resolve_api_key(config)" in inspect.getsource(client_base.build_async_openai)
    assert "resolve_api_key(config)" in inspect.getsource(interception_server.InterceptionServer.handle_models)


def test_without_a_token_a_key_is_looked_up_as_before(monkeypatch):
    monkeypatch.setenv("A_KEY", "theirs")
    for config in (TrainClientConfig(api_key_var="A_KEY"), internals.TokenClientConfig(api_key_var="A_KEY")):
        assert client_base.resolve_api_key(config) == own_resolve_api_key(config) == "theirs"


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
