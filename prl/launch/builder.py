"""From a config and its plan to the live objects of a run: read what can be refused, start servers, assemble.

components = build_components(config)                                      an object for each node (components.py)
prepared = read_tasks(config, plan, components)                            tokenizer, tasks, renderers
supervisor = supervise(prepared, launcher, track)                          watches the processes
services = await start_services(prepared, supervisor, transport)           engine, trainer, teacher, all of them ready
orchestrator = assemble(prepared, services, transport)
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from renderers.base import Renderer

from prl.base.errors import ConfigError
from prl.config.model_folder import embedding_rows
from prl.config.model_reference import FrozenModelConfig
from prl.config.schema import ModelConfig, TeacherConfig, TrainConfig
from prl.engines.base import Connect
from prl.engines.client import ModelPool, PolicyPool
from prl.engines.frozen import clients_of
from prl.engines.sampler import Sampler
from prl.engines.servers import tracks_of
from prl.engines.tokenizers import TokenizerProbe, load_tokenizer
from prl.envs.environment import Environment
from prl.envs.workers import Place
from prl.launch.checks import check_loadable, check_rows
from prl.launch.components import (
    RunComponents,
    TeacherKeys,
    check_processor,
    check_vocabulary,
    picture_store,
    renderers_of,
    show_tasks,
)
from prl.launch.launcher import Launcher
from prl.launch.plan import TEACHER, ModelPlan, RunPlan, TrainerSpec
from prl.launch.prompts import check_lengths, check_trained, checked_prompts
from prl.launch.supervisor import Supervisor
from prl.orchestrator.orchestrator import Orchestrator
from prl.orchestrator.state import ResumePoint
from prl.orchestrator.types import TrainEnv
from prl.rollouts.pictures import FOLDER, PictureStore
from prl.transport.events import TRAINER, Track
from prl.transport.files import FileTransport


@dataclass(frozen=True)
class PreparedRun:
    """Everything of a run that can be refused, made before anything but its engines is started."""

    config: TrainConfig
    plan: RunPlan
    components: RunComponents
    environments: dict[str, Environment]
    renderers: dict[str, Renderer]
    """The renderer of each env."""
    probe: TokenizerProbe
    """Probe of the policy's tokenizer, to compare others with."""
    pictures: PictureStore | None = None
    """The store of the pictures that its models are shown; None = the policy sees none."""
    resume: ResumePoint | None = None
    """The checkpoint that the run goes on from; None for a new one."""

    @property
    def run_dir(self) -> Path:
        return self.plan.trainer.run_dir

    @property
    def first_version(self) -> int:
        """The policy version that the run begins with."""
        return 0 if self.resume is None else self.resume.step


@dataclass
class Services:
    """Clients of the models that run beside the orchestrator."""

    policy: PolicyPool
    hosted: dict[str, Connect]
    """Functions that make clients of the frozen models that the run hosts, by name."""
    teachers: list[ModelPool]
    """Clients that waited for the hosted models, to be closed with the run."""

    async def close(self) -> None:
        for pool in (self.policy, *self.teachers):
            await pool.close()


# --- prepare ----------------------------------------------------------------------------------------------------------


def read_tasks(
    config: TrainConfig,
    plan: RunPlan,
    components: RunComponents,
    place_of_worker: Place | None = None,
    resume: ResumePoint | None = None,
) -> PreparedRun:
    """Load tokenizer and tasks, and check them with the components of the config. Raises ConfigError.

    Args:
        config: The run's config.
        plan: The processes of the run.
        components: The objects of the config's nodes.
        place_of_worker: Returns where Ray starts an env's worker (`Launcher.place_of_worker`).
        resume: The checkpoint that the run goes on from; None for a new one.
    """
    rows = check_loadable(config.model, plan.policy, "model.", trained=True)
    tokenizer = load_tokenizer(config.model.path, "model.path", config.model.trust_remote_code)
    check_teacher(config.teacher, config.model, plan, components.teacher, tokenizer)
    pictures = picture_store(config.model, None if plan.is_dry else plan.trainer.run_dir / FOLDER)
    count = 0 if config.orchestrator.eval.every is None else config.orchestrator.eval.num_tasks
    environments = {
        name: Environment(name, env, eval_tasks=count, played=not plan.is_dry, place=place_of_worker, pictures=pictures)
        for name, env in config.envs.items()
    }
    limit, size = config.model.max_model_len, len(tokenizer)  # without padding rows of the embedding
    show_tasks(components, environments, seed=config.seed, max_model_len=limit, vocab_size=size)
    nodes = {name: config.node_of(name, "renderer") for name in config.envs}
    renderers = renderers_of(nodes, config.model, tokenizer, pictures)
    rendered: list[list[int]] = []
    for name, environment in environments.items():
        if environment.uses_harness and not plan.policy.is_server:
            raise ConfigError(f"env {name!r} is played by verifiers' harness, over HTTP: it needs engine=default")
        algorithm, keys = components.envs[name].algorithm, components.keys[name]
        prompts = checked_prompts(environment, renderers[name], keys["renderer"], limit, algorithm)
        check_lengths(limit, config.trainer.seq_len, name, prompts)
        rendered += prompts
        if environment.config.weight > 0:  # else it is evaluated only
            check_trained(keys, components.envs[name].group_size, algorithm, environment, renderers[name])
    check_rows(config.model.path, rows, tokenizer, rendered)
    probe = TokenizerProbe.of(tokenizer, f"the policy ({config.model.path})")
    return PreparedRun(config, plan, components, environments, renderers, probe, pictures, resume)


def check_teacher(config: TeacherConfig, policy: ModelConfig, plan: RunPlan, keys: TeacherKeys, tokenizer: Any) -> None:
    """Raise ConfigError for a hosted teacher that does not fit the policy.

    Args:
        config: The teacher.
        policy: The policy.
        plan: The processes of the run.
        keys: The config keys that refer to the teacher.
        tokenizer: The policy's tokenizer.
    """
    hosted = config.model
    if plan.teacher is None or hosted is None:
        return
    check_loadable(hosted, plan.teacher, "teacher.model.", trained=False)
    teacher = load_tokenizer(hosted.path, "teacher.model.path", hosted.trust_remote_code)
    check_vocabulary(tokenizer, teacher, policy, config, keys)
    if plan.policy.spec.sees and plan.teacher.spec.sees:
        check_processor(tokenizer, teacher, policy, config, keys)


def task_keys(run: PreparedRun) -> dict[str, dict[str, list[str]]]:
    """Return verifiers' key of every task, which hashes its data, by env and by `train` or `eval`."""
    keys = {}
    for name, env in run.environments.items():
        splits = {"train": env.tasks, "eval": env.eval_tasks}
        keys[name] = {split: [task.key for task in tasks] for split, tasks in splits.items() if tasks}
    return keys


# --- start ------------------------------------------------------------------------------------------------------------


async def start_services(
    run: PreparedRun, supervisor: Supervisor, transport: FileTransport, started: Sequence[str] = ()
) -> Services:
    """Start the engine, a hosted teacher and the trainer side by side; return when all are ready.

    On one GPU they start one after the other: a server takes what others allocate meanwhile for its own, and stops
    where they free any. So they do in one process: while transformers loads a model, it changes what torch does
    everywhere.

    Args:
        run: The run.
        supervisor: Watches the processes; its launcher starts them.
        transport: Where the trainer says that it has loaded the model.
        started: The addresses of the policy's engines, where they were started early.
    """
    plan = run.plan
    policy = plan.policy.policy(supervisor.launcher.start_engine, started, pictures=run.pictures)
    services = Services(policy, {}, [])
    starts = [partial(_serve_policy, plan.policy, policy, supervisor)]
    if plan.teacher is not None:
        starts.append(partial(_serve_teacher, plan.teacher, run, services, supervisor))
    starts.append(partial(_load_trainer, run, supervisor, transport))
    try:
        if plan.shares_gpu or not plan.policy.is_server:
            for start in starts:
                await start()
        else:
            await asyncio.gather(*(start() for start in starts))
        if plan.policy.urls or plan.keeps_engines or run.first_version:  # it may hold another run's weights
            with supervisor.awaiting("the engine to load the weights", tracks_of(len(policy.urls))):
                await load_first_weights(run, policy)
    except BaseException:
        await services.close()
        raise
    supervisor.serve(policy)
    return services


async def _serve_policy(plan: ModelPlan, policy: PolicyPool, supervisor: Supervisor) -> None:
    with supervisor.awaiting(f"the engine to answer at {', '.join(policy.urls)}", tracks_of(len(policy.urls))):
        await policy.wait_ready(plan.spec.config.startup_timeout_s, supervisor.launcher.ensure_alive)


async def _serve_teacher(plan: ModelPlan, run: PreparedRun, services: Services, supervisor: Supervisor) -> None:
    name = plan.spec.served_name
    connect = services.hosted[name] = plan.frozen(supervisor.launcher.start_engine, run.pictures)
    teacher = connect(FrozenModelConfig(name=name, timeout_s=run.config.teacher.timeout_s))
    services.teachers.append(teacher)
    with supervisor.awaiting(f"the teacher to answer at {', '.join(teacher.urls)}", [TEACHER]):
        await teacher.wait_ready(plan.spec.config.startup_timeout_s, supervisor.launcher.ensure_alive)


async def _load_trainer(run: PreparedRun, supervisor: Supervisor, transport: FileTransport) -> None:
    """Start the trainer, and wait until it has loaded the model."""

    def loaded() -> bool:
        # The trainer publishes the version that it begins with once it has the model.
        return transport.receive_metrics(run.first_version) is not None

    supervisor.launcher.start_trainer(trainer_of(run))
    with supervisor.awaiting("the trainer to load the model", [TRAINER]):
        problem = f"the trainer loaded no {run.plan.trainer.model.path}"
        await supervisor.launcher.wait_until(loaded, run.config.trainer.ready_timeout_s, problem)


def trainer_of(run: PreparedRun) -> TrainerSpec:
    """Return the trainer of the plan with what tasks and checkpoint have said."""
    own = {
        "references": run.components.references,
        "resume": None if run.resume is None else run.resume.payload,
        "ends": [token for renderer in run.renderers.values() for token in renderer.get_stop_token_ids()],
    }
    return replace(run.plan.trainer, payload=run.plan.trainer.payload | own)


async def load_first_weights(run: PreparedRun, policy: PolicyPool) -> None:
    """Have the engine load the weights that the run begins with."""
    version = run.first_version
    timeout_s = run.plan.policy.spec.config.update_timeout_s
    # Version 0 is the model itself, which is in no folder of the run.
    if version:
        await run.components.weights.load(policy, version, timeout_s)
    else:
        await policy.update_weights(version, run.plan.trainer.model.path, timeout_s)


def supervise(run: PreparedRun, launcher: Launcher, track: Track) -> Supervisor:
    """Make the supervisor, which watches the run's processes and records in `track` how long they take to start."""
    say, timeout_s = run.components.monitors.status, run.plan.policy.spec.config.startup_timeout_s
    return Supervisor(launcher, say, run.plan.restarts, timeout_s, run_dir=run.run_dir, track=track)


# --- assemble ---------------------------------------------------------------------------------------------------------


def assemble(
    run: PreparedRun, services: Services, transport: FileTransport, track: Track | None = None
) -> Orchestrator:
    """Build the orchestrator over the run's servers.

    Args:
        run: The run.
        services: The clients of its servers, which are ready.
        transport: The way to the trainer and back.
        track: Records what the orchestrator does; None = it makes one itself.
    """
    clients = clients_of(services.hosted, run.pictures)
    return run.components.orchestrator(
        batcher=run.components.batcher,
        envs=[train_env(run, name, services.policy, clients) for name in run.config.envs],
        pool=services.policy,
        transport=transport,
        weights=run.components.weights,
        monitors=run.components.monitors,
        run_dir=run.run_dir,
        model=run.plan.trainer.model,
        max_steps=run.config.max_steps,
        seq_len=run.config.trainer.seq_len,
        trainer_ranks=run.config.trainer.num_processes,
        updates_per_batch=run.config.trainer.updates_per_batch,
        update_timeout_s=run.config.engine.update_timeout_s,
        half=run.plan.trainer.model.dtype != "float32" or run.plan.trainer.precision.is_mixed,
        checkpoint=run.config.checkpoint,
        state=None if run.resume is None else run.resume.state,
        track=track,
    )


def train_env(run: PreparedRun, name: str, policy: PolicyPool, clients: Connect) -> TrainEnv:
    """Connect the components of an env with the models of the run.

    Args:
        run: The run.
        name: The env.
        policy: The client of the policy's engines.
        clients: Makes clients of frozen models.
    """
    parts, environment, renderer = run.components.envs[name], run.environments[name], run.renderers[name]
    algorithm = parts.algorithm
    algorithm.attach(policy_pool=policy, renderer=renderer, clients=clients, probe=run.probe)
    # The larger number waits: an evaluation beside training takes what training leaves of the engine.
    after = int(run.plan.policy.spec.evaluation_yields)
    for sampler, model, priority in ((parts.sampler, algorithm.source(), 0), (parts.eval_sampler, policy, after)):
        sampler.attach(
            pool=model,
            renderer=renderer,
            max_model_len=run.config.model.max_model_len,
            seed=run.config.seed,
            tokenizer_path=run.plan.trainer.model.path,
            reserve=algorithm.reserve(environment.tasks),
            vocab_size=embedding_rows(run.plan.trainer.model.path),
            priority=priority,
        )
    # For envs that ask the policy themselves, a judge say: with default settings, not those of training.
    asked = Sampler()
    asked.attach(pool=policy, renderer=renderer, max_model_len=run.config.model.max_model_len, seed=run.config.seed)
    environment.connect(asked, clients)
    return TrainEnv(environment=environment, **vars(parts))
