"""Episodes of prl's envs: demonstrated, as rows to learn from, or sampled from a model, for its reward.

A demonstration runs the env's own rules over turns that are rendered as `prl.envs.multi_turn` renders them. A
sampled episode is a rollout as in a run, with a batched `generate` in place of the engine.
"""

import asyncio
import contextlib
import itertools
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from omegaconf import OmegaConf
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.task import Task
from verifiers.v1.types import AssistantMessage, Message, UserMessage

from prl.config.schema import EnvConfig
from prl.engines.replies import Completion
from prl.envs.environment import Environment
from prl.envs.turn import opening_messages, parse
from prl.rollouts.inputs import ModelInput
from prl.rollouts.rollout import Rollout

from .demonstrations import DEMONSTRATORS

CONF = Path(__file__).parents[2] / "conf" / "env"
MAX_NEW_TOKENS = 64
Row = tuple[list[int], list[int]]
"""Token ids, and labels: the same, or -100 where nothing is to be learnt."""


def load(env: str, *, num_tasks: int = 1, eval_tasks: int = 0) -> Environment:
    """The env as `conf/env` has it, with up to so many tasks to train on and to evaluate with."""
    given = OmegaConf.to_container(OmegaConf.merge({"seed": 0}, OmegaConf.load(CONF / f"{env}.yaml")), resolve=True)
    args = given["args"] | {"num_tasks": num_tasks}
    eval_args = given["eval_args"] | {"num_tasks": max(eval_tasks, 1)}
    return Environment(env, EnvConfig(given["taskset"], args, eval_args), eval_tasks=eval_tasks)


class Demonstrations:
    """Rows of one env by its demonstrator. `right` and `echoed` are chances: of a best reply, and that a tool's answer
    is learnt like a reply."""

    def __init__(self, env: str, tokenizer: PreTrainedTokenizerBase, renderer: Any, *, num_tasks: int):
        self.environment = load(env, num_tasks=num_tasks)
        self.demonstrate = DEMONSTRATORS[env]
        self.tokenizer = tokenizer
        self.renderer = renderer
        self.tools = self.environment.tools

    def rows(self, number: int, right: float, echoed: float, rng: random.Random) -> list[Row]:
        """At least `number` rows, of tasks drawn at random."""

        async def episodes() -> list[Row]:
            made: list[Row] = []
            while len(made) < number:
                made += await self._episode(rng.choice(self.environment.tasks), right, echoed, rng)
            return made

        return asyncio.run(episodes())

    async def _episode(self, task: Any, right: float, echoed: float, rng: random.Random) -> list[Row]:
        talks: list[Talk] = []

        @contextlib.asynccontextmanager
        async def interaction(task):
            talks.append(Talk(self, task, right, rng.random() < echoed, rng))
            yield talks[-1]

        async def run(task):
            async with interaction(task) as talk:
                await talk.turn()

        seat = SimpleNamespace(interaction=interaction, run=run)
        if self.environment.verifiers_env is None:
            await run(task)
        else:
            await self.environment.verifiers_env.run(task, SimpleNamespace(agent=seat, player=seat, opponent=seat))
        return [(talk.ids, talk.labels) for talk in talks if any(label >= 0 for label in talk.labels)]


class Talk:
    """What `prl.envs.multi_turn.Conversation` is to an env, with a demonstrator that speaks for the model."""

    def __init__(self, by: Demonstrations, task: Any, right: float, echoed: bool, rng: random.Random):
        self.by, self.right, self.echoed, self.rng = by, right, echoed, rng
        self.trace = SimpleNamespace(record_reward=lambda *_: None)
        self.ids: list[int] = []
        self.labels: list[int] = []
        self._completion: list[int] = []
        self._wire: list[dict] = []
        self._opening: list[Message] = opening_messages(task.data)
        self._heard: list[str] = []
        self._said: list[str] = []

    async def turn(self, message: str | None = None) -> SimpleNamespace:
        """The demonstrator's answer, with the tool calls on the way."""
        new = [*self._opening, *([] if message is None else [UserMessage(content=message)])]
        self._opening = []
        while True:
            reply = self._reply(new)
            if not reply.tool_calls:
                return SimpleNamespace(last_reply=reply.content or "", terminated=False)
            new = [await self.by.tools.answer(call, None) for call in reply.tool_calls]

    def _reply(self, new: list[Message]) -> AssistantMessage:
        renderer, tools, tokenizer, known = self.by.renderer, self.by.tools.wire, self.by.tokenizer, len(self.ids)
        wire = [message_to_wire(message) for message in new]
        prompt = self.ids[: known - len(self._completion)]
        rendered = renderer.bridge_to_next_turn(prompt, self._completion, wire, tools=tools)
        self._wire += wire
        if rendered is None:
            rendered = renderer.render(self._wire, tools=tools, add_generation_prompt=True)
            assert rendered.token_ids[:known] == self.ids, "a rollout of this conversation would be two samples"
        bodies = zip(rendered.token_ids[known:], rendered.is_content[known:], strict=True)
        echoed = self.echoed and new[-1].role == "tool"
        self.labels += [token if echoed and body else -100 for token, body in bodies]
        self._heard.append(new[-1].content)
        text, learnt = self.by.demonstrate(self._heard, self._said, self.right, self.rng)
        self._said.append(text)
        self._completion = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        self.ids = rendered.token_ids + self._completion
        self.labels += self._completion if learnt else [-100] * len(self._completion)
        reply = parse(self._completion, renderer, tools)
        self._wire.append(message_to_wire(reply))
        return reply


class Batched:
    """A `prl.engines.sampler.Sampler` of a model in this process: requests that wait together are one batch."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, renderer: Any, *, temperature: float
    ):
        self.model, self.tokenizer, self.renderer = model, tokenizer, renderer
        self.temperature = temperature
        self.pool = SimpleNamespace(model="")
        self.version = 0
        self.pictures = None
        self._waiting: list[tuple[list[int], asyncio.Future]] = []

    def limited(self, max_tokens: int) -> "Batched":
        """Itself: what it says is short."""
        return self

    async def complete(self, prompt: ModelInput, *, n: int, key: str, **_: object) -> list[Completion]:
        """One continuation of a prompt without pictures; `n` and `key` are the engine's."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_later(0.05, self._answer)
        self._waiting.append((prompt.token_ids, loop.create_future()))
        return [await self._waiting[-1][1]]

    @torch.no_grad()
    def _answer(self) -> None:
        waiting, self._waiting = self._waiting, []
        batch = self.tokenizer.pad({"input_ids": [ids for ids, _ in waiting]}, return_tensors="pt")
        how = {"do_sample": True, "temperature": self.temperature, "top_k": 0} if self.temperature else {}
        output = self.model.generate(**batch, max_new_tokens=MAX_NEW_TOKENS, **{"do_sample": False} | how)
        stops = set(self.renderer.get_stop_token_ids())
        for row, (_, future) in zip(output[:, batch["input_ids"].shape[1] :].tolist(), waiting, strict=True):
            end = next((index + 1 for index, token in enumerate(row) if token in stops), None)
            future.set_result(Completion(row[:end], [0.0] * len(row[:end]), "length" if end is None else "stop"))


def play(env: str, sampler: Batched, *, tasks: int) -> list[Rollout]:
    """A rollout of each of the first `tasks` of the env's evaluation split; from the start again where it has fewer."""
    environment = load(env, eval_tasks=tasks)
    drawn = itertools.islice(itertools.cycle(environment.eval_tasks), tasks)

    async def episode(index: int, task: Task) -> list[Rollout]:
        return await environment.play(task, 1, sampler, group_id=index, held_out=True)

    async def episodes() -> list[list[Rollout]]:
        async with environment.serving():
            return await asyncio.gather(*(episode(index, task) for index, task in enumerate(drawn)))

    return [rollout for group in asyncio.run(episodes()) for rollout in group]


def rewards(rollouts: list[Rollout]) -> list[float]:
    """Their rewards; what failed, of a call that cannot be read, has none and counts 0."""
    return [0.0 if rollout.error else rollout.reward for rollout in rollouts]
