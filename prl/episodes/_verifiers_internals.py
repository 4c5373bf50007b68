"""Every use of verifiers that goes beyond its public interface: patches, private attributes, objects built by hand.

Written for verifiers 0.4.0. `tests/episodes/test_verifiers_internals.py` fails when the installed version is another
one, when something used here is gone, or when a patch is no longer needed. Importing this module applies the patches.
"""

import asyncio
import contextlib
import functools
import inspect
import os
import random
import uuid
from collections.abc import Callable, Iterator
from types import MethodType, SimpleNamespace
from typing import Any, cast

import verifiers.v1 as vf
from pydantic import BaseModel, Field, SecretStr
from verifiers.v1 import graph, task, trace, types
from verifiers.v1.clients import base as client_base
from verifiers.v1.configs.client import resolve_api_key
from verifiers.v1.interception import server as interception_server
from verifiers.v1.mcp import server as tool_server
from verifiers.v1.utils import decorators
from verifiers.v1.utils.generic import concrete_type

from prl.episodes.isolation import run_contained

VERSION = "0.4.0"

# --- cheaper records --------------------------------------------------------------------------------------------------

# pydantic's `model_construct` goes through all fields of a class, and inspects the signature of every default factory
# that it calls: a fifth of the processor time of a rollout. What it finds is the same each time.
CONSTRUCTED = (graph.MessageNode, trace.ModelCall, trace.TraceTask, types.TurnTokens, types.Response)
"""Records that each turn makes without validation."""


@functools.cache
def _fields(cls: type[BaseModel]) -> tuple[dict[str, Any], dict[str, Callable[[], Any]]]:
    """Default values of the fields in order, None where a factory or the caller gives it; and the factories."""
    fields = cls.model_fields
    factories = {name: cast(Any, field.default_factory) for name, field in fields.items() if field.default_factory}
    return {name: None if field.is_required() else field.get_default() for name, field in fields.items()}, factories


def _construct(cls: type[BaseModel], _fields_set: set[str] | None = None, **values: Any) -> BaseModel:
    """Replace `model_construct` for models without aliases, extra or private fields; `values` are of fields."""
    defaults, factories = _fields(cls)
    made = defaults | values
    for name, factory in factories.items():
        if name not in values:
            made[name] = factory()
    record = cls.__new__(cls)
    fields_set = set(values) if _fields_set is None else _fields_set
    object.__setattr__(record, "__dict__", made)
    object.__setattr__(record, "__pydantic_fields_set__", fields_set)
    object.__setattr__(record, "__pydantic_extra__", None)
    object.__setattr__(record, "__pydantic_private__", None)
    return record


for _cls in CONSTRUCTED:
    _cls.model_construct = classmethod(_construct)

WITHOUT_TOOLS = graph._tools_hash([])
_tools_hash = graph._tools_hash
graph._tools_hash = lambda tools: _tools_hash(tools) if tools else WITHOUT_TOOLS  # asked for again at every root

BUILD: trace.VersionInfo = vf.Trace.model_fields["verifiers"].get_default(call_default_factory=True)
"""The version of verifiers that each trace names, which verifiers looks up for each."""


_ids = random.Random()
"""Of its own: env code seeds Python's."""
os.register_at_fork(after_in_child=_ids.seed)


def new_trace(task: vf.TraceTask, agent: vf.AgentInfo) -> vf.Trace:
    """Return what `vf.Trace(task=task, agent=agent)` is, made without validation."""
    name = uuid.UUID(int=_ids.getrandbits(128), version=4).hex
    made = cast(vf.Trace, _construct(vf.Trace, {"task", "agent"}, task=task, agent=agent, verifiers=BUILD, id=name))
    object.__setattr__(made, "__pydantic_private__", {"_head_index": {}, "_on_change": None, "_pending": {}})
    return made


# --- graders ----------------------------------------------------------------------------------------------------------


@functools.lru_cache(1024)
def _signature_of_method(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(MethodType(function, object()))


def signature(code: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a grader: for a method, work it out once and not for each trace."""
    return _signature_of_method(code.__func__) if isinstance(code, MethodType) else inspect.signature(code)


@functools.lru_cache(1024)
def _tagged(cls: type, attr: str) -> list[str]:
    """Return the names of a class's functions that a decorator has tagged with `attr`."""
    return list(
        {name for base in cls.__mro__ for name, code in vars(base).items() if callable(code) and hasattr(code, attr)}
    )


def _discover_decorated(obj: object, attr: str) -> list[Callable[..., Any]]:
    """Replace verifiers' `discover_decorated`, which looks through the class of a task for each trace."""
    methods = [method for name in _tagged(cast(Any, type(obj)), attr) if hasattr(method := getattr(obj, name), attr)]
    return sorted(methods, key=lambda method: (-getattr(method, f"{attr}_priority", 0), method.__name__))


def _hooks(self: vf.Task, attr: str) -> list[Callable[..., Any]]:
    """Replace `Task.hooks` where none comes from the config and no two have one name: nothing is merged then."""
    found = _discover_decorated(self, attr)
    if getattr(self.config, f"{attr}s") or len({code.__name__ for code in found}) < len(found):
        return _all_hooks(self, attr)
    return found


async def _invoke_all(signals: list[Callable[..., Any]], available: dict[str, Any]) -> list[Any]:
    """Replace verifiers' `invoke_all`, in whose tasks a SystemExit of one grader would stop the event loop.

    Each grader has a task of its own, so that one that cancels its task cancels nothing else.
    """
    return await asyncio.gather(*(run_contained(decorators.invoke, signal, available) for signal in signals))


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


_all_hooks = task.Task.hooks
task.Task.hooks = _hooks
task.invoke_all = _invoke_all
task.discover_decorated = _discover_decorated
task.inspect = decorators.inspect = SimpleNamespace(signature=signature, Parameter=inspect.Parameter)
client_base.resolve_api_key = _resolve_api_key  # of every request of a client
interception_server.resolve_api_key = _resolve_api_key  # of `/v1/models`, which a program may ask for
