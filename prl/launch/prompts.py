"""Refusals of tasks and warnings before a start: their prompts and demonstrations, once rendered."""

import inspect
import json
import warnings
from collections.abc import Mapping
from typing import Any

import verifiers.v1 as vf
from renderers.base import Renderer
from verifiers.v1.dialects.chat import message_to_wire

from prl.algorithms.base import Algorithm
from prl.algorithms.opsd import OPSDAlgorithm
from prl.base.errors import ConfigError
from prl.base.text import as_message, in_one_line
from prl.config.model_reference import DEMONSTRATIONS
from prl.engines.chat import Answer, Dialogue, UnusableReply, as_completion, check_template, replies_in
from prl.engines.renderer import UnrenderablePrompt, render_prompt
from prl.engines.template_check import calls_and_answers, losses_of_prompt
from prl.envs.environment import Environment, reason_ungraded
from prl.envs.turn import declared_tools, opening_messages
from prl.rollouts.images import digest_in, digests_in
from prl.rollouts.pictures import PictureStore

CHECKED = 16
"""First tasks of an env that are rendered; behind them the first of each other sequence of roles, as many at most."""


def checked_prompts(
    environment: Environment, renderer: Renderer, where: str, max_model_len: int, algorithm: Algorithm | None = None
) -> list[list[int]]:
    """Return the prompts of some tasks as tokens (`rendered_prompts`), once env, pictures and renderer fit together."""
    environment.check_renderer(renderer)
    check_pictures(environment, renderer, max_model_len, algorithm)
    return rendered_prompts(environment, renderer, where)


def rendered_prompts(environment: Environment, renderer: Renderer, where: str) -> list[list[int]]:
    """Return the prompts of some tasks as tokens; none where an env makes its own, or verifiers' harness renders them.

    Raises ConfigError, with the renderer's config key `where`, if none can be rendered or a message is left out. Warns
    of those that cannot be rendered, which fail their group, and of messages that come out changed.
    """
    prompts: list[list[int]] = []
    refused: list[str] = []
    changed: list[str] = []
    called = False
    for task in [] if environment.uses_harness else tasks_to_check(environment.tasks):
        messages = [message_to_wire(message) for message in opening_messages(task.data)]
        if not messages:
            continue
        callable_tools = environment.tools.joined(task.toolsets(task.config)).wire
        tools = callable_tools or declared_tools(task.data)
        of_task = f"task {task.key} of env {environment.name!r}"
        try:
            losses = list(losses_of_prompt(renderer, messages, tools))
            prompts.append(list(render_prompt(renderer, messages, tools).token_ids))
        except UnrenderablePrompt as error:
            if environment.verifiers_env is None:  # else the env may add the messages that are missing
                refused.append(f"{of_task}: {error}")
            continue
        # Once: all tasks are rendered by one template.
        if callable_tools and not called:
            called = True
            changed += [f"{of_task}: {what}" for what in lost_after_a_call(renderer, messages, callable_tools)]
        for loss in losses:
            if loss.left_out:
                raise ConfigError(
                    f"{where}: {of_task}: {loss.what}: choose a model or {where}.name=<name> that takes it, "
                    "or leave it out of the tasks"
                )
            changed.append(f"{of_task}: {loss.what}")
    if refused and not prompts:
        raise ConfigError(f"{where}: {refused[0]}; or choose another with {where}.name=<name>")
    for what in (refused, changed):
        if what:
            warnings.warn(f"{what[0]} (so with {len(what)} of the prompts that were rendered)", stacklevel=2)
    return prompts


def lost_after_a_call(renderer: Renderer, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[str]:
    """Return what a prompt loses of the model's own call of a tool and of its answer, a sentence each."""
    refusals = []
    for count, what in ((2, "two calls in a reply"), (1, "call of a tool")):  # some templates take one alone
        called = calls_and_answers(tools[0], count)
        try:
            losses = list(losses_of_prompt(renderer, [*messages, *called], tools, first=len(messages)))
        except UnrenderablePrompt as error:
            refusals.append(f"the chat template takes no {what}: {error}")
        else:
            return [*refusals, *(f"once a tool has been called, {loss.what}" for loss in losses)]
    return refusals[1:]


def tasks_to_check(tasks: list[vf.Task]) -> list[vf.Task]:
    """Return the first tasks, and the first of each other sequence of roles: a template may refuse one or drop it."""
    first, others = tasks[:CHECKED], tasks[CHECKED:]
    by_roles: dict[tuple[str, ...], vf.Task] = {}
    for task in others:
        by_roles.setdefault(roles_of(task), task)
    for task in first:
        by_roles.pop(roles_of(task), None)
    return [*first, *list(by_roles.values())[:CHECKED]]


def roles_of(task: vf.Task) -> tuple[str, ...]:
    """Return the roles of the messages that a task's conversation starts with."""
    prompt, system = task.data.prompt, task.data.system_prompt
    roles = ("user",) if isinstance(prompt, str) else tuple(message.role for message in prompt or [])
    return roles if system is None else ("system", *roles)


def check_trained(
    keys: Mapping[str, str],
    group_size: int,
    algorithm: Algorithm,
    environment: Environment,
    renderer: Renderer,
) -> None:
    """Refuse tasks that an algorithm cannot learn from: ungraded, or without the demonstrations that it plays or shows.

    Args:
        keys: The config keys of the env's algorithm (`algo`), renderer and `group_size`.
        group_size: The rollouts of a group.
        algorithm: The env's algorithm.
        environment: The env.
        renderer: The env's renderer.
    """
    check_graded(algorithm, environment)
    check_demonstrations(keys, group_size, algorithm, environment, renderer)
    check_shown(keys["algo"], algorithm, environment)


def check_demonstrations(
    keys: Mapping[str, str],
    group_size: int,
    algorithm: Algorithm,
    environment: Environment,
    renderer: Renderer,
) -> None:
    """Refuse tasks without a demonstration where those are to be played, and a renderer that cannot render them.

    The arguments are those of `check_trained`.
    """
    if algorithm.sampling.source != DEMONSTRATIONS:
        return
    env, key = environment.name, algorithm.sampling.demo_key
    where = f"{keys['algo']}.sampling.source=demonstrations"
    if environment.uses_harness:
        raise ConfigError(f"{where}: env {env!r} is played by verifiers' harness, which asks a model server")
    check_template(renderer, f"{keys['renderer']}.name")
    checked = {id(task) for task in tasks_to_check(environment.tasks)}
    for task in environment.tasks:
        try:
            replies = replies_in(task.data, key)
        except ValueError as error:
            raise ConfigError(
                f"{where}: task {task.key} of env {env!r}: its field {error}; demo_key names it"
            ) from error
        if id(task) in checked:
            check_replies(renderer, task, replies, f"{where}: task {task.key} of env {env!r}")
        if len(replies) > 1 and environment.verifiers_env is None:
            raise ConfigError(
                f"{where}: task {task.key} of env {env!r} has {len(replies)} replies, and the env asks for one: make a "
                "task of each, with the messages before it as its prompt"
            )
    if group_size > 1:
        warnings.warn(
            f"env {env!r}: the {group_size} rollouts of a group are the same demonstration: set {keys['group_size']}=1",
            stacklevel=2,
        )


def check_graded(algorithm: Algorithm, environment: Environment) -> None:
    """Refuse tasks that nothing can grade to an algorithm that trains on rewards."""
    reason = next(filter(None, map(reason_ungraded, environment.tasks)), None)
    if reason is not None and algorithm.reads_reward:
        raise ConfigError(
            f"envs.{environment.name}.args: {reason}: name the key of the answer (args.answer_key), give a function as "
            "args.grader, choose env=judge, or imitate demonstrations (algo=sft algo.sampling.source=demonstrations)"
        )


def as_read(environment: Environment) -> str:
    """Return the first task of an env as it was read: a line each for messages, demonstration, answer and tools."""
    data = environment.tasks[0].data
    messages = [message_to_wire(message) for message in opening_messages(data)]
    store = environment.pictures
    parts = [(message["role"], _text_of(message, store)) for message in messages]
    try:
        parts += [("demonstration", _text_of(reply, store)) for reply in replies_in(data, "demonstration")]
    except ValueError:
        parts.append(("demonstration", "none"))
    tools = ", ".join(tool["function"]["name"] for tool in declared_tools(data) or [])
    parts += [("answer", getattr(data, "answer", None) or "none"), ("tools", tools or "none")]
    lines = [f"  {name}: {as_message(in_one_line(str(value)))}" for name, value in parts]
    return "\n".join([f"env {environment.name}, its first task as it was read:", *lines])


def _text_of(message: dict[str, Any], store: PictureStore | None) -> str:
    """Return what a message says, shows and calls."""
    calls, content = message.get("tool_calls"), message["content"] or ""
    if isinstance(content, list):
        content = " ".join(_words_of(part, store) for part in content)
    return " ".join([str(content), *([json.dumps(calls, ensure_ascii=False)] if calls else [])])


def _words_of(part: dict[str, Any], store: PictureStore | None) -> str:
    digest = digest_in(part)
    if digest is None or store is None:
        return str(part.get("text", ""))
    return "[picture {}, {}x{} pixels]".format(digest[:12], *store.sizes[digest])


def check_shown(where: str, algorithm: Algorithm, environment: Environment) -> None:
    """Refuse `opsd`, whose key is `where`, if no task has a demonstration to show, unless the env may write one while
    it plays."""
    if not isinstance(algorithm, OPSDAlgorithm) or type(algorithm).score_rollout is not OPSDAlgorithm.score_rollout:
        return  # a subclass may show something else
    key, tasks = algorithm.demo_key, environment.tasks
    without = [task for task in tasks if not getattr(task.data, key, None)]
    if not without:
        return
    of_all = f"{len(without)} of {len(tasks)} tasks of env {environment.name!r}"
    what = f"{where}.demo_key={key}: {of_all} have nothing in this field"
    if len(without) == len(tasks) and environment.verifiers_env is None and not mentions_info(tasks[0]):
        raise ConfigError(f"{what}: name the field with their demonstrations (of env=jsonl: args.demonstration_key)")
    warnings.warn(f"{what}: their rollouts fail, unless the env writes trace.info[{key!r}]", stacklevel=2)


def mentions_info(task: vf.Task) -> bool:
    """Return whether the module of a task may write into `trace.info`: it mentions it, or has no source."""
    try:
        return ".info" in inspect.getsource(inspect.getmodule(type(task)) or type(task))
    except (OSError, TypeError):
        return True


def check_replies(renderer: Renderer, task: vf.Task, replies: list[dict[str, Any]], where: str) -> None:
    """Raise ConfigError if a reply of a task's demonstration would not be trained whole."""
    opening, question = opening_messages(task.data), [{"role": "user", "content": "?"}]
    try:
        for number, reply in enumerate(replies):  # what comes between two of them, the env knows alone
            dialogue = Dialogue(question if number or not opening else opening, declared_tools(task.data), task.data)
            as_completion(renderer, dialogue, Answer(reply), max_tokens=1 << 30)
    except (UnusableReply, UnrenderablePrompt) as error:
        raise ConfigError(f"{where}: {error}") from error


def check_pictures(
    environment: Environment, renderer: Renderer, max_model_len: int, algorithm: Algorithm | None = None
) -> None:
    """Refuse pictures that leave no room in the longest sequence, and any where an env or an algorithm takes none."""
    store = environment.pictures
    if store is None:
        return
    for task in (*environment.tasks, *environment.eval_tasks):
        digests = pictures_of(task)
        if not digests:
            continue
        place = getattr(task.data, "_place", "") or f"task {task.key}"
        where = f"envs.{environment.name}.args: {place}"
        if environment.uses_harness:
            raise ConfigError(f"{where} has pictures, and verifiers' harness, which plays this env, shows none")
        scorers = (algorithm, getattr(algorithm, "kl", None))
        if any(getattr(scorer, "align", None) for scorer in scorers):
            raise ConfigError(f"{where} has pictures, and algo.align=text compares texts alone")
        processor = getattr(renderer, "pictures", None)
        if processor is None:
            raise ConfigError(f"{where} has pictures, and the renderer shows none: choose renderer=default")
        sizes = ", ".join("{}x{}".format(*store.sizes[digest]) for digest in digests)
        try:
            count = processor.count(digests)
        except UnrenderablePrompt as error:
            raise ConfigError(f"{where}: its pictures ({sizes}): {error}: cut them, or leave the row out") from error
        if count >= max_model_len - 1:
            raise ConfigError(
                f"{where}: its pictures ({sizes}) have {count} tokens, and model.max_model_len is {max_model_len}: "
                "raise it, make them smaller, or leave the row out"
            )


def pictures_of(task: vf.Task) -> list[str]:
    """Return the digests of the pictures in a task's prompt, in their order."""
    prompt = task.data.prompt
    listed = [message for message in prompt if isinstance(message.content, list)] if isinstance(prompt, list) else []
    return digests_in([message_to_wire(message) for message in listed])


def check_lengths(model: int, seq_len: int, env: str, prompts: list[list[int]]) -> None:
    """Raise ConfigError where no prompt leaves room for a reply, in the `model`'s longest sequence or in the
    `seq_len` tokens that the trainer reads of it."""
    if not prompts:
        return
    shortest = min(map(len, prompts))
    seen = f"the shortest of the first {len(prompts)} prompts of env {env!r} has {shortest} tokens"
    if shortest >= model - 1:
        raise ConfigError(f"model.max_model_len={model} leaves no room for a reply: {seen}. Raise it")
    if shortest >= seq_len:
        raise ConfigError(
            f"trainer.seq_len={seq_len} cuts every sample before its reply begins: {seen}. Leave trainer.seq_len out: "
            f"it follows model.max_model_len={model}"
        )
