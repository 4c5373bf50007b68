"""From a config to the live objects of a run, in three steps: prepare what can be refused, start the servers, assemble.

prepared = prepare(config)                                    tokenizer, tasks, renderers; nothing is started
services = await start_services(prepared, transport, run_dir) engine, trainer, teacher; returns when all are ready
orchestrator = assemble(prepared, services, transport, run_dir)
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from prl.config.instantiate import class_of, factory
from prl.config.model_reference import POLICY, FrozenModel
from prl.config.schema import ModelConfig, TrainConfig
from prl.config.validate import resolve_device
from prl.episodes.environment import Environment
from prl.inference.client import InferencePool
from prl.inference.frozen import FrozenPool
from prl.inference.sampler import Sampler
from prl.launch.components import RunComponents, build_components, check_target
from prl.launch.local import resolve_model
from prl.launch.preflight import check_vocabulary, load_buffers, load_tokenizer, make_renderers, run_token
from prl.orchestrator.orchestrator import Orchestrator
from prl.orchestrator.types import TrainEnv
from prl.wire.transport import Transport

if TYPE_CHECKING:
    from renderers.base import Renderer

    from prl.launch.services import Services


@dataclass
class PreparedRun:
    """Everything of a run that can be refused, made before anything is started."""

    config: TrainConfig
    components: RunComponents
    environments: dict[str, Environment]
    renderers: dict[str, "Renderer"]
    """By env."""
    model: ModelConfig
    """The policy, with its path and number format resolved for this machine."""
    vocab_size: int
    """Tokens in the policy's vocabulary, without padding rows of its embedding."""
    engine_device: str
    trainer_device: str
    token: str
    """What every server of the run wants to be shown."""


def prepare(config: TrainConfig) -> PreparedRun:
    """Build and check the components, load tokenizer and tasks. Raises ConfigError."""
    components = build_components(config)
    class_of(config.orchestrator, Orchestrator, "orchestrator")
    class_of(config.transport, Transport, "transport")
    check_target(config.trainer, "prl.trainer.trainer.Trainer", "trainer")
    check_target(config.trainer.optim, "torch.optim.Optimizer", "trainer.optim")
    tokenizer = load_tokenizer(config.model, "model.path")
    teacher = config.teacher.model
    if components.hosted and teacher is not None:
        check_vocabulary(tokenizer, load_tokenizer(teacher, "teacher.model.path"), config)
    eval_config = config.orchestrator.eval
    count = eval_config.num_tasks if eval_config.every is not None else 0
    environments = {name: Environment(name, env, eval_tasks=count) for name, env in config.envs.items()}
    for name, env in components.envs.items():
        env.algorithm.check_tasks(env.where, environments[name].tasks)
    load_buffers(config, components, environments)
    renderers = make_renderers(config, components, tokenizer)
    for name, environment in environments.items():
        environment.check_renderer(renderers[name])
    engine_device = resolve_device(config.inference.device)
    return PreparedRun(
        config=config,
        components=components,
        environments=environments,
        renderers=renderers,
        model=resolve_model(config.model, engine_device),
        vocab_size=len(tokenizer),
        engine_device=engine_device,
        trainer_device=resolve_device(config.trainer.device),
        token=run_token(config),
    )


def assemble(run: PreparedRun, services: "Services", transport: Transport, run_dir: Path) -> Orchestrator:
    """The orchestrator over the run's servers."""
    config = run.config
    make = factory(config.orchestrator, Orchestrator, "orchestrator")
    return make(
        envs=[train_env(run, name, services.policy, services.hosted) for name in config.envs],
        pool=services.policy,
        transport=transport,
        monitors=run.components.monitors,
        run_dir=run_dir,
        max_steps=config.max_steps,
        seq_len=config.trainer.seq_len,
        trainer_ranks=config.trainer.num_processes,
        update_timeout_s=config.inference.update_timeout_s,
    )


def train_env(run: PreparedRun, name: str, policy: InferencePool, hosted: dict[str, FrozenModel]) -> TrainEnv:
    """One env with its live components; `hosted` are the frozen models that the launcher serves, by name."""
    parts, environment, renderer = run.components.envs[name], run.environments[name], run.renderers[name]
    algorithm = parts.algorithm
    algorithm.attach(policy_pool=policy, renderer=renderer, hosted=hosted)
    attach = partial(
        Sampler.attach,
        renderer=renderer,
        max_model_len=run.config.model.max_model_len,
        seed=run.config.seed,
        tokenizer_path=run.model.path,
        reserve=algorithm.reserve(environment.tasks),
    )
    source = algorithm.sampling.source
    pool: InferencePool | FrozenPool = policy
    if source != POLICY:
        served = hosted.get(source.name) if source.base_url is None else None
        pool = FrozenPool(source if served is None else served, None if served is None else served.token)
    attach(parts.sampler, pool=pool)
    attach(parts.eval_sampler, pool=policy)
    for filters in parts.filters.values():
        for each in filters.values():
            each.attach(vocab_size=run.vocab_size)
    return TrainEnv(
        environment=environment,
        buffer=parts.buffer,
        sampler=parts.sampler,
        eval_sampler=parts.eval_sampler,
        algorithm=algorithm,
        filters=parts.filters,
        group_size=run.config.group_size_of(name)[1],
        loss=parts.loss,
    )
