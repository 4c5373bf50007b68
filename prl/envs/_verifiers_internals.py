"""Every use of verifiers that goes beyond its public interface: patches, private attributes, objects built by hand.

Written for verifiers 0.4.0. `tests/envs/test_verifiers_internals.py` fails when the installed version is another
one, when something used here is gone, or when a patch is no longer needed. Importing this module applies the patches.
"""

import asyncio
import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from types import MethodType, SimpleNamespace
from typing import Any

import verifiers.v1 as vf
from pydantic import Field, SecretStr
from verifiers.v1 import graph, task, trace
from verifiers.v1.clients import base as client_base
from verifiers.v1.configs.client import resolve_api_key
from verifiers.v1.interception import server as interception_server
from verifiers.v1.mcp import server as tool_server
from verifiers.v1.utils import decorators
from verifiers.v1.utils.generic import concrete_type

from prl.envs.isolation import run_contained
from prl.rollouts.rollout import TURN_REWARDS

VERSION = "0.4.0"

# --- records ----------------------------------------------------------------------------------------------------------


def _validated_node(cls: type[graph.MessageNode], _fields_set: set[str] | None = None, **values: Any) -> Any:
    """Replace `model_construct`, which inspects the signature of each default factory: 1 ms a node instead of 5 us.

    Until pydantic caches that signature, or verifiers' `_commit_turn` calls the constructor.
    """
    return cls(**values)


graph.MessageNode.model_construct = classmethod(_validated_node)

BUILD: trace.VersionInfo = vf.Trace.model_fields["verifiers"].get_default(call_default_factory=True)
"""The version of verifiers that each trace names, which verifiers looks up for each."""


# --- graders ----------------------------------------------------------------------------------------------------------


@functools.lru_cache(1024)
def _signature_of_method(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(MethodType(function, object()))


def signature(code: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a grader, which verifiers asks for four times a trace: 200 us, a tenth of a rollout.

    That of a method is worked out once. Until verifiers keeps the signatures of a task's class.
    """
    return _signature_of_method(code.__func__) if isinstance(code, MethodType) else inspect.signature(code)


@functools.lru_cache(1024)
def _decorated(cls: type, attr: str) -> list[str]:
    """Return the names of a class's methods that have the mark `attr`."""
    members = [(name, getattr(cls, name, None)) for name in dir(cls)]
    return [name for name, member in members if callable(member) and hasattr(member, attr)]


def discover_decorated(task: object, attr: str) -> list[Callable[..., Any]]:
    """Return the graders of a task, which verifiers looks for among all names of its classes, twice a trace: 100 us.

    Until verifiers keeps the graders of a task's class.
    """
    names = _decorated(type(task), attr)  # type: ignore[arg-type]  # mypy takes no class for hashable
    return [getattr(task, name) for name in names]


async def _invoke_all(signals: list[Callable[..., Any]], available: dict[str, Any]) -> list[Any]:
    """Replace verifiers' `invoke_all`, in whose tasks a SystemExit of one grader would stop the event loop.

    Each grader has a task of its own, so that one that cancels its task cancels nothing else.
    """
    return list(await asyncio.gather(*(run_contained(decorators.invoke, signal, available) for signal in signals)))


_record_reward = vf.Trace.record_reward


def _record_reward_by_turn(self: vf.Trace, name: str, value: Any, weight: float = 1.0) -> None:
    """Replace `record_reward`, which takes a number alone: keep a list, one reward per turn, and record its sum.

    Until verifiers has rewards of turns.
    """
    if isinstance(value, list):
        self.info.setdefault(TURN_REWARDS, {})[name] = [float(reward) * weight for reward in value]
        value = math.fsum(value)
    _record_reward(self, name, value, weight)


# --- an env over agents of our own ------------------------------------------------------------------------------------

MakeAgent = Callable[[Any, list[vf.Trace], str, vf.AgentConfig], Any]
"""(context of the episode, its traces so far, name of the agent, its config) -> agent."""


def env_with_agents(cls: type[vf.Env], taskset: vf.Taskset, make_agent: MakeAgent) -> vf.Env:
    """Build an env whose agents come from `make_agent` instead of verifiers' harnesses.

    `Env.__init__` is not called: it accepts only tasksets and harnesses that are installed under an id.
    """
    env = object.__new__(cls)
    env.config = (concrete_type(cls, vf.EnvConfig, origin=vf.Env) or vf.EnvConfig)()
    env.taskset = taskset

    def episode_agents(context: Any, completed: list[vf.Trace], *_: Any) -> vf.Agents:
        return vf.Agents(env.config, lambda name, spec: make_agent(context, completed, name, spec))

    env._episode_agents = episode_agents
    return env


async def agents_after_setup(env: vf.Env, context: Any) -> list[Any]:
    """Return the agents of a new episode after the env's `setup` hook, which says who of them is trained."""
    agents = env._episode_agents(context, [], None, None)
    await env.setup(agents)
    return list(agents._agents.values())


# --- the state of a tool call -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def call_state(state: vf.State | None) -> Iterator[None]:
    """Let `self.state` of every toolset be `state` within this context."""
    token = tool_server._call_state.set(state)
    try:
        yield
    finally:
        tool_server._call_state.reset(token)


# --- a client with its token ------------------------------------------------------------------------------------------


class TokenClientConfig(vf.TrainClientConfig):
    """verifiers' token-in/token-out client with its API key as a value; verifiers itself takes an environment variable.

    The token stays out of dumps and representations, so that no trace or log holds it.
    """

    token: SecretStr | None = Field(None, exclude=True, repr=False)


def _resolve_api_key(config: vf.BaseClientConfig) -> str:
    """Resolve the API key of a client config: its token where it has one, else as verifiers does."""
    if isinstance(config, TokenClientConfig) and config.token is not None:
        return config.token.get_secret_value()
    return resolve_api_key(config)


vf.Trace.record_reward = _record_reward_by_turn
task.discover_decorated = discover_decorated
task.invoke_all = _invoke_all  # until verifiers' own contains what a signal raises
task.inspect = decorators.inspect = SimpleNamespace(signature=signature, Parameter=inspect.Parameter)
client_base.resolve_api_key = _resolve_api_key  # of every request of a client
interception_server.resolve_api_key = _resolve_api_key  # of `/v1/models`, which a program may ask for
