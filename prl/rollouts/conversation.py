"""Play envs in which somebody answers the model: verifiers' own `Env.run` over agents that live in this process.

An env that converses is written as verifiers defines it, `async with agents.agent.interaction(task) as talk: await
talk.turn(…)`. verifiers plays that with a program, a server and a client per agent; here a turn goes straight to the
sampler. Left out: tools, runtimes, steering, retries: `program.py` plays what needs those.
"""

import contextlib
import time
from dataclasses import dataclass
from typing import Any

from renderers.base import RenderedTokens
from verifiers.v1 import graph
from verifiers.v1.agent import Agents, Segment
from verifiers.v1.configs.env import EnvConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.env import Env
from verifiers.v1.task import Task
from verifiers.v1.taskset import Taskset
from verifiers.v1.trace import AgentInfo, TimeSpan, Trace, TraceTask
from verifiers.v1.types import Message, UserMessage
from verifiers.v1.utils.generic import concrete_type

from prl.orchestrator.sampler import OverlongPrompt, Sampler
from prl.rollouts.episode import AGENT, commit, opening


@dataclass
class Direct:
    """What an episode's agents play with: the sampler, and the episode's name among its requests."""

    sampler: Sampler
    key: str


def conversing(cls: type[Env], taskset: Taskset) -> Env:
    """An instance of the env class whose agents are in this process."""
    env = cls.__new__(cls)  # its __init__ wants a taskset and a harness that are installed under ids
    env.config = (concrete_type(cls, EnvConfig, origin=Env) or EnvConfig)()
    env.taskset = taskset

    def agents(context: Direct, completed: list[Trace], *_: Any) -> Agents:
        return Agents(env.config, lambda name, spec: DirectAgent(name, context, completed))

    env._episode_agents = agents
    return env


class DirectAgent:
    """One seat of an episode. `trainable` says whether what it samples is trained on."""

    def __init__(self, name: str, context: Direct, completed: list[Trace]):
        self.name = name
        self.trainable = True
        self._context = context
        self._completed = completed

    async def run(self, task: Task) -> Trace:
        """The task's prompt and one reply."""
        async with self.interaction(task) as talk:
            await talk.turn()
        return talk.trace

    @contextlib.asynccontextmanager
    async def interaction(self, task: Task):
        """A conversation in which the caller is the user. Scored, and part of the episode, once the context is left."""
        number = len(self._completed)
        info = AgentInfo.model_construct(**dict(AGENT) | {"name": self.name, "trainable": self.trainable})
        talk = Conversation(task, info, self._context.sampler, f"{self._context.key}/{self.name}/{number}")
        self._completed.append(talk.trace)
        try:
            yield talk
            await task.score(talk.trace)
        except Exception as error:
            talk.trace.record_error(error)
            raise
        talk.trace.ok = talk.trace.is_completed = True


class Conversation:
    """What verifiers' `Interaction` is to an env: `turn` sends a user message and returns what the model said."""

    def __init__(self, task: Task, agent: AgentInfo, sampler: Sampler, key: str):
        data = TraceTask.model_construct(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        self.trace = Trace(task=data, agent=agent)
        self._sampler = sampler
        self._key = key
        self._messages: list[Message] = opening(task)
        self._prompted = task.data.prompt is not None

    async def turn(self, message: str | None = None) -> Segment:
        """One model call. A prompted task speaks first: its opening reply is a bare `turn()`.

        A conversation that has no room for another answer gives a terminated segment.
        """
        if message is None and not self._prompted:
            raise ValueError("nothing to answer: a bare turn() takes a prompted task's opening reply")
        if message is not None and self._prompted:
            raise ValueError("the task's prompt opens this conversation: take its reply with a bare turn() first")
        self._prompted = False
        messages = self._messages if message is None else [*self._messages, UserMessage(content=message)]
        turn = graph.prepare_turn(self.trace, messages)
        rendered, bridged = self._render(turn, messages)
        started = time.time()
        try:
            (completion,) = await self._sampler.complete(rendered.token_ids, n=1, key=f"{self._key}/{len(messages)}")
        except OverlongPrompt:
            if not self.trace.calls:
                raise
            self.trace.stop("context_length")
            return Segment(messages=[], terminated=True)
        span = TimeSpan(start=started, end=time.time())
        reply = commit(turn, rendered, completion, self._sampler, span, bridged=bridged)
        self._messages = [*messages, reply]
        return Segment(messages=[reply])

    def _render(self, turn: graph.PendingTurn, messages: list[Message]) -> tuple[RenderedTokens, bool]:
        """The turn's prompt, and whether it extends the last one's tokens as they were sampled."""
        renderer = self._sampler.renderer
        if (previous := turn.previous_renderer_token_ids()) is not None:
            tail = [message_to_wire(message) for message in turn.tail]
            if (bridged := renderer.bridge_to_next_turn(*previous, tail)) is not None:
                return bridged, True
        return renderer.render([message_to_wire(message) for message in messages], add_generation_prompt=True), False
