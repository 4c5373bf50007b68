"""Look at an env before training on it: load its tasks, play one episode with replies that are given, show the reward.

    python -m prl.tools.env_check check math
    python -m prl.tools.env_check check calculator args.operands=2 --reply '<tool_call>…</tool_call>' --reply 46
    python -m prl.tools.env_check check my_spelling 'args.words=[arm, tide]'

The episode is played by the code that plays it in a run; there is no engine.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import re
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from prl.base.errors import PrlError, of_own_code
from prl.base.terminal import Console
from prl.base.text import as_message, safe
from prl.config.compose import compose, options
from prl.config.model_folder import check_model
from prl.config.model_reference import POLICY
from prl.config.run_yaml import quoted
from prl.config.schema import EnvConfig, TrainConfig
from prl.engines.replies import Completion
from prl.launch.children import leave_none
from prl.launch.command import FULL_ERROR, REFUSED, one_line, stopped
from prl.monitors.log import Harmless
from prl.rollouts.inputs import ModelInput

ROOM = 1 << 20
"""Tokens of an episode: more than any has, since no model has to read them."""
NAME = "check"
"""Name of the run, and of an env that is a taskset without a conf file."""
VERDICT = "Score: 10"
"""Reply of a judge that nothing else is given for."""
HELD_OUT = 100_000
"""Held-out tasks that are counted."""


class Script:
    """In place of a model: says the replies one after the other, to whoever asks, then the last one again and again."""

    model, version, cache_salt = "script", None, None

    def __init__(self, replies: list[str], tokenizer: Any, end: int):
        """`end` is the token that ends a turn."""
        self.texts, self.asked = replies, 0
        self.replies = [[*tokenizer.encode(text, add_special_tokens=False), end] for text in replies]
        self.prompts: list[list[int]] = []

    def next(self) -> int:
        """Return the number of the next reply."""
        self.asked += 1
        return min(self.asked, len(self.replies)) - 1

    async def generate(self, prompt: ModelInput, sampling: dict[str, Any], *, n: int = 1, **_: Any) -> list[Completion]:
        self.prompts.append(prompt.token_ids)
        return [Completion(self.replies[self.next()], [], "stop")] * n


@contextlib.asynccontextmanager
async def served(player: Script, judge: Script) -> AsyncIterator[str]:
    """Serve the scripts, of the policy to verifiers' harness and of a judge to verifiers' judges; yields the URL."""
    from aiohttp import web

    async def generate(request: web.Request) -> web.Response:
        [reply] = await player.generate(ModelInput((await request.json())["token_ids"]), {})
        content = [{"token": f"token_id:{token}", "logprob": 0.0} for token in reply.token_ids]
        choice = {"token_ids": reply.token_ids, "logprobs": {"content": content}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice]})

    async def chat(_: web.Request) -> web.Response:
        message = {"role": "assistant", "content": judge.texts[judge.next()]}
        about = {"id": "", "object": "chat.completion", "created": 0, "model": judge.model}
        return web.json_response(about | {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    app = web.Application(client_max_size=1 << 30)
    app.add_routes([web.post("/inference/v1/generate", generate), web.post("/v1/chat/completions", chat)])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def replies_for(task: Any, given: list[str] | None) -> tuple[str, list[str]]:
    """Return what the replies are, for the reader, and the replies: as `given`, else what the task itself offers."""
    if given:
        return "as given", given
    from prl.engines.chat import replies_in  # verifiers comes with it

    for key in ("answer", "demonstration"):
        with contextlib.suppress(ValueError):
            return f"the task's {key} (others: --reply TEXT)", [each["content"] for each in replies_in(task.data, key)]
    return "'?', since the task has no answer (others: --reply TEXT)", ["?"]


def config_of(env: str, overrides: list[str]) -> tuple[str, TrainConfig]:
    """Return the name of the env in the config, and the config; `env` is an option of the group or a taskset.

    Overrides whose key begins with a key of an env, as `args.path=…`, are that env's; others are the run's.
    """
    keys = {each.name for each in fields(EnvConfig)}
    typed = [override.lstrip("+") for override in overrides]
    own = [override for override in typed if re.split("[.=]", override)[0] in keys]
    runs = [f"run.name={NAME}", *(each for each in overrides if each.lstrip("+") not in own)]
    searched = any(each.startswith("hydra.searchpath=") for each in runs)  # it may have options unknown here
    is_option = env in options()["env"] or (searched and "." not in env)
    name = env if is_option else NAME
    chosen = [f"env={env}"] if is_option else ["env=[]", f"+envs.{NAME}.taskset={quoted(env)}"]
    return name, compose([*runs, *chosen, *(f"++envs.{name}.{override}" for override in own)])


def check(
    env: str, overrides: list[str], replies: list[str] | None, verdicts: list[str] | None, console: Console
) -> str | None:
    """Load an env and play an episode of it; return what was wrong with the episode, None if nothing was.

    The env's models and judges say `verdicts`, except a model with an address, which is asked where there are none.
    Raises ConfigError where the env cannot be loaded.
    """
    name, config = config_of(env, overrides)
    check_model(config.model.path, "model.path")
    from prl.engines.sampler import Sampler
    from prl.engines.tokenizers import load_tokenizer
    from prl.envs.environment import Environment  # verifiers, once the config has composed
    from prl.launch.components import picture_store, renderer_of
    from prl.launch.prompts import as_read, checked_prompts
    from prl.rollouts.records import record
    from prl.tools.rollouts.render import rollout as shown

    asked = config.envs[name].references
    pictures = picture_store(config.model, None)
    # What has no address is played by the judge's script, and so is all where verdicts are given.
    scripted = {role: POLICY for role, model in asked.items() if verdicts or not getattr(model, "base_url", None)}
    own = replace(config.envs[name], models=config.envs[name].models | scripted)
    environment = Environment(name, own, eval_tasks=HELD_OUT, pictures=pictures)
    tokenizer = load_tokenizer(config.model.path, "model.path", config.model.trust_remote_code)
    where, node = config.node_of(name, "renderer")
    renderer = renderer_of(where, node, config.model, tokenizer, pictures)
    checked_prompts(environment, renderer, where, config.model.max_model_len)
    held_out = f"{len(environment.eval_tasks)} held-out tasks" if environment.eval_tasks else "no held-out tasks"
    say(console, f"env {name}: {len(environment.tasks)} tasks, {held_out}")
    say(console, as_read(environment))
    task, end = environment.tasks[0], renderer.get_stop_token_ids()[0]
    whose, texts = replies_for(task, replies)
    script, judge, sampler = Script(texts, tokenizer, end), Script(verdicts or [VERDICT], tokenizer, end), Sampler()
    live = {"pool": script, "renderer": renderer, "tokenizer_path": config.model.path}
    sampler.attach(**live, max_model_len=ROOM, seed=config.seed)
    with showing_prints(console):
        rollouts = asyncio.run(play(environment, task, sampler, judge))
    for prompt in script.prompts[:1]:
        text = tokenizer.decode(prompt)
        say(console, f"\nfirst prompt, {len(prompt)} tokens, in the template of {config.model.path}:\n{text}")
    say(console, f"\nreplies: {whose}")
    for rollout in rollouts:
        say(console, f"\n{shown(record(rollout, 0), 'no model')}")
    failed = next((rollout for rollout in rollouts if rollout.failed), None)
    if failed is None:
        return None
    return "\n".join([f"the episode failed: {failed.error}", *(e.traceback or "" for e in failed.trace.errors[:1])])


@contextlib.contextmanager
def showing_prints(console: Console) -> Iterator[None]:
    """Show what graders print, which run in processes of their own, while the block lasts."""
    printed = logging.getLogger("prl.envs.workers")
    printed.setLevel(logging.INFO)
    handler = logging.StreamHandler(console.file)
    handler.setFormatter(Harmless())
    printed.addHandler(handler)
    try:
        yield
    finally:
        printed.removeHandler(handler)


async def play(environment: Any, task: Any, sampler: Any, judge: Script) -> list[Any]:
    """Return the rollouts of one episode."""
    from verifiers.v1 import JudgeConfig

    from prl.engines.frozen import clients_of

    environment.connect(sampler.changed({"pool": judge}), clients_of({}, environment.pictures))
    async with served(sampler.pool, judge) as url:
        sampler.pool.http = SimpleNamespace(token=None, address=lambda _: url)
        # verifiers' judges ask over HTTP: they get the script's address, and a key that nobody has set.
        for config in (*task.config.judges, *vars(task.config).values()):
            if isinstance(config, JudgeConfig):
                config.base_url, config.api_key_var = f"{url}/v1", "PRL_NO_KEY"
        async with environment.serving():
            return list(await environment.play(task, 1, sampler, group_id=0))


def say(console: Console, text: str) -> None:
    """Print text as it is, without what a terminal would obey."""
    console.print(safe(text), markup=False, highlight=False, soft_wrap=True)


def main() -> None:
    """Run the command; exit with status 2 where the env cannot be loaded or its episode fails."""
    parser = argparse.ArgumentParser(prog="prl env", description="Look at an env before training on it.")
    commands = parser.add_subparsers(required=True, metavar="check")
    checking = commands.add_parser("check", help="load the tasks, play one episode without a model, show the reward")
    checking.add_argument("env", help="an option of the group env, or a taskset: a module, or an installed id")
    checking.add_argument("overrides", nargs="*", metavar="key=value", help="of the env, as args.path=…, or the run's")
    checking.add_argument("--reply", action="append", metavar="TEXT", help="what the model says; again for later turns")
    checking.add_argument(
        "--judge", action="append", metavar="TEXT", help=f"what a judge says, and any model of the env's ({VERDICT!r})"
    )
    given = parser.parse_args()
    try:
        problem = check(given.env, given.overrides, given.reply, given.judge, Console())
    except KeyboardInterrupt as end:
        raise stopped(end) from None
    except (PrlError, HydraException, OmegaConfBaseException) as error:
        problem = one_line(error)
    except Exception as error:  # of a chat template, say, that takes the prompt and not the reply
        if FULL_ERROR in os.environ:
            raise
        problem = of_own_code(error)
    if problem is not None:
        print(f"error: {as_message(problem)}", file=sys.stderr)
        raise SystemExit(REFUSED)


if __name__ == "__main__":
    leave_none()
    main()
