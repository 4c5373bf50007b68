"""Specs of a run's processes, from its config alone; with none of the imports that preparing a run takes."""

import contextlib
import os
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prl.base.errors import ConfigError, PrlError
from prl.config import threads
from prl.config.build import build, class_of, plain
from prl.config.evaluation import EvaluationConfig
from prl.config.gpus import Gpus, Need, Placement, place, visible_gpus
from prl.config.hardware import parameters_of
from prl.config.schema import ModelConfig, TrainConfig
from prl.config.validate import hosts_teacher, places_processes
from prl.engines.base import Connect, Engine, EngineSpec, ServerEngine
from prl.engines.protocol import TOKEN_VARIABLE
from prl.launch import shared_engines
from prl.launch.inline import InlineLauncher
from prl.launch.launcher import Bundle, Launcher, TrainerSpec, worker_name
from prl.launch.local import rank_names, resolve_model
from prl.orchestrator.who_waits import ENGINE, numbered
from prl.weights.base import Weights

if TYPE_CHECKING:
    from prl.engines.client import PolicyPool

POLICY_NAME = "policy"
"""Name that engines serve the policy under."""
TEACHER = "teacher"
"""Name of the process and the track of a hosted teacher."""


def launcher_of(config: TrainConfig) -> Launcher:
    """The run's launcher. Raises ConfigError."""
    if config.sweep.share_engine:
        return shared_engines.WarmLauncher(config.launcher)
    return build(config.launcher, Launcher, "launcher")


def run_token(config: TrainConfig | EvaluationConfig) -> str:
    """A fresh token for this run's servers, or the one that running or warm engines were started with."""
    if not config.engine.urls:
        shares = isinstance(config, TrainConfig) and config.sweep.share_engine
        return shared_engines.TOKEN if shares else secrets.token_hex(24)
    if not os.environ.get(TOKEN_VARIABLE):
        raise ConfigError(f"engine.urls names servers that already run: set {TOKEN_VARIABLE} to their token")
    return os.environ[TOKEN_VARIABLE]


def engine_log(run_dir: Path) -> Path:
    """Return where the output of a run's first engine goes; that of others beside it."""
    return run_dir / "logs" / "engine.log"


def policy_engine(config: TrainConfig | EvaluationConfig, model: ModelConfig, token: str, log: Path) -> EngineSpec:
    """An engine of a policy: of the one that a run trains, or of one that an evaluation asks."""
    device = config.engine.device_type
    further: dict[str, Any] = {}
    if isinstance(config, TrainConfig):
        further["evaluation_yields"] = evaluation_yields(config)
        further["weight_transfer"] = build(config.weights, Weights, "weights").receiver
    return EngineSpec(
        process=ENGINE,
        served_name=POLICY_NAME,
        model=resolve_model(model, device),
        config=config.engine,
        device=device,
        seed=config.seed,
        token=token,
        log=log,
        threads=threads.of_engine(config, model),
        **further,
    )


def evaluation_yields(config: TrainConfig) -> bool:
    """Return whether requests of evaluations come after those of training: beside it, at servers that the run
    starts."""
    beside = config.orchestrator.eval.mode == "beside"
    return beside and class_of(config.engine, Engine, "engine").has_priorities and not config.engine.urls


def policy_engines(
    config: TrainConfig | EvaluationConfig, model: ModelConfig, token: str, log: Path
) -> list[EngineSpec]:
    """All engines of a policy; none where they run already. Raises ConfigError where there are not GPUs enough."""
    if config.engine.urls:
        return []
    return several(policy_engine(config, model, token, log), placement(config).engines)


def hosted_teacher(config: TrainConfig, model: ModelConfig, token: str, log: Path) -> EngineSpec:
    """An engine of the teacher that the run hosts."""
    device = config.teacher.engine.device_type
    return EngineSpec(
        process=TEACHER,
        served_name=config.teacher.name,
        model=resolve_model(model, device),
        config=config.teacher.engine,
        device=device,
        seed=config.seed,
        token=token,
        log=log,
        frozen=True,
        threads=threads.share(config.teacher.engine.threads, model, device, threads.sharing(config)),
    )


def several(first: EngineSpec, gpus: Sequence[Gpus]) -> list[EngineSpec]:
    """The servers of one model, one for each of `gpus`."""
    port, log = first.config.port, first.log
    return [
        replace(
            first,
            process=numbered(first.process, number),
            config=first.config if port is None else replace(first.config, port=port + number),
            log=log.with_stem(f"{log.stem}_{number + 1}") if number else log,
            gpus=own,
        )
        for number, own in enumerate(gpus)
    ]


def placement(config: TrainConfig | EvaluationConfig) -> Placement:
    """Return which GPUs the run's processes have. Raises ConfigError where there are not GPUs enough."""
    needs = needs_of(config)
    if places_processes(config) and not getattr(config, "dry_run", False):
        unknown: list[list[Gpus]] = [[()] * need.count for need in needs]
        return Placement(*unknown)
    asked = any(need.gpus for need in needs)
    return place(*needs, len(visible_gpus()) if asked else 0)


def needs_of(config: TrainConfig | EvaluationConfig) -> tuple[Need, Need, Need]:
    """The policy's engines, the trainer's ranks and the hosted teacher's engines."""
    engines = need_of(config.engine, "engine")
    if isinstance(config, EvaluationConfig):
        return engines, Need(0, 0), Need(0, 0)
    processes = config.trainer.num_processes
    ranks = Need(processes, int(config.trainer.device_type == "cuda"), f"trainer.num_processes={processes}")
    return engines, ranks, need_of(config.teacher.engine, "teacher.engine") if hosts_teacher(config) else Need(0, 0)


def need_of(engine: Any, key: str) -> Need:
    """The servers that are started of an engine's node at `key`."""
    count = 0 if engine.urls else engine.servers
    size = engine.gpus_each
    return Need(count, size, f"{key}.servers={count} of {size} GPUs")


def bundles_of(config: TrainConfig) -> list[Bundle]:
    """Return what each process of a run takes: the policy's engines, the trainer's ranks, the hosted teacher's engines,
    and the workers of envs on Ray."""
    log = engine_log(Path(config.run.dir))
    bundles = [bundle_of(spec) for spec in policy_engines(config, config.model, "", log)]
    bundles += bundles_of_ranks(trainer(config, Path(), trainer_payload(config, config.model, references=[])))
    if hosts_teacher(config) and config.teacher.model is not None:
        teacher = hosted_teacher(config, config.teacher.model, "", log)
        bundles += [bundle_of(each) for each in several(teacher, placement(config).teachers)]
    for name, env in config.envs.items():
        if env.workers.where == "ray":
            names = [worker_name(name, number) for number in range(env.workers.count)]
            bundles += [Bundle(each, None, cpus=1, gpus=0) for each in names]
    if not build(config.weights, Weights, "weights").writes_model:  # no process has files of them
        bundles = [replace(bundle, room=0) for bundle in bundles]
    return bundles


def bundles_of_ranks(spec: TrainerSpec) -> list[Bundle]:
    """Return what each rank of the trainer takes; the first one writes the weights."""
    gpus = int(spec.payload["trainer"]["device"] == "cuda")
    names = rank_names(spec.num_processes)
    room = [weights_bytes(spec.model)] + [0] * (len(names) - 1)
    return [Bundle(name, spec.model, spec.threads, gpus, need) for name, need in zip(names, room, strict=True)]


def bundle_of(spec: EngineSpec) -> Bundle:
    """Return what an engine takes."""
    room = 0 if spec.frozen else weights_bytes(spec.model)
    return Bundle(
        spec.process, spec.model, cpus=spec.threads, gpus=spec.config.gpus_each, room=room, host=spec.config.host
    )


def weights_bytes(model: ModelConfig) -> int:
    """Bytes of the files of two policy versions, in the engines' number format; 0 where the size is not known here."""
    return 2 * (parameters_of(model) or 0) * (4 if model.dtype == "float32" else 2)


def restarts_of(engine: Any, name: str = ENGINE) -> dict[str, int]:
    """Return how often each of the servers that prl starts of a model may be started again, by its process."""
    return {} if engine.urls else {numbered(name, place): engine.restarts for place in range(engine.servers)}


def trainer(config: TrainConfig, run_dir: Path, payload: dict[str, Any] | None = None) -> TrainerSpec:
    """The trainer."""
    return TrainerSpec(
        run_dir=run_dir,
        model=resolve_model(config.model, config.engine.device_type),
        payload=payload or {},
        num_processes=config.trainer.num_processes,
        threads=threads.of_trainer(config),
        gpus=tuple(placement(config).ranks),
    )


def trainer_payload(config: TrainConfig, model: ModelConfig, *, references: list[str]) -> dict[str, Any]:
    """The config of the trainer's process, ready for JSON.

    Args:
        config: the run's.
        model: the policy, resolved for this machine.
        references: names of the models in the trainer that samples name as theirs.
    """
    losses = {"": config.loss} | {name: env.loss for name, env in config.envs.items() if env.loss is not None}
    return {
        "model": plain(model),
        "losses": {name: plain(node) for name, node in losses.items()},
        "trainer": plain(config.trainer) | {"device": config.trainer.device_type},
        "weights": plain(config.weights),
        "seed": config.seed,
        "max_steps": config.max_steps,
        "references": references,
        "adapters_alone": adapters_alone(config),
        "engine_workers": max(1, config.engine.gpus_each),
    }


def adapters_alone(config: TrainConfig) -> bool:
    """Return whether engines may be sent adapters without the weights: they began with those, and nobody else wants
    them."""
    own = class_of(config.engine, Engine, "engine").adds_adapters and not config.engine.urls
    return own and build(config.weights, Weights, "weights").writes_model and not config.orchestrator.eval.keep_best


# --- the models of a run ----------------------------------------------------------------------------------------------


def start_early(config: TrainConfig, launcher: Launcher, token: str, run_dir: Path) -> list[str]:
    """Start the policy's engines before the run is prepared; none where that has to wait or goes wrong.

    What is wrong is said by `check_engines`, or where they are started later.
    """
    served = issubclass(class_of(config.engine, Engine, "engine"), ServerEngine)
    if not served or config.engine.urls or isinstance(launcher, InlineLauncher):
        return []
    with contextlib.suppress(OSError, PrlError, UnicodeError):
        engines = policy_engines(config, config.model, token, engine_log(run_dir))
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        return [launcher.start_engine(engine) for engine in engines]
    return []


def policy_pool(
    config: TrainConfig | EvaluationConfig,
    model: ModelConfig,
    launcher: Launcher,
    token: str,
    log: Path,
    urls: Sequence[str] = (),
) -> "PolicyPool":
    """The client of a policy, which is run, or runs already (`engine.urls`, or `urls` of engines started early)."""
    running = [*config.engine.urls, *urls]
    places = placement(config).engines

    def serve(spec: EngineSpec) -> list[str]:
        return running or [launcher.start_engine(each) for each in several(spec, places)]

    spec = policy_engine(config, model, token, log)
    return class_of(config.engine, Engine, "engine").policy(spec, serve)


def teacher_client(config: TrainConfig, launcher: Launcher, token: str, log: Path) -> Connect:
    """Run the hosted teacher; returns what makes its clients."""
    teacher = config.teacher
    assert teacher.model is not None  # only a teacher with one is hosted
    places = placement(config).teachers

    def serve(spec: EngineSpec) -> list[str]:
        return [launcher.start_engine(each) for each in several(spec, places)]

    spec = hosted_teacher(config, teacher.model, token, log)
    return class_of(teacher.engine, Engine, "teacher.engine").frozen(spec, serve)
