"""Tools called directly in this process. verifiers would serve them over MCP from a process of their own.

A toolset whose class has `IN_PROCESS = True` promises that its tools are quick and touch nothing but their arguments,
their config and the state of their rollout: they share the event loop with every rollout in flight.
"""

import asyncio
import contextlib
import json
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import PydanticSerializationError, to_json
from verifiers.v1 import State, Task, TaskData, Tool, ToolCall, ToolMessage, Toolset
from verifiers.v1.clients.train import tool_to_wire
from verifiers.v1.state import state_cls
from verifiers.v1.types import content_to_parts
from verifiers.v1.utils.decorators import discover_decorated

from prl.base.errors import UNREADABLE
from prl.envs._verifiers_internals import call_state
from prl.envs.isolation import run_contained
from prl.envs.turn import kept_parts
from prl.rollouts.images import is_of_pillow, is_picture, url_of
from prl.rollouts.pictures import SCHEME, PictureError, PictureStore
from prl.rollouts.rollout import encodable


class Tools:
    """The tools of some toolsets, under the names that verifiers' servers would give them."""

    def __init__(self, toolsets: Sequence[Toolset] = ()):
        self.toolsets = list(toolsets)
        if self.toolsets:  # the import takes a second
            from mcp.server.mcpserver.tools.base import Tool as Function

        self._functions: dict[str, Function] = {}
        for toolset in self.toolsets:
            for function in discover_decorated(toolset, "tool"):
                name = getattr(function, "tool_name", None) or function.__name__
                full = f"{toolset.server_name}_{name}" if toolset.server_name else name
                if full in self._functions:
                    raise ValueError(f"two tools are named {full!r}; give their toolsets a TOOL_PREFIX each")
                self._functions[full] = Function.from_function(
                    function, name, description=(function.__doc__ or "").strip()
                )
        self.declared = [
            Tool(name=name, description=function.description, parameters=function.parameters)
            for name, function in self._functions.items()
        ]
        self.wire = [tool_to_wire(tool) for tool in self.declared] or None
        """The tools in OpenAI's format, as they are declared to the model; None if there are none."""

    def joined(self, toolsets: Sequence[Toolset]) -> "Tools":
        """Return these tools together with those of `toolsets`."""
        return Tools([*self.toolsets, *toolsets]) if toolsets else self

    def new_state(self, task: Task) -> State:
        """Create the state of a new rollout of `task`, of the most derived state class among the task's and the tools'.

        Raises ValueError where two of the classes do not extend each other.
        """
        classes = [state_cls(type(owner)) for owner in (task, *self.toolsets)]
        chosen = max(classes, key=lambda cls: len(cls.__mro__))
        for other in classes:
            if not issubclass(chosen, other):
                names = f"{chosen.__name__} and {other.__name__}"
                raise ValueError(f"a rollout has one state, but its tools name {names}: let one extend the other")
        return chosen()

    async def answer(self, call: ToolCall, state: State | None, pictures: PictureStore | None = None) -> ToolMessage:
        """Call a tool and return its answer. An error in the call, or of the tool, is an answer for the model to read.

        Args:
            call: The call as the model made it.
            state: The rollout's state, which the toolset reads as `self.state`.
            pictures: Keeps the pictures that a tool returns; None = the model sees none.

        Raises ValueError for a picture that cannot be read, or that the model does not see.
        """
        with call_state(state):
            content = await self._run(call)
        if isinstance(content, list):
            parts = kept_parts(content, f"the answer of the tool {call.name}", pictures)
            return ToolMessage(tool_call_id=call.id, content=content_to_parts(parts), name=call.name)
        return ToolMessage(tool_call_id=call.id, content=encodable(content), name=call.name)

    async def _run(self, call: ToolCall) -> str | list[Any]:
        """Return what a tool answers, as a text; a list of parts where there are pictures in it."""
        if not call.name:
            return "error: the tool call cannot be read: it is not complete, not valid JSON, or names no tool"
        if (function := self._functions.get(call.name)) is None:
            return f"error: there is no tool {call.name!r}"
        from mcp.server.mcpserver.exceptions import ToolError

        try:
            arguments = json.loads(call.arguments or "{}")
        except UNREADABLE as error:
            return f"error: the arguments are not JSON: {error}"
        if not isinstance(arguments, dict):
            return "error: the arguments must be a JSON object"
        if unknown := [name for name in arguments if name not in function.parameters["properties"]]:
            return f"error: there is no argument {unknown[0]!r}"
        try:
            result = await function.run(arguments, None)
            parts = list(result) if isinstance(result, list | tuple) else [result]
            if any(map(is_shown, parts)):
                return [part if is_shown(part) else {"type": "text", "text": as_text(part)} for part in parts]
            return as_text(result)
        except ToolError as error:
            cause = error.__cause__
            if isinstance(cause, ValidationError):
                problem = cause.errors()[0]
                return f"error: {'.'.join(map(str, problem['loc']))}: {problem['msg']}"
            return f"error: {str(cause or error) or type(cause).__name__}"
        except PydanticSerializationError as error:
            return f"error: {error}"


def is_shown(part: Any) -> bool:
    """Return whether a tool's answer is a picture: one of Pillow's or MCP's, a data URL, one that was kept.

    Others that are called so, such as the nodes of a page, are data.
    """
    if is_of_pillow(part):
        return True
    with contextlib.suppress(PictureError):
        return is_picture(part) and url_of(part).startswith(("data:", SCHEME))
    return False


def as_text(result: Any) -> str:
    """Return what a tool has returned as text. Raises PydanticSerializationError for a picture within it."""
    return encodable(result) if isinstance(result, str) else to_json(result, fallback=_other_as_text).decode()


def _other_as_text(value: Any) -> str:
    if is_of_pillow(value):
        raise PictureError("a tool returned a picture within other data: return it alone, or in a list of its own")
    return str(value)


async def set_up(toolsets: Sequence[Toolset], task: TaskData | None = None) -> None:
    """Run the `setup` hooks of toolsets, and their `setup_task` hooks with `task` if they belong to one rollout."""
    await asyncio.gather(*(run_contained(toolset.setup) for toolset in toolsets))
    if task is not None:
        await asyncio.gather(*(run_contained(toolset.setup_task, task) for toolset in toolsets))
