"""Tools that answer in this process: what verifiers would serve over MCP from a process of its own, called directly.

A toolset whose class says `IN_PROCESS = True` promises that its tools are quick and touch nothing but their arguments,
their config and their rollout's state: they share the event loop with every rollout in flight.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools.base import Tool as Function
from pydantic import ValidationError
from pydantic_core import PydanticSerializationError, to_json
from verifiers.v1 import State, Task, Toolset
from verifiers.v1.clients.train import tool_to_wire
from verifiers.v1.mcp import server
from verifiers.v1.state import state_cls
from verifiers.v1.types import Tool, ToolCall, ToolMessage
from verifiers.v1.utils.decorators import discover_decorated

from prl.rollouts.messages import encodable


class MalformedToolCall(ValueError):
    """The model wrote a tool call that cannot be read."""

    kind = "tool_call"


class Tools:
    """The tools of some toolsets, under the names that verifiers' servers would give them."""

    def __init__(self, toolsets: Sequence[Toolset] = ()):
        self.toolsets = list(toolsets)
        self._functions: dict[str, Function] = {}
        for toolset in self.toolsets:
            for function in discover_decorated(toolset, "tool"):
                name = getattr(function, "tool_name", None) or function.__name__
                full = f"{toolset.server_name}_{name}" if toolset.server_name else name
                if full in self._functions:
                    raise ValueError(f"two tools are named {full!r}; give their toolsets a TOOL_PREFIX each")
                description = (function.__doc__ or "").strip()
                self._functions[full] = Function.from_function(function, name, description=description)
        self.declared = [
            Tool(name=name, description=function.description, parameters=function.parameters)
            for name, function in self._functions.items()
        ]
        self.wire = [tool_to_wire(tool) for tool in self.declared] or None
        """As the model is told of them (OpenAI's format); None where there are none."""

    def joined(self, toolsets: Sequence[Toolset]) -> "Tools":
        """These tools and those of `toolsets`."""
        return Tools([*self.toolsets, *toolsets]) if toolsets else self

    def new_state(self, task: Task) -> State:
        """What a rollout of `task` starts with as its state: of the class that the task names, or else its tools do."""
        classes = [state_cls(type(owner)) for owner in (task, *self.toolsets)]
        own = max(classes, key=lambda cls: len(cls.__mro__))
        if other := next((cls for cls in classes if not issubclass(own, cls)), None):
            raise ValueError(
                f"a rollout has one state, but its tools name {own.__name__} and {other.__name__}: let one extend the other"
            )
        return own()

    async def answer(self, call: ToolCall, state: Any) -> ToolMessage:
        """What the tool says. What is wrong with the call, or with what it asks for, is an answer for the model to read.

        `state` is what the toolset's `self.state` refers to: the trace's own.
        """
        token = server._call_state.set(state)
        try:
            content = await self._run(call)
        finally:
            server._call_state.reset(token)
        return ToolMessage(tool_call_id=call.id, content=encodable(content), name=call.name)

    async def _run(self, call: ToolCall) -> str:
        if (function := self._functions.get(call.name)) is None:
            return f"error: there is no tool {call.name!r}"
        try:
            arguments = json.loads(call.arguments or "{}")
        except (ValueError, RecursionError) as error:
            return f"error: the arguments are not JSON: {error}"
        if not isinstance(arguments, dict):
            return "error: the arguments must be a JSON object"
        try:
            result = await function.run(arguments, None)
            return result if isinstance(result, str) else to_json(result, fallback=str).decode()
        except ToolError as error:
            return f"error: {_reason(error)}"
        except PydanticSerializationError as error:
            return f"error: {error}"


def _reason(error: ToolError) -> str:
    cause = error.__cause__
    if isinstance(cause, ValidationError):
        problem = cause.errors()[0]
        return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
    return str(cause or error) or type(cause).__name__


def in_process(toolsets: Sequence[Toolset]) -> bool:
    """Whether all of these toolsets may be called in this process."""
    return all(getattr(toolset, "IN_PROCESS", False) for toolset in toolsets)


async def set_up(toolsets: Sequence[Toolset], task: Any = None) -> None:
    """Run the toolsets' `setup` hooks, and `setup_task` where they belong to one rollout."""
    await asyncio.gather(*(contained(toolset.setup) for toolset in toolsets))
    if task is not None:
        await asyncio.gather(*(contained(toolset.setup_task, task) for toolset in toolsets))


async def contained(code: Callable[..., Awaitable[Any]], *args: Any) -> Any:
    """An env's code for a task of its own, where a SystemExit would end the event loop whoever waits for the task."""
    try:
        return await code(*args)
    except SystemExit as error:
        raise escaped(error) from error


def escaped(error: BaseException) -> RuntimeError:
    """What would have ended more than the env's code that raised it, as a failure of that code."""
    return RuntimeError(f"the env's code let {type(error).__name__} escape")
