"""From a config to the live objects of a run: build components, prepare what can be refused, start servers, assemble.

components = build_components(config)                                    an object for each node (components.py)
prepared = prepare(config, components)                                   tokenizer, tasks, renderers
supervisor = supervise(prepared, track)                                  watches their processes
services = await start_services(prepared, supervisor, transport, run_dir)  engine, trainer, teacher, all of them ready
orchestrator = assemble(prepared, services, transport, run_dir)
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from renderers.base import Renderer

from prl.base.errors import ConfigError
from prl.config.build import class_of
from prl.config.model_folder import embedding_rows
from prl.config.model_reference import FrozenModelConfig
from prl.config.schema import ModelConfig, TrainConfig
from prl.engines.base import Connect, Engine
from prl.engines.client import ModelPool, PolicyPool
from prl.engines.sampler import Sampler
from prl.engines.servers import tracks_of
from prl.engines.tokenizers import TokenizerProbe, load_tokenizer
from prl.envs.environment import Environment
from prl.launch import specs
from prl.launch.checks import check_engines, check_loadable, check_rows
from prl.launch.components import RunComponents, check_vocabulary, make_renderers, show_tasks
from prl.launch.local import resolve_model
from prl.launch.prompts import check_demonstrations, check_graded, check_lengths, check_shown, rendered_prompts
from prl.launch.supervisor import Supervisor
from prl.orchestrator.orchestrator import Orchestrator
from prl.orchestrator.state import ResumePoint
from prl.orchestrator.types import TrainEnv
from prl.transport.events import TRAINER, Track
from prl.transport.files import FileTransport


@dataclass
class PreparedRun:
    """Everything of a run that can be refused, made before anything is started."""

    config: TrainConfig
    components: RunComponents
    environments: dict[str, Environment]
    renderers: dict[str, Renderer]
    """By env."""
    model: ModelConfig
    """The policy, with its path and number format resolved for this machine."""
    token: str
    """What every server of the run wants to be shown."""
    probe: TokenizerProbe
    """Of the policy's tokenizer."""
    urls: Sequence[str] = ()
    """Of the policy's engines, where they were started early."""
    resume: ResumePoint | None = None
    """Where the run goes on from; None for a new one."""

    @property
    def first_version(self) -> int:
        """The policy version that the run begins with."""
        return 0 if self.resume is None else self.resume.step


@dataclass
class Services:
    """Clients of the models that run beside the orchestrator."""

    policy: PolicyPool
    """The client of the policy's engines."""
    hosted: dict[str, Connect]
    """What makes clients of the frozen models that are run beside it, by name."""
    teachers: list[ModelPool]
    """Clients that waited for those."""

    async def close(self) -> None:
        for pool in (self.policy, *self.teachers):
            await pool.close()


# --- prepare ----------------------------------------------------------------------------------------------------------


def prepare(config: TrainConfig, components: RunComponents, token: str | None = None) -> PreparedRun:
    """Load tokenizer and tasks, and check them with the components of the config. Raises ConfigError.

    `token` is the one that engines were started with; None = a new one.
    """
    check_engines(config, components.launcher, hosted=bool(components.hosted))
    rows = check_loadable(config.model, "model.", config.engine, trained=True)
    tokenizer = load_tokenizer(config.model.path, "model.path", config.model.trust_remote_code)
    hosted = config.teacher.model
    if components.hosted and hosted is not None:
        check_loadable(hosted, "teacher.model.", config.teacher.engine, trained=False)
        teacher = load_tokenizer(hosted.path, "teacher.model.path", hosted.trust_remote_code)
        check_vocabulary(tokenizer, teacher, config, components)
    count = 0 if config.orchestrator.eval.every is None else config.orchestrator.eval.num_tasks
    played = not config.dry_run
    class_of(config.engine, Engine, "engine")
    place = components.launcher.place_of_worker
    environments = {
        name: Environment(name, env, eval_tasks=count, played=played, place=place) for name, env in config.envs.items()
    }
    show_tasks(config, components, environments, vocab_size=len(tokenizer))  # without padding rows of the embedding
    renderers = make_renderers(config, tokenizer)
    rendered: list[list[int]] = []
    for name, environment in environments.items():
        environment.check_renderer(renderers[name])
        if environment.uses_harness and config.engine.in_process:
            raise ConfigError(f"env {name!r} is played by verifiers' harness, over HTTP: it needs engine=default")
        prompts = rendered_prompts(environment, renderers[name], config.node_of(name, "renderer")[0])
        check_lengths(config, name, prompts)
        rendered += prompts
        if environment.config.weight > 0:
            check_graded(components.envs[name].algorithm, environment)
            check_demonstrations(config, components.envs[name].algorithm, environment, renderers[name])
            check_shown(config, components.envs[name].algorithm, environment)
    check_rows(config.model.path, rows, tokenizer, rendered)
    return PreparedRun(
        config=config,
        components=components,
        environments=environments,
        renderers=renderers,
        model=resolve_model(config.model, config.engine.device_type),
        token=token or specs.run_token(config),
        probe=TokenizerProbe.of(tokenizer, f"the policy ({config.model.path})"),
    )


def task_keys(run: PreparedRun) -> dict[str, dict[str, list[str]]]:
    """verifiers' key of every task, which hashes its data, by env and by `train` or `eval`."""
    keys = {}
    for name, env in run.environments.items():
        splits = {"train": env.tasks, "eval": env.eval_tasks}
        keys[name] = {split: [task.key for task in tasks] for split, tasks in splits.items() if tasks}
    return keys


# --- start ------------------------------------------------------------------------------------------------------------


async def start_services(run: PreparedRun, supervisor: Supervisor, transport: FileTransport, run_dir: Path) -> Services:
    """Start the engine, a hosted teacher and the trainer side by side; return when all are ready.

    On one GPU they start one after the other: vLLM takes what others allocate meanwhile for its own, and stops where
    they free any. So they do in one process: while transformers loads a model, it changes what torch does everywhere.
    """
    config, logs, launcher = run.config, run_dir / "logs", supervisor.launcher
    policy = specs.policy_pool(config, config.model, launcher, run.token, specs.engine_log(run_dir), run.urls)
    services = Services(policy, {}, [])
    tracks = tracks_of(len(policy.urls))

    async def serve_policy() -> None:
        with supervisor.awaiting(f"the engine to answer at {', '.join(policy.urls)}", tracks):
            await policy.wait_ready(config.engine.startup_timeout_s, launcher.ensure_alive)

    async def serve_teacher() -> None:
        name, timeout_s = config.teacher.name, config.teacher.engine.startup_timeout_s
        connect = services.hosted[name] = specs.teacher_client(config, launcher, run.token, logs / "teacher.log")
        teacher = connect(FrozenModelConfig(name=name, timeout_s=config.teacher.timeout_s))
        services.teachers.append(teacher)
        with supervisor.awaiting(f"the teacher to answer at {', '.join(teacher.urls)}", [specs.TEACHER]):
            await teacher.wait_ready(timeout_s, launcher.ensure_alive)

    def loaded() -> bool:
        return transport.receive_metrics(run.first_version) is not None

    async def load_trainer() -> None:
        payload = specs.trainer_payload(config, run.model, references=run.components.references)
        payload |= {"resume": None if run.resume is None else run.resume.payload}
        payload["ends"] = [token for renderer in run.renderers.values() for token in renderer.get_stop_token_ids()]
        launcher.start_trainer(specs.trainer(config, run_dir, payload))
        with supervisor.awaiting("the trainer to load the model", [TRAINER]):
            await launcher.wait_until(loaded, config.trainer.ready_timeout_s, f"the trainer loaded no {run.model.path}")

    starts = [serve_policy, *[serve_teacher] * bool(run.components.hosted), load_trainer]
    try:
        if specs.placement(config).shares_gpu or config.engine.in_process:
            for start in starts:
                await start()
        else:
            await asyncio.gather(*(start() for start in starts))
        if config.engine.urls or config.sweep.share_engine or run.first_version:  # it may hold another run's weights
            with supervisor.awaiting("the engine to load the weights", tracks):
                await load_first_weights(run, policy, transport)
    except BaseException:
        await services.close()
        raise
    supervisor.serve(policy)
    return services


async def load_first_weights(run: PreparedRun, policy: PolicyPool, transport: FileTransport) -> None:
    """Have the engine load the weights that the run begins with."""
    version = run.first_version
    path = await transport.deliver(version) if version else run.model.path
    await policy.update_weights(version, path, run.config.engine.update_timeout_s)


def supervise(run: PreparedRun, track: Track) -> Supervisor:
    """Return what watches the run's processes, and records in `track` how long they take to start."""
    config = run.config
    restarts = specs.restarts_of(config.engine)
    if run.components.hosted:
        restarts |= specs.restarts_of(config.teacher.engine, specs.TEACHER)
    say, timeout_s = run.components.monitors.status, config.engine.startup_timeout_s
    return Supervisor(run.components.launcher, say, restarts, timeout_s, run_dir=Path(config.run.dir), track=track)


# --- assemble ---------------------------------------------------------------------------------------------------------


def assemble(
    run: PreparedRun, services: Services, transport: FileTransport, run_dir: Path, track: Track | None = None
) -> Orchestrator:
    """The orchestrator over the run's servers."""
    trainer = run.config.trainer
    return run.components.orchestrator(
        batcher=run.components.batcher,
        envs=[train_env(run, name, services.policy, services.hosted) for name in run.config.envs],
        pool=services.policy,
        transport=transport,
        monitors=run.components.monitors,
        run_dir=run_dir,
        model=run.model,
        max_steps=run.config.max_steps,
        seq_len=run.config.trainer.seq_len,
        trainer_ranks=run.config.trainer.num_processes,
        updates_per_batch=run.config.trainer.updates_per_batch,
        update_timeout_s=run.config.engine.update_timeout_s,
        half=run.model.dtype != "float32" or trainer.precision.is_mixed,
        checkpoint=run.config.checkpoint,
        state=None if run.resume is None else run.resume.state,
        track=track,
    )


def train_env(run: PreparedRun, name: str, policy: PolicyPool, hosted: dict[str, Connect]) -> TrainEnv:
    """One env with its live components; `hosted` make clients of the frozen models that are run, by name."""
    parts, environment, renderer = run.components.envs[name], run.environments[name], run.renderers[name]
    algorithm = parts.algorithm
    algorithm.attach(policy_pool=policy, renderer=renderer, hosted=hosted, probe=run.probe)
    after = int(specs.evaluation_yields(run.config))
    for sampler, model, priority in ((parts.sampler, algorithm.source(), 0), (parts.eval_sampler, policy, after)):
        sampler.attach(
            pool=model,
            renderer=renderer,
            max_model_len=run.config.model.max_model_len,
            seed=run.config.seed,
            tokenizer_path=run.model.path,
            reserve=algorithm.reserve(environment.tasks),
            vocab_size=embedding_rows(run.model.path),
            priority=priority,
        )
    asked = Sampler()
    asked.attach(pool=policy, renderer=renderer, max_model_len=run.config.model.max_model_len, seed=run.config.seed)
    environment.connect(asked, hosted)
    return TrainEnv(environment=environment, **vars(parts))
