"""Refusals of tasks and warnings before a start: their prompts, once rendered, and their demonstrations."""

import warnings

from renderers.base import Renderer
from verifiers.v1.dialects.chat import message_to_wire

from prl.algorithms.base import Algorithm
from prl.config.model_reference import DEMONSTRATIONS
from prl.config.schema import TrainConfig
from prl.engines.chat import check_template, replies_in
from prl.engines.renderer import UnrenderablePrompt, render_prompt
from prl.engines.template_check import left_out
from prl.envs.environment import Environment
from prl.envs.turn import opening_messages
from prl.errors import ConfigError

CHECKED = 16
"""About so many tasks of an env are rendered, evenly spread over them."""


def check_prompts(environment: Environment, renderer: Renderer, where: str) -> None:
    """Render the prompts of some tasks; not where an env makes its own, or verifiers' harness renders them.

    Raises ConfigError, with the renderer's config key `where`, if none can be rendered or a message is left out. Warns
    of those that cannot be rendered, which fail their group.
    """
    if environment.uses_harness:
        return
    rendered = 0
    refused: list[str] = []
    for task in environment.tasks[:: max(1, len(environment.tasks) // CHECKED)]:
        messages = [message_to_wire(message) for message in opening_messages(task.data)]
        if not messages:
            continue
        tools = environment.tools.joined(task.toolsets(task.config)).wire
        of_task = f"task {task.key} of env {environment.name!r}"
        try:
            lost = next(left_out(renderer, messages, tools), None)
            render_prompt(renderer, messages, tools)
            rendered += 1
        except UnrenderablePrompt as error:
            if environment.verifiers_env is None:  # else the env may add the messages that are missing
                refused.append(f"{of_task}: {error}")
            continue
        if lost is not None:
            raise ConfigError(
                f"{where}: {of_task}: the chat template leaves out {lost}: choose a model or {where}.name=<name> that "
                "takes it, or leave it out of the tasks"
            )
    if refused and not rendered:
        raise ConfigError(f"{where}: {refused[0]}; or choose another with {where}.name=<name>")
    if refused:
        warnings.warn(f"{refused[0]} (so with {len(refused)} of {len(refused) + rendered} prompts)", stacklevel=2)


def check_demonstrations(
    config: TrainConfig, algorithm: Algorithm, environment: Environment, renderer: Renderer
) -> None:
    """Refuse tasks without a demonstration where those are to be played, and a renderer that cannot render them."""
    if algorithm.sampling.source != DEMONSTRATIONS:
        return
    env, key = environment.name, algorithm.sampling.demo_key
    where = f"{config.node_of(env, 'algo')[0]}.sampling.source=demonstrations"
    if environment.uses_harness:
        raise ConfigError(f"{where}: env {env!r} is played by verifiers' harness, which asks a model server")
    check_template(renderer, f"{config.node_of(env, 'renderer')[0]}.name")
    for task in environment.tasks:
        try:
            replies = replies_in(task.data, key)
        except ValueError as error:
            raise ConfigError(
                f"{where}: task {task.key} of env {env!r}: its field {error}; demo_key names it"
            ) from error
        if len(replies) > 1 and environment.verifiers_env is None:
            raise ConfigError(
                f"{where}: task {task.key} of env {env!r} has {len(replies)} replies, and the env asks for one: make a "
                "task of each, with the messages before it as its prompt"
            )
