"""A class of yours as an env: `reset(row)` begins an episode, public methods are the model's tools, `reward()` ends it.

    class Shop:
        def reset(self, row):
            self.left = row["budget"]

        def buy(self, price: int) -> str:
            "Buy something for this price."
            self.left -= price
            return f"{self.left} left"

        def reward(self):
            return float(self.left == 0)

An episode is a conversation over an instance of its own. It ends with a reply that calls no tool, or after `max_turns`
replies. The reward is what `reward` returns: a number, or a list with one for each reply.

The rows are those of `path`, or what the class's own `rows()` yields. A row's `prompt`, if it has one, opens the
conversation, and what `reset` returns, a text or a list of messages, comes behind it.

Methods run in a thread of their episode, so one that blocks delays nobody else, and what is bound to a thread (a
connection to SQLite) works in all of them. Coroutines run in the event loop.
"""

import asyncio
import contextlib
import contextvars
import copy
import functools
import hashlib
import inspect
import json
import queue
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import islice
from types import FunctionType
from typing import Annotated, Any

import verifiers.v1 as vf
from pydantic import AfterValidator, Field, ImportString, TypeAdapter

from prl.base.errors import of_own_code
from prl.base.text import in_one_line
from prl.config.build import NAMED
from prl.envs.isolation import as_failure, run_contained
from prl.envs.tasksets.base import CallsCounted, IdTask
from prl.envs.tasksets.jsonl import RowsConfig, rows_at
from prl.envs.tasksets.layouts import decoded, messages_of

__all__ = ["ToolsEnv", "ToolsTaskset"]

RESERVED = ("reset", "reward", "rows")
"""Public methods that are no tools."""
MOST = 100_000
"""Rows that are taken of a class whose `rows` never ends."""


# --- a class ----------------------------------------------------------------------------------------------------------


def toolset_of(cls: Any) -> vf.Toolset:
    """Return the public methods of a class as tools, those of its base classes first, in the order of their definition.

    Raises ValueError, with class and method, if the class cannot be played.
    """
    if not inspect.isclass(cls) or not accepts(cls):
        raise ValueError(f"{cls!r} is not a class that is made without arguments")
    if not accepts(getattr(cls, "reset", None), "self", "row"):
        raise ValueError(f"{cls.__name__} needs a method reset(self, row)")
    reward = getattr(cls, "reward", None)
    if not accepts(reward, "self") and not accepts(reward, "self", "reply"):
        raise ValueError(f"{cls.__name__} needs a method reward(self), or reward(self, reply)")
    if isinstance(inspect.getattr_static(cls, "rows", None), FunctionType):
        raise ValueError(f"{cls.__name__}.rows yields the tasks: make it a staticmethod, or give a tool another name")
    names = dict.fromkeys(name for base in reversed(cls.__mro__[:-1]) for name in vars(base))
    public = [name for name in names if not name.startswith("_") and name not in RESERVED]
    tools = {name: as_tool(cls, name) for name in public if inspect.isroutine(getattr(cls, name))}
    if not tools:
        raise ValueError(f"{cls.__name__} has no tool: each public method is one, with a docstring and types")
    for place, tool in enumerate(tools.values()):
        tool.tool_priority = -place  # by which verifiers orders them
    return type(cls.__name__, (vf.Toolset,), {"TOOL_PREFIX": None, "IN_PROCESS": True, **tools})(vf.ToolsetConfig())


def accepts(code: Any, *arguments: str) -> bool:
    """Return whether something can be called with these arguments."""
    try:
        inspect.signature(code).bind(*arguments)
    except TypeError:
        return False
    return True


def as_tool(cls: type, name: str) -> Any:
    """Return a method as one of a toolset, which calls it on the instance of the episode. Raises ValueError."""
    where, method = f"{cls.__name__}.{name}", getattr(cls, name)
    if not inspect.getdoc(method) or not name.isascii() or len(name) > 64:  # which chat formats do not take
        raise ValueError(
            f"{where} is a tool and needs a docstring, and an ASCII name of at most 64; _{name} is no tool"
        )
    try:
        parameters = list(inspect.signature(method, eval_str=True).parameters.values())
        if not isinstance(inspect.getattr_static(cls, name), classmethod | staticmethod):
            del parameters[0]  # self
        for parameter in parameters:
            if parameter.kind not in NAMED or parameter.name.startswith("_") or parameter.annotation is parameter.empty:
                raise ValueError(
                    f"a model gives arguments by name and type (text: str), which {parameter} does not take"
                )
            TypeAdapter(parameter.annotation).json_schema()
    except Exception as error:  # of an annotation, or of pydantic
        raise ValueError(f"{where}: {in_one_line(error)}") from error

    async def call(self: vf.Toolset, /, **arguments: Any) -> Any:
        episode = EPISODE.get()
        return await episode.call(getattr(episode.instance, name), **arguments)

    call.__name__, call.__doc__ = name, inspect.getdoc(method)
    owner = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    call.__signature__ = inspect.Signature([owner, *parameters])  # type: ignore[attr-defined]  # what inspect reads
    return vf.tool(call)


# --- the rows ---------------------------------------------------------------------------------------------------------


class ToolsData(vf.TaskData):
    row: dict[str, Any] = Field(exclude=True)
    """Row that an episode is reset with."""


class ToolsConfig(RowsConfig):
    env: Annotated[ImportString, AfterValidator(lambda cls: toolset_of(cls) and cls)]
    """The dotted path of your class."""
    max_turns: int = Field(16, ge=1)
    """Most replies of an episode."""
    path: str | None = None
    """The rows: a file, several by a pattern, or a data set on the hub, as of `jsonl`; null = the class's `rows()`."""


class ToolsTask(CallsCounted, IdTask[ToolsData]):
    """A hash of the row is its identity."""


class ToolsTaskset(vf.Taskset[ToolsTask, ToolsConfig]):
    """The rows, each once, in random order."""

    IN_PROCESS = True

    @classmethod
    def toolsets(cls, config: ToolsConfig) -> list[vf.Toolset]:
        return [toolset_of(config.env)]

    def load(self) -> Iterator[ToolsTask]:
        config = self.config
        tasks = self._tasks(config.path)
        if config.eval_path is not None:
            held_out = self._tasks(config.eval_path)
        else:
            held_out = {key: tasks[key] for key in config.held_out(tasks)}
        chosen = sorted(held_out if config.split == "eval" else tasks.keys() - held_out.keys())
        random.Random(config.seed).shuffle(chosen)
        for key in chosen[: config.num_tasks]:
            yield ToolsTask((tasks | held_out)[key], config.task)

    def _tasks(self, path: str | None) -> dict[str, ToolsData]:
        """Return the distinct rows of a file, or of the class, by their identity. Raises ValueError, with the place."""
        env, found = self.config.env, {}
        if path is not None:
            rows = rows_at(path)
        elif hasattr(env, "rows"):
            rows = ((f"{env.__name__}.rows()", row) for row in islice(env.rows(), MOST))
        else:
            raise ValueError(f"there are no rows: set path, or give {env.__name__} a static method rows()")
        for place, row in rows:
            try:
                key = hashlib.sha256(json.dumps(row, sort_keys=True, default=repr).encode()).hexdigest()[:16]
                prompt = as_messages(decoded(row.get("prompt"), whole=False))
                found[key] = ToolsData(id=key, prompt=prompt, system_prompt=self.config.system, row=row)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{place}: a row is a mapping, its prompt a text or messages: {in_one_line(error)}"
                ) from error
        return found


def as_messages(value: Any) -> list[vf.Message]:
    """Return a text as a message of the user's, and a list as chat messages; of None none. Raises as `messages_of`."""
    if isinstance(value, str | None):
        return [vf.UserMessage(content=value)] if value else []
    return messages_of(value)


# --- an episode -------------------------------------------------------------------------------------------------------


class ToolsEnv(vf.SingleAgentEnv):
    """One conversation over an instance of the class."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        cls, episode = self.taskset.config.env, Episode()
        EPISODE.set(episode)
        try:
            with naming(cls, "__init__"):
                episode.instance = await episode.call(cls)
            with naming(cls, "reset"):
                said = await episode.call(episode.instance.reset, copy.deepcopy(task.data.row))  # others have it, too
                opened = task.with_data(prompt=opening(task.data.prompt, said))
            async with agents.agent.interaction(opened) as talk:
                talk.max_turns = self.taskset.config.max_turns
                await talk.turn()
                with naming(cls, "reward"):
                    reply = [] if accepts(cls.reward, "self") else [talk.trace.last_reply]
                    talk.trace.record_reward("reward", await episode.call(episode.instance.reward, *reply))
        finally:
            episode.close()


def opening(prompt: list[vf.Message], said: Any) -> list[vf.Message]:
    """Return a row's prompt with what `reset` has returned behind it; raise ValueError if there is neither.

    A text becomes part of the user's message that it follows: many chat templates take no second one in a row.
    """
    messages = [*prompt, *as_messages(said)]
    if isinstance(said, str) and prompt and prompt[-1].role == "user":
        asked, added = prompt[-1].content, f"\n\n{said}"
        whole = asked + added if isinstance(asked, str) else [*asked, vf.TextContentPart(text=added)]
        messages[-2:] = [vf.UserMessage(content=whole)]
    if not messages:
        raise ValueError("it returned no prompt, and the row has none")
    return messages


@contextlib.contextmanager
def naming(cls: type, method: str) -> Iterator[None]:
    """Raise RuntimeError, with class, method and line, for an exception of the block."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(f"{cls.__name__}.{method} failed: {of_own_code(error)}") from error


class Episode:
    """An instance, and the thread that its methods run in. One that never returns does not keep the process alive."""

    instance: Any = None

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="prl-tools", daemon=True).start()

    async def call(self, code: Callable[..., Any], /, *args: Any, **arguments: Any) -> Any:
        """Call the code in the thread, and await in the event loop what it returns, if that is a coroutine.

        Raises what it raises; RuntimeError for what would stop the event loop.
        """
        done: Future[Any] = Future()
        self._calls.put((done, functools.partial(code, *args, **arguments)))
        result, error = await asyncio.wrap_future(done)
        if error is not None:
            raise as_failure(error)
        return await run_contained(lambda: result)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            done, code = call
            if not done.set_running_or_notify_cancel():  # the episode has ended
                continue
            try:
                done.set_result((code(), None))
            except BaseException as error:
                done.set_result((None, error))  # not set_exception, which takes no StopIteration

    def close(self) -> None:
        """Let the thread end, after the call that it is in."""
        self._calls.put(None)


EPISODE: contextvars.ContextVar[Episode] = contextvars.ContextVar("EPISODE")
"""The episode that this task of the event loop plays."""
