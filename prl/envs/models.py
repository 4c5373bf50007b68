"""The models that an env's code asks, by role: `envs.<name>.models`.

    score = await model_of(task, "judge").ask("Is this right? …")

A reward function of a task asks with `self` for the task; so does the `run` of a multi-turn env.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire

from prl.base.errors import DeadlinePassed, EngineError
from prl.config.model_reference import POLICY
from prl.engines.base import Connect
from prl.engines.frozen import FrozenPool, ReferencePool
from prl.engines.renderer import input_of, render_prompt
from prl.engines.sampler import Sampler
from prl.envs.turn import has_pictures, messages_of, parse

MODELS = "_prl_models"
"""Attribute of the tasks of an env with models; a copy of a task has it as well."""


@dataclass
class EnvModel:
    """A model that an env's code asks: the live policy, or a frozen one."""

    sampler: Sampler
    """Asks the policy, or a frozen model in this process, which take tokens."""
    frozen: ReferencePool | None = None
    """The client of a frozen model; None for the policy."""

    async def ask(
        self,
        messages: str | list[dict[str, Any]],
        *,
        temperature: float = 0.0,
        max_tokens: int = 512,
        whole: bool = True,
    ) -> str:
        """Return the model's reply to messages in OpenAI's format, or to a text as the user's only one.

        A frozen model that is away is waited for, for its `timeout_s`. Raises EngineError where there is no reply, or
        one that is to be `whole` and was cut at `max_tokens` or by a filter; OverlongPrompt where the policy has no
        room for it.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if has_pictures(messages):
            messages = [message_to_wire(message) for message in messages_of(messages, self.sampler.pictures)]
        if isinstance(self.frozen, FrozenPool):
            body = {"messages": messages, "temperature": temperature, "max_tokens": max_tokens}
            try:
                text, reason = await self.frozen.chat(body, _content, waits=True)
            except DeadlinePassed as error:  # a TimeoutError, which verifiers would take for the scoring's own
                raise EngineError(str(error)) from error
            return _checked(text, reason, whole)
        sampler = self.sampler.changed({"temperature": temperature, "max_tokens": max_tokens})
        prompt = input_of(render_prompt(sampler.renderer, messages))
        [completion] = await sampler.complete(prompt, n=1, key=f"asked/{prompt.keys}")
        text = str(parse(completion.token_ids, sampler.renderer, prompt_ids=prompt.token_ids).content or "")
        return _checked(text, completion.finish_reason, whole)

    async def wait_ready(self) -> None:
        """Wait until a frozen model answers. Raises DeadlinePassed, with its endpoint."""
        if self.frozen is not None:
            await self.frozen.wait_ready(self.frozen.timeout_s)

    async def close(self) -> None:
        """Close the client of a frozen model."""
        if self.frozen is not None:
            await self.frozen.close()


def _checked(text: str, reason: Any, whole: bool) -> str:
    if whole and reason not in ("stop", None):
        ended = "was cut at its longest length" if reason == "length" else f"was ended by {reason!r}"
        raise EngineError(f"a reply {ended}: {text[-200:]!r}")
    return text


def _content(reply: dict[str, Any]) -> tuple[str, Any]:
    """Return the text of a reply and why it ended."""
    choice = reply["choices"][0]
    content = choice["message"].get("content") or ""
    if not isinstance(content, str):
        raise TypeError("the content of its message is no text")
    return content, choice.get("finish_reason")


def connect_models(references: Mapping[str, Any], policy: Sampler, clients: Connect) -> dict[str, EnvModel]:
    """Make the client of each reference, by role.

    Args:
        references: `policy` or a checked `FrozenModelConfig` each.
        policy: Asks the live policy.
        clients: Makes clients of frozen models.
    """
    models = {}
    for role, reference in references.items():
        if reference == POLICY:
            models[role] = EnvModel(policy)
            continue
        pool = clients(reference)
        models[role] = EnvModel(policy.changed({"pool": pool}), pool)
    return models


def model_of(task: vf.Task, role: str) -> EnvModel:
    """Return the model that a task's env has for a role. Raises LookupError where it has none."""
    models: dict[str, EnvModel] = vars(task).get(MODELS, {})
    if role not in models:
        raise LookupError(f"no model {role!r} to ask: set models.{role} of the env, in a run or an evaluation")
    return models[role]
