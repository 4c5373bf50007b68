"""The rehearsal of a dry run: an invented group of each env through its algorithm, and what comes of it through the
trainer.

The models are invented too: one that gives every token the same logprob in place of those that are asked, and in
the trainer a random one of one layer, with the policy's vocabulary: no weights are loaded. What an algorithm, a loss or
the trainer's options would raise at the first step is a refusal here.
"""

import asyncio
import contextlib
import math
import tempfile
from collections.abc import Awaitable, Callable, Iterator

import torch
import verifiers.v1 as vf
from transformers import LlamaConfig, LlamaForCausalLM
from verifiers.v1 import graph
from verifiers.v1.dialects.chat import message_to_wire

from prl.base.errors import ConfigError, PrlError
from prl.base.user_code import contained
from prl.config.model_folder import embedding_rows
from prl.config.model_reference import POLICY
from prl.engines.renderer import UnrenderablePrompt, render_prompt
from prl.engines.replies import Completion
from prl.engines.scripted import LOGPROB, Scripted
from prl.envs._verifiers_internals import BUILD
from prl.envs.turn import AGENT, commit, opening_messages, trace_task
from prl.launch.builder import PreparedRun, train_env, trainer_of
from prl.orchestrator.dispatcher import play_and_credit
from prl.orchestrator.state import load_components
from prl.orchestrator.types import Group, TrainEnv
from prl.rollouts.messages import StepBatch, TrainingSample
from prl.rollouts.packing import pack
from prl.rollouts.rollout import Rollout
from prl.trainer.worker import make_trainer

WIDTH = 16
"""Width of the trainer's invented model."""


def rehearse(run: PreparedRun) -> None:
    """Play what a first step is made of. Raises ConfigError, naming the key, for what it would end with."""
    config = run.config
    envs = [train_env(run, name, Scripted(), lambda _: Scripted()) for name in config.envs]
    if run.resume is not None and run.resume.state is not None:
        load_components(envs, run.resume.state.components)
    samples: list[TrainingSample] = []
    for env in envs:
        where = config.node_of(env.name, "algo")[0]
        with refused(where, "an invented group"):
            samples += asyncio.run(credited(env, where))
    with refused("trainer", "an invented batch"), tempfile.TemporaryDirectory() as folder:
        train(run, samples, folder)


@contextlib.contextmanager
def refused(where: str, what: str) -> Iterator[None]:
    """`contained`, in which what would end a run is a refusal too."""
    try:
        with contained(where, what):
            yield
    except ConfigError:
        raise
    except PrlError as error:
        raise ConfigError(f"{where}: {what} failed: {error}") from error


async def credited(env: TrainEnv, where: str) -> list[TrainingSample]:
    """The samples of a group of the env's first task, with rewards 0 and 1, after the algorithm's hooks."""
    rollouts = invented_rollouts(env)

    async def play(arrived: Callable[[Rollout], Awaitable[None]]) -> list[Rollout]:
        for rollout in rollouts:
            await arrived(rollout)
        return rollouts

    def send(group: Group, rollout: Rollout) -> None:
        group.sent.append((rollout.index, rollout.agent.name))

    await env.algorithm.start()
    await play_and_credit(Group(0, env, math.inf, env.environment.tasks[0]), play, send)
    active = [rollout for rollout in rollouts if rollout.is_active]
    if not active:
        raise ConfigError(f"{where}: an invented group failed: {rollouts[0].error}")
    env.algorithm.finalize_batch([active])
    return [sample for rollout in active for sample in rollout.samples]


def invented_rollouts(env: TrainEnv) -> list[Rollout]:
    """Rollouts of the env's first task, each with a reply of a few tokens."""
    task, sampler = env.environment.tasks[0], env.sampler
    renderer, version = sampler.renderer, 0 if env.algorithm.sampling.source == POLICY else None
    messages = opening_messages(task.data)
    try:
        rendered = render_prompt(renderer, [message_to_wire(message) for message in messages])
    except UnrenderablePrompt:  # the env adds what is missing
        messages = [vf.UserMessage(content="?")]
        rendered = render_prompt(renderer, [message_to_wire(message) for message in messages])
    rollouts = []
    for index in range(env.group_size):
        trace = vf.Trace(task=trace_task(task), agent=AGENT, verifiers=BUILD)
        reply = rendered.token_ids[-1:] * (1 + index % 2) + renderer.get_stop_token_ids()[:1]
        completion = Completion(reply, [] if version is None else [LOGPROB] * len(reply), "stop", version, version)
        commit(graph.prepare_turn(trace, messages), rendered, completion, sampler, vf.TimeSpan(start=0.0, end=1.0))
        trace.record_reward("invented", index % 2)
        rollout = Rollout(
            trace,
            env_name=env.name,
            group_id=0,
            start_version=version,
            temperature=sampler.temperature,
            index=index,
        )
        rollout.attach_samples()
        rollouts.append(rollout)
    return rollouts


def train(run: PreparedRun, samples: list[TrainingSample], folder: str) -> None:
    """Take the updates of a batch on the CPU, with the trainer's options, in an invented model in `folder`."""
    options = run.config.trainer
    tokens = 1 + max(token for sample in samples for token in sample.token_ids)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=max(tokens, embedding_rows(run.plan.trainer.model.path) or 0),
            hidden_size=WIDTH,
            intermediate_size=WIDTH,
            num_hidden_layers=1,
            num_attention_heads=1,
            max_position_embeddings=options.seq_len,
        )
    ).save_pretrained(folder)
    payload = dict(trainer_of(run).payload)
    payload["model"] = payload["model"] | {"path": folder, "dtype": "float32", "lora": {}, "freeze": []}
    invented = {"device": "cpu", "dtype": "float32", "compile": False, "cpu_offload": False, "optim": None}
    payload["trainer"] = payload["trainer"] | invented
    trainer = make_trainer(payload, torch.device("cpu"))
    for sample in samples:
        sample.pictures = None  # the invented model sees none
    rows, truncated = pack(samples, options.seq_len, 1, options.updates_per_batch)
    metrics = trainer.train_step(StepBatch(1, rows[0], truncated, False))
    if not math.isfinite(metrics["loss/mean"]):
        raise ConfigError(f"loss: an invented batch has a loss of {metrics['loss/mean']}")
