"""Every use of verifiers that goes beyond its public interface: patches, private attributes, objects built by hand.

Written for verifiers 0.4.0. `tests/episodes/test_verifiers_internals.py` fails when the installed version is another
one, when something used here is gone, or when a patch is no longer needed. Importing this module applies the patches.
"""

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from pydantic import Field, SecretStr
from verifiers.v1 import graph
from verifiers.v1 import task as verifiers_task
from verifiers.v1.agent import Agents
from verifiers.v1.clients import base as client_base
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.client import BaseClientConfig, TrainClientConfig, resolve_api_key
from verifiers.v1.configs.env import EnvConfig
from verifiers.v1.env import Env
from verifiers.v1.interception import server as interception_server
from verifiers.v1.mcp import server as tool_server
from verifiers.v1.state import State
from verifiers.v1.taskset import Taskset
from verifiers.v1.trace import Trace
from verifiers.v1.utils import decorators
from verifiers.v1.utils.generic import concrete_type

from prl.episodes.isolation import run_contained

VERSION = "0.4.0"

# --- cheaper message nodes --------------------------------------------------------------------------------------------

REPLACED_FACTORIES: dict[str, Callable[[], Any]] = {}
"""Default factories of `MessageNode` as verifiers declares them, by field."""


def _as_function(factory: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: factory()


def _replace_builtin_factories() -> None:
    """Wrap the builtin default factories (`list`, `time.time`) of message nodes in Python functions.

    A turn makes its nodes with `model_construct`, which inspects the signature of every default factory it calls. The
    signature of a builtin is parsed from text each time: more than half of the CPU time of a rollout.
    """
    for name, field in graph.MessageNode.model_fields.items():
        factory = field.default_factory
        if inspect.isbuiltin(factory) or inspect.isclass(factory):
            REPLACED_FACTORIES[name] = factory
            field.default_factory = _as_function(factory)


# --- contained graders ------------------------------------------------------------------------------------------------


async def _invoke_all(signals: list[Callable[..., Any]], available: dict[str, Any]) -> list[Any]:
    """Replace verifiers' `invoke_all`, in whose tasks a SystemExit of one grader would stop the event loop."""
    return await asyncio.gather(*(run_contained(decorators.invoke, signal, available) for signal in signals))


# --- an env over agents of our own ------------------------------------------------------------------------------------

MakeAgent = Callable[[Any, list[Trace], str, AgentConfig], Any]
"""(context of the episode, its traces so far, name of the agent, its config) -> agent."""


def env_with_agents(cls: type[Env], taskset: Taskset, make_agent: MakeAgent) -> Env:
    """Build an env whose agents come from `make_agent` instead of verifiers' harnesses.

    `Env.__init__` is not called: it accepts only tasksets and harnesses that are installed under an id.
    """
    env = object.__new__(cls)
    env.config = (concrete_type(cls, EnvConfig, origin=Env) or EnvConfig)()
    env.taskset = taskset

    def episode_agents(context: Any, completed: list[Trace], *_: Any) -> Agents:
        return Agents(env.config, lambda name, spec: make_agent(context, completed, name, spec))

    env._episode_agents = episode_agents
    return env


async def agents_after_setup(env: Env, context: Any) -> list[Any]:
    """Return the agents of a new episode after the env's `setup` hook, which says who of them is trained."""
    agents = env._episode_agents(context, [], None, None)
    await env.setup(agents)
    return list(agents._agents.values())


# --- the state of a tool call -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def call_state(state: State | None) -> Iterator[None]:
    """Let `self.state` of every toolset be `state` within this context."""
    token = tool_server._call_state.set(state)
    try:
        yield
    finally:
        tool_server._call_state.reset(token)


# --- a client with its token ------------------------------------------------------------------------------------------


class TokenClientConfig(TrainClientConfig):
    """verifiers' token-in/token-out client with its API key as a value; verifiers itself takes an environment variable.

    The token stays out of dumps and representations, so that no trace or log holds it.
    """

    token: SecretStr | None = Field(None, exclude=True, repr=False)


def _resolve_api_key(config: BaseClientConfig) -> str:
    """Resolve the API key of a client config: its token where it has one, else as verifiers does."""
    if isinstance(config, TokenClientConfig) and config.token is not None:
        return config.token.get_secret_value()
    return resolve_api_key(config)


_replace_builtin_factories()
verifiers_task.invoke_all = _invoke_all
client_base.resolve_api_key = _resolve_api_key  # of every request of a client
interception_server.resolve_api_key = _resolve_api_key  # of `/v1/models`, which a program may ask for
