"""Play multi-turn envs in this process: verifiers' own `Env.run` over agents that ask the sampler directly.

A multi-turn env is written as verifiers defines it: `async with agents.agent.interaction(task) as talk: await
talk.turn(…)`. verifiers plays it with a program, a server and a client per agent; here a turn goes straight to the
sampler, and a tool call straight to its tool. Not supported, and left to verifiers' harness (`harness.py`): tools
in processes of their own, runtimes, steering, retries.
"""

import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import verifiers.v1 as vf
from renderers.base import RenderedTokens
from verifiers.v1 import graph
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.session import call_hook

from prl.engines.chat import Dialogue
from prl.engines.renderer import input_of, multi_modal, render_prompt
from prl.engines.sampler import OverlongPrompt, Sampler
from prl.envs._verifiers_internals import BUILD, env_with_agents
from prl.envs.grading import grade
from prl.envs.tools import Tools, set_up
from prl.envs.turn import (
    AGENT,
    commit,
    messages_of,
    opening_messages,
    refuse_placeholders,
    trace_task,
    with_kept_pictures,
)
from prl.transport import events


@dataclass
class InProcessContext:
    """The way from the agents of an episode to the model, and what the episode leaves if it fails."""

    sampler: Sampler | None
    """None where an episode is only set up, to look at its agents."""
    key: str
    """Name of the episode among the requests of a run: its group's, and its number there."""
    failure: Exception | None = field(default=None, init=False)
    """The first exception in a conversation, as it was raised."""
    traces: list[vf.Trace] = field(default_factory=list, init=False)
    """The episode's conversations, including one that a deadline cut short."""


def bind_in_process(cls: type[vf.Env], taskset: vf.Taskset, tools: Tools | None = None) -> vf.Env:
    """Create an instance of the env class whose agents live in this process and may call `tools`."""

    def make_agent(
        context: InProcessContext, completed: list[vf.Trace], name: str, spec: vf.AgentConfig
    ) -> "InProcessAgent":
        context.traces = completed
        return InProcessAgent(name, spec, context, tools or Tools())

    return env_with_agents(cls, taskset, make_agent)


@dataclass
class InProcessAgent:
    """An agent of an episode, in place of verifiers' `Agent`."""

    name: str
    spec: vf.AgentConfig
    context: InProcessContext
    tools: Tools
    trainable: bool = True
    """Its replies are trained on."""

    async def run(self, task: vf.Task) -> vf.Trace:
        """Play the task's prompt and one reply, with the tool calls in between."""
        async with self.interaction(task) as talk:
            await talk.turn()
        return talk.trace

    @contextlib.asynccontextmanager
    async def interaction(self, task: vf.Task) -> "AsyncGenerator[Conversation, None]":
        """Open a conversation in which the caller is the user, and grade it when the context ends without exception."""
        sampler, traces = self.context.sampler, self.context.traces
        if sampler is None:
            raise RuntimeError(f"agent {self.name!r} was asked for a conversation while the env was only set up")
        if self.spec.sampling and self.spec.sampling.max_tokens:
            sampler = sampler.limited(self.spec.sampling.max_tokens)  # where the run sets no limit
        toolsets = task.toolsets(task.config)
        task = with_kept_pictures(task, sampler.pictures)  # the env may have written the prompt itself
        talk = Conversation(
            task,
            AGENT.model_copy(update={"name": self.name, "trainable": self.trainable}),
            sampler,
            f"{self.context.key}/{self.name}/{len(traces)}",
            tools=self.tools.joined(toolsets),
            stops=task.hooks("stop"),
            max_turns=self.spec.max_turns,
            group=f"{self.context.key.rpartition('/')[0]}/{self.name}",
        )
        traces.append(talk.trace)
        try:
            await set_up(toolsets, task.data)
            yield talk
            await grade(task, talk.trace)
        except Exception as error:
            self.context.failure = self.context.failure or error
            talk.trace.record_error(error)
            raise
        talk.trace.ok = talk.trace.is_completed = True


class Conversation:
    """A conversation, in place of verifiers' `Interaction`: `turn` sends messages and returns the model's reply."""

    def __init__(
        self,
        task: vf.Task,
        agent: vf.AgentInfo,
        sampler: Sampler,
        key: str,
        *,
        tools: Tools,
        stops: Sequence[Callable[..., Any]] = (),
        max_turns: int | None = None,
        group: str = "",
    ):
        """`key` names the conversation among those of a run, `group` those that begin with the same prompt.

        `stops` are the task's `@vf.stop` methods that read the trace: before each model call they may end it.
        """
        self.trace = vf.Trace(task=trace_task(task), agent=agent, state=tools.new_state(task), verifiers=BUILD)
        self.tools = tools
        self.stops = stops
        self.max_turns = max_turns
        self._sampler = sampler
        self._key = key
        # By it all conversations of a group go to one server, which has their prompt in its cache.
        self._prefix = group or key
        self._messages: list[vf.Message] = opening_messages(task.data)
        self._prompt_pending = task.data.prompt is not None

    async def turn(self, message: str | Sequence[vf.Message | dict[str, Any]] | None = None) -> vf.Segment:
        """Send what is said in a turn and return the model's reply, with the tool calls on the way.

        Args:
            message: What the user says, or messages of any role, also in OpenAI's format. None takes the first reply of
                a task that has a prompt.

        Returns:
            The messages since those. A reply that was cut off by its length calls no tool. The segment is
            terminated and empty if the context has no room, or the conversation no turn left, for another reply, or a
            `@vf.stop` of the task holds.

        Raises:
            ValueError: The task's prompt and `message` both open the conversation, or neither does.
        """
        if message is not None:
            if self._prompt_pending:
                raise ValueError("the task's prompt opens this conversation: take its reply with a bare turn() first")
            self._messages = [*self._messages, *messages_of(message, self._sampler.pictures)]
        elif not self._prompt_pending:
            raise ValueError("nothing to answer: a bare turn() takes a prompted task's opening reply")
        self._prompt_pending = False
        start = len(self._messages)
        while (reply := await self._ask()) is not None:
            cut_off = self.trace.calls[-1].finish_reason == "length"
            if cut_off or not reply.tool_calls or not self.tools.wire:
                return vf.Segment(messages=self._messages[start:])
            for call in reply.tool_calls:
                answer = await self.tools.answer(call, self.trace.state, self._sampler.pictures)
                self._messages.append(answer)
        return vf.Segment(messages=[], terminated=True)

    async def _ask(self) -> vf.AssistantMessage | None:
        """Make one model call; return None if there is no room or no turn left for it, or the task stops here."""
        if self.max_turns is not None and len(self.trace.calls) >= self.max_turns:
            self.trace.stop("max_turns")
            return None
        for stop in self.stops:
            if await call_hook(stop, {vf.Trace: self.trace}):
                self.trace.stop(stop.__name__)
                return None
        turn = graph.prepare_turn(self.trace, self._messages, self.tools.declared)
        rendered, bridged = self._render(turn)
        started = events.now()
        try:
            (completion,) = await self._sampler.complete(
                input_of(rendered),
                n=1,
                key=f"{self._key}/{len(self._messages)}",
                dialogue=Dialogue(self._messages, self.tools.wire, self.trace.task.data),
                prefix=self._prefix,
            )
        except OverlongPrompt:
            # No room for a first reply: this is no end of a conversation, the task does not fit.
            if not self.trace.calls:
                raise
            self.trace.stop("context_length")
            return None
        span = vf.TimeSpan(start=started, end=events.now())
        reply = commit(turn, rendered, completion, self._sampler, span, bridged=bridged, tools=self.tools.wire)
        refuse_placeholders(self.trace, self._sampler.renderer)
        self._messages = [*self._messages, reply]
        return reply

    def _render(self, turn: graph.PendingTurn) -> tuple[RenderedTokens, bool]:
        """Return the turn's prompt, and whether it extends the tokens of the turn before as they were sampled."""
        renderer, tools = self._sampler.renderer, self.tools.wire
        if (previous := turn.previous_renderer_token_ids()) is not None:
            tail = [message_to_wire(message) for message in turn.tail]
            before = next((call for call in self.trace.calls if call.node == turn.prefix_node_ids[-1]), None)
            pictures = multi_modal(getattr(before, "pictures", ()))
            options = {"previous_multi_modal_data": pictures} if pictures else {}
            bridged = renderer.bridge_to_next_turn(*previous, tail, tools=tools, **options)
            # Verified, because a bridge may leave out tokens: what follows the end of a turn, for example.
            if bridged is not None and bridged.token_ids[: turn.path_len] == [*previous[0], *previous[1]]:
                return bridged, True
        messages = [message_to_wire(message) for message in self._messages]
        return render_prompt(renderer, messages, tools), False
