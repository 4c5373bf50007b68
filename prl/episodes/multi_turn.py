"""Play envs in which somebody answers the model: verifiers' own `Env.run` over agents that live in this process.

An env that converses is written as verifiers defines it, `async with agents.agent.interaction(task) as talk: await
talk.turn(…)`. verifiers plays that with a program, a server and a client per agent; here a turn goes straight to the
sampler, and a tool call straight to its tool. Left out: tools in processes of their own, runtimes, steering, retries:
`program.py` plays what needs those.
"""

import contextlib
import time
from dataclasses import dataclass, field
from typing import Any

from renderers.base import RenderedTokens
from verifiers.v1 import graph
from verifiers.v1.agent import Agents, Segment
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.env import EnvConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.env import Env
from verifiers.v1.task import Task
from verifiers.v1.taskset import Taskset
from verifiers.v1.trace import AgentInfo, TimeSpan, Trace
from verifiers.v1.types import AssistantMessage, Message, UserMessage
from verifiers.v1.utils.generic import concrete_type

from prl.episodes.single_turn import AGENT, commit, on_trace, opening
from prl.episodes.tools import Tools, set_up
from prl.inference.sampler import OverlongPrompt, Sampler


@dataclass
class Direct:
    """What an episode's agents play with: the sampler, and the episode's name among its requests."""

    sampler: Sampler
    key: str
    failure: Exception | None = field(default=None, init=False)
    """What first went wrong in a conversation, as it was raised."""
    traces: list[Trace] = field(default_factory=list, init=False)
    """The episode's conversations, one that a deadline cut short among them."""


def conversing(cls: type[Env], taskset: Taskset, tools: Tools | None = None) -> Env:
    """An instance of the env class whose agents are in this process, and may call `tools`."""
    env = cls.__new__(cls)  # its __init__ wants a taskset and a harness that are installed under ids
    env.config = (concrete_type(cls, EnvConfig, origin=Env) or EnvConfig)()
    env.taskset = taskset
    shared = tools or Tools()

    def agents(context: Direct, completed: list[Trace], *_: Any) -> Agents:
        context.traces = completed
        return Agents(env.config, lambda name, spec: DirectAgent(name, spec, context, completed, shared))

    env._episode_agents = agents
    return env


async def count_seats(env: Env) -> int:
    """How many of its agents are trained: each leaves a rollout of every episode."""
    agents = env._episode_agents(Direct(None, ""), [])
    await env.setup(agents)
    return sum(agent.trainable for agent in agents._agents.values())


class DirectAgent:
    """One seat of an episode. `trainable` says whether what it samples is trained on."""

    def __init__(self, name: str, spec: AgentConfig, context: Direct, completed: list[Trace], tools: Tools):
        self.name = name
        self.spec = spec
        self.trainable = True
        self._context = context
        self._completed = completed
        self._tools = tools

    def _sampler(self) -> Sampler:
        """The run's; where that has no limit of a reply, with the seat's own."""
        limit = self.spec.sampling and self.spec.sampling.max_tokens
        return self._context.sampler.limited(limit) if limit else self._context.sampler

    async def run(self, task: Task) -> Trace:
        """The task's prompt and the reply, with the tool calls between."""
        async with self.interaction(task) as talk:
            await talk.turn()
        return talk.trace

    @contextlib.asynccontextmanager
    async def interaction(self, task: Task):
        """A conversation in which the caller is the user. Scored, and part of the episode, once the context is left."""
        number = len(self._completed)
        info = AgentInfo.model_construct(**dict(AGENT) | {"name": self.name, "trainable": self.trainable})
        own = task.toolsets(task.config)
        talk = Conversation(
            task,
            info,
            self._sampler(),
            f"{self._context.key}/{self.name}/{number}",
            tools=self._tools.joined(own),
            max_turns=self.spec.max_turns,
        )
        self._completed.append(talk.trace)
        try:
            await set_up(own, task.data)
            yield talk
            await task.score(talk.trace)
        except Exception as error:
            self._context.failure = self._context.failure or error
            talk.trace.record_error(error)
            raise
        talk.trace.ok = talk.trace.is_completed = True


class Conversation:
    """What verifiers' `Interaction` is to an env: `turn` sends a user message and returns what the model said."""

    def __init__(
        self, task: Task, agent: AgentInfo, sampler: Sampler, key: str, *, tools: Tools, max_turns: int | None = None
    ):
        self.trace = Trace(task=on_trace(task), agent=agent, state=tools.new_state(task))
        self.tools = tools
        self.max_turns = max_turns
        self._sampler = sampler
        self._key = key
        self._messages: list[Message] = opening(task)
        self._prompted = task.data.prompt is not None

    async def turn(self, message: str | None = None) -> Segment:
        """The model's answer, with the tool calls it makes on the way. A prompted task speaks first: its opening reply
        is a bare `turn()`.

        A reply that was cut by its length calls nothing. A conversation that has no room or no turn left for another answer
        gives a terminated segment. Raises MalformedToolCall for a call that cannot be read.
        """
        if message is None and not self._prompted:
            raise ValueError("nothing to answer: a bare turn() takes a prompted task's opening reply")
        if message is not None and self._prompted:
            raise ValueError("the task's prompt opens this conversation: take its reply with a bare turn() first")
        self._prompted = False
        if message is not None:
            self._messages = [*self._messages, UserMessage(content=message)]
        begun = len(self._messages)
        while (reply := await self._ask()) is not None:
            cut = self.trace.calls[-1].finish_reason == "length"
            if cut or not reply.tool_calls or not self.tools.wire:
                return Segment(messages=self._messages[begun:])
            for call in reply.tool_calls:
                self._messages.append(await self.tools.answer(call, self.trace.state))
        return Segment(messages=[], terminated=True)

    async def _ask(self) -> AssistantMessage | None:
        """One model call; None where there is no room or no turn left for it."""
        if self.max_turns is not None and len(self.trace.calls) >= self.max_turns:
            self.trace.stop("max_turns")
            return None
        turn = graph.prepare_turn(self.trace, self._messages, self.tools.declared)
        rendered, bridged = self._render(turn)
        started = time.time()
        key = f"{self._key}/{len(self._messages)}"
        try:
            (completion,) = await self._sampler.complete(rendered.token_ids, n=1, key=key)
        except OverlongPrompt:
            if not self.trace.calls:
                raise
            self.trace.stop("context_length")
            return None
        span = TimeSpan(start=started, end=time.time())
        reply = commit(turn, rendered, completion, self._sampler, span, bridged=bridged, tools=self.tools.wire)
        self._messages = [*self._messages, reply]
        return reply

    def _render(self, turn: graph.PendingTurn) -> tuple[RenderedTokens, bool]:
        """The turn's prompt, and whether it extends the last one's tokens as they were sampled."""
        renderer, tools = self._sampler.renderer, self.tools.wire
        if (previous := turn.previous_renderer_token_ids()) is not None:
            tail = [message_to_wire(message) for message in turn.tail]
            bridged = renderer.bridge_to_next_turn(*previous, tail, tools=tools)
            # Not taken on trust: a bridge may leave out what it finds behind the end of a turn, say.
            if bridged is not None and bridged.token_ids[: turn.path_len] == [*previous[0], *previous[1]]:
                return bridged, True
        wire = [message_to_wire(message) for message in self._messages]
        return renderer.render(wire, tools=tools, add_generation_prompt=True), False
