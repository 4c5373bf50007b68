"""The plan of a run: what is decided once, between the config and the processes.

`plan(config, machine)` says of each process what it runs, on which device and GPUs, and with how many threads.
Launchers, the dry run, the supervisor and evaluations take a plan: none of them asks the config, or the machine, again.
"""

import os
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prl.base.errors import ConfigError
from prl.config.build import build, class_of, located, plain
from prl.config.gpus import Gpus, Need, Placement, place
from prl.config.hardware import Machine, parameters_of
from prl.config.schema import EnvConfig, ModelConfig, TeacherConfig, TrainConfig
from prl.config.threads import share
from prl.config.trainer import FLOAT32, Precision, precision_of
from prl.config.validate import places_processes
from prl.engines.base import Adapters, Connect, Engine, EngineSpec, ServerEngine
from prl.engines.protocol import TOKEN_VARIABLE
from prl.orchestrator.who_waits import ENGINE, numbered
from prl.transport.events import TRAINER
from prl.weights.base import Weights

if TYPE_CHECKING:
    from prl.engines.client import PolicyPool
    from prl.rollouts.pictures import PictureStore

POLICY_NAME = "policy"
"""Name that engines serve the policy under."""
TEACHER = "teacher"
"""Name of the process and the track of a hosted teacher."""
WARM_TOKEN = secrets.token_hex(24)
"""The token of every warm server of this process (`sweep.share_engine`): one for all, so that each run has it."""
NO_NEED = Need(0, 0)
StartEngine = Callable[[EngineSpec], str]
"""Starts a server and returns its address, before it is ready (`Launcher.start_engine`)."""


@dataclass(frozen=True)
class TrainerSpec:
    """The trainer to start."""

    run_dir: Path
    model: ModelConfig
    payload: dict[str, Any]
    """The config that the trainer's process reads (JSON)."""
    num_processes: int
    """Ranks."""
    device: str = "cpu"
    """`cpu` or `cuda`."""
    precision: Precision = FLOAT32
    """The number format of forward and backward."""
    threads: int = 1
    """Threads that each rank computes with on the CPU."""
    gpus: tuple[Gpus, ...] = ()
    """The GPUs that each rank sees; none = all compute on the CPU, or the launcher chooses."""
    module: str = "prl.trainer"
    """What each rank runs."""
    first: int = 0
    """The first rank to start: 1 where the process that starts the others is rank 0 itself."""

    @property
    def names(self) -> list[str]:
        """The names of the processes of the ranks."""
        if self.num_processes == 1:
            return [TRAINER]
        return [f"{TRAINER} rank {rank}" for rank in range(self.num_processes)]

    @property
    def bundles(self) -> "list[Bundle]":
        """The resources of each rank; the first one writes the weights."""
        gpus = int(self.device == "cuda")
        rooms = [weights_bytes(self.model)] + [0] * (self.num_processes - 1)
        return [
            Bundle(name, self.model, self.threads, gpus, room) for name, room in zip(self.names, rooms, strict=True)
        ]


@dataclass(frozen=True)
class Bundle:
    """The resources of one process of a run on its machine."""

    process: str
    """The name of the process in messages and of its log."""
    model: ModelConfig | None
    """The model that it loads; None = it is a worker of an env, which starts it itself."""
    cpus: int
    gpus: int
    room: int = 0
    """Bytes of memory for files of weights."""
    host: str | None = None
    """The address where an engine listens; None = it is a rank of the trainer."""

    @property
    def resources(self) -> dict[str, int]:
        """Return its resources by Ray's names."""
        return {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})


@dataclass(frozen=True)
class ModelPlan:
    """A model that a run asks, and the servers that it starts for it."""

    engine: type[Engine]
    spec: EngineSpec
    """The model with its engine's options: those of its first server, where it has servers."""
    servers: tuple[EngineSpec, ...]
    """The servers to start; none where they run already, or where the engine is in the process of the run."""

    @property
    def urls(self) -> list[str]:
        """The addresses of servers that run already."""
        return list(self.spec.config.urls)

    @property
    def is_server(self) -> bool:
        """Return whether the model is asked over HTTP; else its engine is in the process of the run."""
        return issubclass(self.engine, ServerEngine)

    @property
    def is_started(self) -> bool:
        """Return whether a launcher starts servers of it."""
        return self.is_server and not self.urls

    @property
    def restarts(self) -> dict[str, int]:
        """Return how often each of its servers may be started again, by its process."""
        return {server.process: server.config.restarts for server in self.servers}

    def with_adapters(self, room: Adapters) -> "ModelPlan":
        """Return the plan of an engine that serves adapters beside the model."""
        servers = tuple(replace(server, adapters=room) for server in self.servers)
        return replace(self, spec=replace(self.spec, adapters=room), servers=servers)

    def policy(
        self, start: StartEngine, started: Sequence[str] = (), *, pictures: "PictureStore | None" = None
    ) -> "PolicyPool":
        """Make the client of a policy, whose servers are started unless they run.

        Args:
            start: Starts a server.
            started: The addresses of servers that were started early; empty = none were.
            pictures: The store of the pictures that the policy is shown; None = none are.
        """
        running = [*self.urls, *started]
        return self.engine.policy(replace(self.spec, pictures=pictures), lambda: running or self.start(start))

    def frozen(self, start: StartEngine, pictures: "PictureStore | None" = None) -> Connect:
        """Start the servers of a frozen model; returns a function that makes its clients, which see `pictures`."""
        return self.engine.frozen(replace(self.spec, pictures=pictures), lambda: self.urls or self.start(start))

    def start(self, start: StartEngine) -> list[str]:
        """Start the servers. Returns their addresses, before they are ready."""
        return [start(server) for server in self.servers]


@dataclass(frozen=True)
class RunPlan:
    """The processes of a training run."""

    machine: Machine
    token: str
    """The token that requests to the servers of the run have to show."""
    policy: ModelPlan
    teacher: ModelPlan | None
    """The frozen model that the run hosts; None = it hosts none."""
    trainer: TrainerSpec
    """The trainer, as far as it is known before tasks and checkpoint have been read."""
    workers: tuple[Bundle, ...]
    """The workers of envs on Ray."""
    weights: type[Weights]
    """The way of policy versions to the engines."""
    shares_gpu: bool
    """Several processes have one GPU together."""
    keeps_engines: bool
    """Engines stay for the next run of this process (`sweep.share_engine`)."""
    is_dry: bool
    """This process starts nothing: it is a dry run, or a run that a queue gets."""

    @property
    def models(self) -> list[ModelPlan]:
        """The models that the run asks."""
        return [self.policy] if self.teacher is None else [self.policy, self.teacher]

    @property
    def starting(self) -> str:
        """Say which processes are to start."""
        servers = [server.process for model in self.models for server in model.servers]
        return f"starting {', '.join([*servers, *self.trainer.names])}"

    @property
    def threads(self) -> dict[str, int | None]:
        """Return the threads of each engine and each rank; None of engines that run already."""
        return {"engine": None if self.policy.urls else self.policy.spec.threads, "trainer": self.trainer.threads}

    @property
    def bundles(self) -> list[Bundle]:
        """The resources of each process of the run."""
        engines = [bundle_of(server) for server in self.policy.servers]
        teachers = [bundle_of(server) for server in self.teacher.servers] if self.teacher is not None else []
        bundles = [*engines, *self.trainer.bundles, *teachers, *self.workers]
        if self.weights.writes_model:
            return bundles
        return [replace(bundle, room=0) for bundle in bundles]  # no process has files of weights

    @property
    def restarts(self) -> dict[str, int]:
        """Return how often each server may be started again, by its process."""
        counts: dict[str, int] = {}
        for model in self.models:
            counts |= model.restarts
        return counts


# --- a training run ---------------------------------------------------------------------------------------------------


def plan(config: TrainConfig, machine: Machine, *, keeps_engines: bool = False) -> RunPlan:
    """Decide what the processes of a run are. Raises ConfigError where the machine cannot have them.

    Args:
        config: A config that has passed `validate`.
        machine: The machine that its processes get, unless its launcher places them on others.
        keeps_engines: Whether engines stay for the next run of this process.
    """
    dry = config.dry_run or getattr(located(config.launcher, "launcher"), "submits", False)
    token = token_of(config.engine.urls, WARM_TOKEN if keeps_engines else None)
    ranks = config.trainer.num_processes
    ranks_on = machine.device_of(config.trainer.device)
    teacher = config.teacher.engine if config.hosts_teacher else None
    needs = [
        need_of(config.engine, "engine", machine),
        Need(ranks, int(ranks_on == "cuda"), f"trainer.num_processes={ranks}"),
        need_of(teacher, "teacher.engine", machine) if teacher is not None else NO_NEED,
    ]
    placement = placed(needs, machine, elsewhere=places_processes(config.launcher) and not dry)
    # What computes on the machine's cores at the same time shares them.
    sharing = servers_on_cpu(config.engine, machine) + servers_on_cpu(teacher, machine)
    if config.orchestrator.max_async_level > 0 and ranks_on == "cpu":  # else sampling and training take turns
        sharing += ranks
    weights = build(config.weights, Weights, "weights")  # to be asked alone: the one that the run uses is a component
    of_model = partial(model_plan, machine=machine, token=token, seed=config.seed, sharing=sharing)
    policy = of_model(
        config.engine,
        config.model,
        placement.engines,
        process=ENGINE,
        served_name=POLICY_NAME,
        log=Path(config.run.dir) / "logs" / "engine.log",
        yields=config.orchestrator.eval.mode == "beside",
        weight_transfer=weights.receiver,
    )
    return RunPlan(
        machine=machine,
        token=token,
        policy=policy,
        teacher=None if teacher is None else _teacher(config.teacher, placement.teachers, policy.spec.log, of_model),
        trainer=_trainer(config, policy, type(weights), ranks_on, tuple(placement.ranks), machine.cores),
        workers=_workers(config.envs),
        weights=type(weights),
        shares_gpu=placement.shares_gpu,
        keeps_engines=keeps_engines,
        is_dry=dry,
    )


def _teacher(
    config: TeacherConfig, gpus: Sequence[Gpus], policy_log: Path, of_model: Callable[..., ModelPlan]
) -> ModelPlan:
    """Plan the teacher that the run hosts, whose log lies beside the policy's."""
    return of_model(
        config.engine,
        config.model,
        gpus,
        process=TEACHER,
        served_name=config.name,
        log=policy_log.with_stem(TEACHER),
        frozen=True,
    )


def _workers(envs: Mapping[str, EnvConfig]) -> tuple[Bundle, ...]:
    """Return the workers of envs that Ray places: a core for each."""
    workers: list[Bundle] = []
    for name, env in envs.items():
        if env.workers.where == "ray":
            names = [worker_name(name, number) for number in range(env.workers.count)]
            workers += [Bundle(each, None, cpus=1, gpus=0) for each in names]
    return tuple(workers)


def _trainer(
    config: TrainConfig, policy: ModelPlan, weights: type[Weights], device: str, gpus: tuple[Gpus, ...], cores: int
) -> TrainerSpec:
    """Plan the trainer. Its payload lacks what tasks and checkpoint say (`prl.launch.builder.trainer_of`).

    Args:
        config: The run's config.
        policy: The plan of the policy's engines.
        weights: The way of policy versions to them.
        device: `cpu` or `cuda`, where the ranks compute.
        gpus: The GPUs of each rank.
        cores: The cores of the machine.
    """
    losses = {"": config.loss} | {name: env.loss for name, env in config.envs.items() if env.loss is not None}
    # Engines may be sent adapters without the weights where they began with those, and nobody else wants the weights.
    own = policy.engine.adds_adapters and not policy.urls
    adapters_alone = own and weights.writes_model and not config.orchestrator.eval.keep_best
    stepping = "cpu" if config.trainer.cpu_offload else device  # where the optimiser steps
    return TrainerSpec(
        run_dir=Path(config.run.dir),
        model=policy.spec.model,
        payload={
            "model": plain(policy.spec.model),
            "losses": {name: plain(node) for name, node in losses.items()},
            "trainer": plain(config.trainer) | {"device": device},
            "weights": plain(config.weights),
            "seed": config.seed,
            "max_steps": config.max_steps,
            "adapters_alone": adapters_alone,
            "engine_workers": max(1, config.engine.gpus_on(policy.spec.device)),
        },
        num_processes=config.trainer.num_processes,
        device=device,
        precision=precision_of(config.trainer.dtype, device),
        # Of a model with work for several threads an update takes longer than generation. So ranks share the cores with
        # each other alone, and engines have what is left while both are at work: `smollm2` trained in 17.5 instead of
        # 20.6 s a step on two cores.
        threads=share(config.trainer.threads, config.model, stepping, config.trainer.num_processes, cores),
        gpus=gpus,
    )


# --- the models of a run, an evaluation, a server ---------------------------------------------------------------------


def model_plan(
    engine: Any,
    model: ModelConfig,
    gpus: Sequence[Gpus],
    machine: Machine,
    *,
    process: str,
    served_name: str,
    token: str,
    log: Path,
    sharing: int,
    seed: int = 0,
    frozen: bool = False,
    yields: bool = False,
    weight_transfer: str = EngineSpec.weight_transfer,
) -> ModelPlan:
    """Plan a model and its engines.

    Args:
        engine: The options of the engine.
        model: The model, as its config has it.
        gpus: The GPUs of each server that is started.
        machine: Where they compute.
        process: The name of the first server's process.
        served_name: The name that requests give the model.
        token: The token that requests have to show.
        log: The file for the first server's output; that of others lies beside it.
        sharing: The processes that compute on the machine's cores at the same time.
        seed: The seed of the engines.
        frozen: The model takes no new weights.
        yields: Requests of evaluations may come after those of training.
        weight_transfer: The name of what takes new weights in (`Weights.receiver`).
    """
    kind = class_of(engine, Engine, "engine")
    device = machine.device_of(engine.device)
    spec = EngineSpec(
        process=process,
        served_name=served_name,
        model=resolved(model, device),
        config=engine,
        device=device,
        seed=seed,
        token=token,
        log=log,
        frozen=frozen,
        threads=share(engine.threads, model, device, sharing, machine.cores),
        evaluation_yields=yields and kind.has_priorities and not engine.urls,
        weight_transfer=weight_transfer,
    )
    return ModelPlan(kind, spec, tuple(_server(spec, number, own) for number, own in enumerate(gpus)))


def _server(first: EngineSpec, number: int, gpus: Gpus) -> EngineSpec:
    """Return the server of this number, from 0, of a model: its process, log, port and GPUs are its own."""
    config, log = first.config, first.log
    return replace(
        first,
        process=numbered(first.process, number),
        config=config if config.port is None else replace(config, port=config.port + number),
        log=log.with_stem(f"{log.stem}_{number + 1}") if number else log,
        gpus=gpus,
    )


def resolved(model: ModelConfig, device: str) -> ModelConfig:
    """Return the model with what depends on this machine: an absolute path, the engine's number format."""
    folder = Path(model.path).expanduser()
    path = str(folder.resolve()) if folder.is_dir() else model.path
    if model.dtype != "auto":
        return replace(model, path=path)
    return replace(model, path=path, dtype="float32" if device == "cpu" else "bfloat16")


def token_of(urls: Sequence[str], warm: str | None = None) -> str:
    """Return the token for requests to the servers of a run: a fresh one, unless its servers know one already.

    Args:
        urls: The addresses of servers that run already, whose token is in the environment; empty = none do.
        warm: The token of servers that stay from run to run; None = there are none.

    Raises ConfigError where servers run and nobody has given their token.
    """
    if not urls:
        return warm or secrets.token_hex(24)
    if not os.environ.get(TOKEN_VARIABLE):
        raise ConfigError(f"engine.urls names servers that already run: set {TOKEN_VARIABLE} to their token")
    return os.environ[TOKEN_VARIABLE]


def need_of(engine: Any, key: str, machine: Machine) -> Need:
    """Return the number of servers to start of an engine's node at `key`, and the GPUs of each."""
    count = 0 if engine.urls else engine.servers
    size = engine.gpus_on(machine.device_of(engine.device))
    return Need(count, size, f"{key}.servers={count} of {size} GPUs")


def placed(needs: Sequence[Need], machine: Machine, *, elsewhere: bool) -> Placement:
    """Return which GPUs processes have: those of the machine, or none yet where a launcher places them `elsewhere`.

    Raises ConfigError where there are not GPUs enough.
    """
    if elsewhere:
        unknown: list[list[Gpus]] = [[()] * need.count for need in needs]
        return Placement(*unknown)
    # A machine is asked for its GPUs only where one is wanted: its driver may hang.
    wanted = any(need.gpus for need in needs)
    return place(needs, machine.gpus if wanted else [])


def servers_on_cpu(engine: Any, machine: Machine) -> int:
    """Count the servers of an engine's node that compute on a machine's cores; None has none.

    One of `engine.urls` counts: most are on the same machine.
    """
    if engine is None or machine.device_of(engine.device) != "cpu":
        return 0
    return len(engine.urls) or max(1, engine.servers)


def bundle_of(spec: EngineSpec) -> Bundle:
    """Return the resources of an engine."""
    room = 0 if spec.frozen else weights_bytes(spec.model)
    gpus = spec.config.gpus_on(spec.device)
    return Bundle(spec.process, spec.model, cpus=spec.threads, gpus=gpus, room=room, host=spec.config.host)


def weights_bytes(model: ModelConfig) -> int:
    """Return the bytes of the files of two policy versions, in the engines' number format; 0 of an unknown size."""
    # Two: one version is loaded while the next one is written.
    return 2 * (parameters_of(model) or 0) * (4 if model.dtype == "float32" else 2)


# --- names and words --------------------------------------------------------------------------------------------------


def worker_name(env: str, number: int) -> str:
    """Return the name of a worker of an env among the processes of a run."""
    return f"{env}-worker {number}"


def in_words(bundles: Sequence[Bundle]) -> str:
    """Describe what processes take: `2 x engine of 1 CPU and 1 GPU, 1 x trainer of 1 CPU and 1 GPU`."""
    alike = Counter((bundle.process.split()[0], amounts(bundle.resources)) for bundle in bundles)
    return ", ".join(f"{count} x {process} of {size}" for (process, size), count in alike.items())


def amounts(resources: Mapping[str, float]) -> str:
    """Describe cores and GPUs, by Ray's names of resources."""
    return " and ".join(f"{resources[name]:g} {name}" for name in ("CPU", "GPU") if resources.get(name)) or "nothing"
