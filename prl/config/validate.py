"""Rules across the nodes of a composed config. Everything here fails before a process starts.

Bounds of a single option stand beside its field (`Annotated`, `Literal`); the rest a component refuses in its `check`.
"""

import re
import warnings
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from prl.base.errors import ConfigError
from prl.base.masking import HIDDEN
from prl.config.build import check_node, located, plain
from prl.config.hardware import BYTES_PER_PARAMETER, GIB, Machine, MachineConfig, parameters_of
from prl.config.model_folder import check_model
from prl.config.model_reference import FrozenModelConfig, check_reference, check_url
from prl.config.schema import EnvConfig, LoraConfig, ModelConfig, TrainConfig

COMPONENTS = [field.name for field in fields(TrainConfig) if field.type is Any]
"""Keys of the nodes that name a class or a function."""
THIS_MACHINE = ("127.0.0.1", "localhost", "::1")
"""Hosts that only the machine itself reaches."""


def validate(config: TrainConfig, machine: Machine) -> None:
    """Raise ConfigError naming the first key that is out of range or does not fit the others, or the machine."""
    for name in COMPONENTS:  # an option that none of the groups has, as `loss=nonsense`, is no node
        check_node(getattr(config, name), name)
    for name in ("optim", "schedule"):
        check_node(getattr(config.trainer, name), f"trainer.{name}")
    # A run's own config, taken up again, has stars where a secret was: they would be sent as the key.
    refuse_masked(plain(config))
    if config.machine != MachineConfig() and not config.dry_run and not places_processes(config.launcher):
        raise ConfigError("machine describes a cluster, or the machine of a dry run: add dry_run=true, or leave it out")
    check_run_name(config.run.name)
    if not config.run.dir.strip() or not config.run.dir.isprintable():
        raise ConfigError(f"run.dir={config.run.dir!r} is no directory's path: leave it out for outputs/<run.name>")
    machine.check_device(config.trainer.device, "trainer.device")
    config.orchestrator.check("orchestrator")
    validate_envs(config)
    seq_len, longest = config.trainer.seq_len, config.model.max_model_len
    if seq_len < longest:
        warnings.warn(f"trainer.seq_len={seq_len} cuts samples: model.max_model_len={longest}", stacklevel=2)
    if config.model.lora.rank is None and config.model.lora != LoraConfig():
        raise ConfigError("model.lora.rank has no value, and model.lora describes adapters: give it one")
    if config.model.lora.rank is not None and config.model.freeze:
        raise ConfigError("model.freeze: with model.lora.rank all weights are frozen, and adapters alone are trained")
    validate_server(config.model, config.engine, machine, weights=not config.dry_run)
    validate_teacher(config, machine)
    if machine.device_of(config.trainer.device) == "cpu":
        check_ranks(config.trainer, config.model, machine)


def places_processes(launcher: Any) -> bool:
    """Return whether a launcher's node chooses machines and GPUs by itself: they may be others than this one."""
    return bool(getattr(located(launcher, "launcher"), "places_processes", False))


def check_ranks(trainer: Any, model: ModelConfig, machine: Machine) -> None:
    """Raise ConfigError for trainer ranks whose weights and gradients no memory of a machine without a GPU holds."""
    ranks = trainer.num_processes
    # Ranks with copies of their own need that memory several times on one machine.
    copies = 1 if trainer.shard_size is None else ranks / trainer.shard_size
    needed = copies * (parameters_of(model) or 0) * BYTES_PER_PARAMETER / GIB
    machine.check_memory(
        needed, f"trainer.num_processes={ranks} with the weights and gradients of model.path={model.path!r}"
    )


def refuse_masked(node: Any, where: str = "") -> None:
    """Raise ConfigError where a config has what a run's files have in place of a secret."""
    inside = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in inside:
        name = f"{where}.{key}".lstrip(".")
        if isinstance(value, str) and HIDDEN in value:
            raise ConfigError(
                f"{name} is {value!r}: no file of a run has its secrets. Give this one again on the command line, or "
                "'${oc.env:NAME}' for what the environment variable NAME holds"
            )
        refuse_masked(value, name)


def check_run_name(name: str) -> None:
    """Refuse a name that is not one directory's, or that a terminal or a log cannot show."""
    if name in ("", ".", "..") or set(name) & set("/\\") or not name.isprintable() or name != name.strip():
        raise ConfigError(f"run.name={name[:80]!r} must be one directory's name; run.dir takes a whole path")


def validate_server(
    model: ModelConfig, engine: Any, machine: Machine, prefix: str = "", *, weights: bool = True
) -> None:
    """Two nodes under `prefix` of checked bounds; `weights`: the model must have them."""
    machine.check_device(engine.device, f"{prefix}engine.device")
    check_model(model.path, f"{prefix}model.path", weights=weights)
    if engine.in_process:
        return
    for url in engine.urls:
        check_url(url, f"{prefix}engine.urls", "http://127.0.0.1:8000")
    if engine.urls:  # servers that run already have options of their own
        return
    located(plain(engine), f"{prefix}engine").check(engine, prefix, machine)
    if engine.host not in THIS_MACHINE:
        warnings.warn(f"{prefix}engine.host={engine.host}: the engine listens beyond this machine", stacklevel=3)


def validate_teacher(config: TrainConfig, machine: Machine) -> None:
    """A teacher is either hosted by the launcher, or served elsewhere: then it has a name and an address, if needed."""
    teacher = config.teacher
    if teacher.model is not None:
        check_node(teacher.engine, "teacher.engine")
        if teacher.base_url is not None:
            raise ConfigError(f"teacher.base_url={teacher.base_url}: teacher=local has one: choose teacher=endpoint")
        validate_server(teacher.model, teacher.engine, machine, "teacher.", weights=not config.dry_run)
    elif not (teacher.name and teacher.base_url):
        missing = "base_url" if teacher.name else "name"
        for env in config.envs:
            for key, reference in config.frozen_of(env):
                if (reference.name, reference.base_url) == (teacher.name, teacher.base_url):
                    raise ConfigError(
                        f"teacher.{missing} has no value, and {key} refers to it: give teacher.name, teacher.base_url"
                    )


def validate_envs(config: TrainConfig) -> None:
    """Names, group sizes and nodes of the envs."""
    if not config.envs:
        raise ConfigError("envs is empty, no env: choose one with env=<name>, e.g. env=math")
    batch_size, unread = config.orchestrator.batch_size, config.orchestrator.on_evaluations
    if unread and all(env.eval_args is None for env in config.envs.values()):
        keys = " or ".join(f"envs.{name}.eval_args" for name in config.envs)
        raise ConfigError(f"orchestrator.{unread[0]} looks at evaluations, and no env has any: set {keys}, now null")
    if all(env.weight == 0 for env in config.envs.values()):
        raise ConfigError(f"envs.{next(iter(config.envs))}.weight=0: no env is trained on: give one a weight above 0")
    for name, env in config.envs.items():
        check_env_name(name)
        key, group_size = config.group_size_of(name)
        # A group is never split, so that a batch of another size could not be cut.
        if batch_size is not None and batch_size % group_size:
            raise ConfigError(f"orchestrator.batch_size={batch_size} must be divisible by {key}={group_size}")
        if env.workers.where == "ray" and not places_processes(config.launcher):
            raise ConfigError(f"envs.{name}.workers.where=ray: choose launcher=ray as well, or where=local")
        if env.workers.where == "ray" and env.in_process:
            raise ConfigError(f"envs.{name}.workers.where=ray: its in_process=true keeps graders in this process")
        check_env_models(name, env, config.hosts)
        for group in ("algo", "loss", "renderer", "curriculum"):
            if (own := getattr(env, group)) is not None:
                check_node(own, f"envs.{name}.{group}")


def check_env_models(name: str, env: EnvConfig, hosts: Callable[[FrozenModelConfig], bool]) -> None:
    """Raise ConfigError for models of an env's code that cannot be asked; `hosts` says which the launcher serves."""
    for role, reference in env.references.items():
        hosted = isinstance(reference, FrozenModelConfig) and hosts(reference)
        check_reference(reference, f"envs.{name}.models.{role}", hosted=hosted)
    if env.models and (env.in_process is False or env.workers.where == "ray"):
        raise ConfigError(f"envs.{name}.models: graders that ask them run here: leave out in_process and workers.where")


def check_env_name(name: str) -> None:
    """Refuse a name that metrics or files cannot carry."""
    # In metrics `all` stands for all envs together, and a slash separates the parts of a name.
    if name == "all" or not re.fullmatch(r"[\w.-]+", name):
        raise ConfigError(f"envs: {name!r} cannot name an env: use letters, digits and _.-, and not 'all'")
