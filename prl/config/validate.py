"""Rules across the nodes of a composed config. Everything here fails before a process starts.

Bounds of a single knob stand beside its field (`Annotated`, `Literal`); the rest a component refuses in its `check`.
"""

import dataclasses
import re
import warnings
from typing import Any

from prl.config import hardware
from prl.config.engine_options import check_options
from prl.config.gpus import VISIBLE, visible_gpus
from prl.config.hardware import GIB, MachineConfig, assumed
from prl.config.instantiate import knobs_of, plain
from prl.config.lora import LoraConfig
from prl.config.machine import (
    check_compiler,
    check_memory,
    check_ranks,
    check_row,
    check_run_dir,
    check_servers,
    check_sharding,
    check_threads,
)
from prl.config.model_folder import check_length, check_model, local_folder, positions, read_config
from prl.config.model_reference import check_url, frozen_models
from prl.config.schema import InferenceConfig, ModelConfig, SamplingConfig, TeacherConfig, TrainConfig
from prl.config.signature import check_value, hints_of
from prl.errors import ConfigError

MAX_NAME = 200
"""Longest name of a run, bytes: file systems allow 255, and some files are named after their run."""
MAX_SEQUENCES = 16384
"""Completions of one prompt that vLLM takes in a request."""
ROLLOUT_BYTES = 4096
"""What a rollout takes at least while it is under way."""
LAST_PORT = 65535
SHORTEST_S = 0.1
"""Shortest deadline of a run's own parts, seconds."""


def validate(config: TrainConfig) -> None:
    """Raise ConfigError naming the first key that is out of range or does not fit the others."""
    check_nodes(config)
    hints = hints_of(SamplingConfig)
    for name, value in knobs_of(config.sampling).items():  # first: the settings of envs follow these
        check_value(hints.get(name, Any), value, f"sampling.{name}")
    check_value(TrainConfig, config, "")
    if config.machine != MachineConfig() and not config.dry_run:
        raise ConfigError("machine describes the machine of a dry run: add dry_run=true, or leave it out")
    check_run_name(config.run.name)
    check_run_dir(config.run.dir)
    check_device(config.trainer.device, "trainer.device")
    config.orchestrator.check("orchestrator")
    validate_envs(config)
    if config.trainer.seq_len < config.model.max_model_len:
        warnings.warn(
            f"trainer.seq_len={config.trainer.seq_len} is below model.max_model_len={config.model.max_model_len}: "
            "longer samples are cut. Leave trainer.seq_len out to have it follow the model",
            stacklevel=2,
        )
    check_lora(config.model.lora)
    validate_server(config.model, config.inference, weights=not config.dry_run)
    validate_teacher(config)
    check_sizes(config)
    check_threads(config.trainer.threads, "trainer.threads")
    device = resolve_device(config.trainer.device)
    check_sharding(config.trainer, device)
    if device == "cpu":
        check_ranks(config.trainer, config.model)
        check_row(config.trainer, config.model)


def check_lora(lora: LoraConfig) -> None:
    """Raise ConfigError for adapters that are described, and not asked for."""
    if lora.rank is not None:
        return
    for name in ("alpha", "target_modules"):
        if (value := getattr(lora, name)) != getattr(LoraConfig(), name):
            raise ConfigError(
                f"model.lora.{name}={value} without model.lora.rank: there are no adapters without a rank"
            )


def check_sizes(config: TrainConfig) -> None:
    """Refuse what starts and cannot go on: more rollouts than memory or the engine holds, deadlines nothing keeps."""
    orchestrator = config.orchestrator
    sizes = [config.group_size_of(env) for env in config.envs] + [("orchestrator.eval.k", orchestrator.eval.k)]
    for key, size in sizes:
        if size > MAX_SEQUENCES:
            raise ConfigError(f"{key}={size}: an engine takes at most {MAX_SEQUENCES} sequences of one prompt")
    rollouts = (orchestrator.batch_size or 1) * orchestrator.oversampling_factor
    check_memory(
        rollouts * ROLLOUT_BYTES / GIB,
        f"orchestrator.batch_size={orchestrator.batch_size} with oversampling_factor="
        f"{orchestrator.oversampling_factor:g} keeps {rollouts:.3g} rollouts under way",
    )
    for key, deadline_s in (
        ("inference.startup_timeout_s", config.inference.startup_timeout_s),
        ("inference.update_timeout_s", config.inference.update_timeout_s),
        ("trainer.ready_timeout_s", config.trainer.ready_timeout_s),
        ("trainer.batch_timeout_s", config.trainer.batch_timeout_s),
        ("trainer.finish_timeout_s", config.trainer.finish_timeout_s),
        ("orchestrator.batch_timeout_s", orchestrator.batch_timeout_s),
        ("orchestrator.policy_timeout_s", orchestrator.policy_timeout_s),
    ):
        if deadline_s < SHORTEST_S:
            raise ConfigError(f"{key}={deadline_s:g} must be at least {SHORTEST_S:g} s: nothing is done sooner")


def check_nodes(config: TrainConfig) -> None:
    """Raise ConfigError for a node that is something else than its schema says: all else here reads their fields."""
    teacher = config.teacher if isinstance(config.teacher, TeacherConfig) else None
    nodes = [
        ("orchestrator", config.orchestrator, "batch_size"),
        ("orchestrator.eval", getattr(config.orchestrator, "eval", None), "every"),
        ("orchestrator.stop", getattr(config.orchestrator, "stop", None), "target"),
        ("trainer", config.trainer, "seq_len"),
        ("inference", config.inference, "urls"),
        ("teacher", teacher, "base_url"),
        *([("teacher.inference", teacher.inference, "urls")] if teacher and teacher.model is not None else []),
    ]
    for name, node, field in nodes:
        if not dataclasses.is_dataclass(node) or not hasattr(node, field):
            raise ConfigError(f"{name} has no schema: let its conf file begin with defaults: [default, _self_]")


def check_run_name(name: str) -> None:
    """Refuse a name that is not one directory's, or that a terminal or a log cannot show."""
    if name in ("", ".", "..") or set(name) & set("/\\") or not name.isprintable() or name != name.strip():
        raise ConfigError(f"run.name={name[:80]!r} must be one directory's name; run.dir takes a whole path")
    if len(name.encode()) > MAX_NAME:
        raise ConfigError(
            f"run.name={name[:40]!r}… has {len(name.encode())} bytes: a file's name has at most {MAX_NAME}"
        )


def validate_server(
    model: ModelConfig, inference: InferenceConfig, prefix: str = "", *, served: bool = True, weights: bool = True
) -> None:
    """Two nodes under `prefix` of checked bounds. `served`: they are in use; `weights`: the model must have them."""
    check_device(inference.device, f"{prefix}inference.device")
    check_model(model.path, f"{prefix}model.path", weights=weights)
    folder = local_folder(model.path)
    if served and folder is not None and not any("hf" in str(option) for option in inference.args):
        where = f"{prefix}model.path={model.path!r}"
        check_length(model.max_model_len, positions(read_config(folder, where)), f"{prefix}model.", model.path)
    if inference.in_process:
        return check_threads(inference.threads, f"{prefix}inference.threads")
    for place, url in enumerate(inference.urls):
        check_url(url, f"{prefix}inference.urls", "http://127.0.0.1:8000")
        if url in inference.urls[:place]:
            raise ConfigError(f"{prefix}inference.urls names {url} twice: each is another server")
    if inference.urls:
        if inference.servers > 1:
            raise ConfigError(
                f"{prefix}inference.servers={inference.servers} says how many are started, and inference.urls names "
                f"{len(inference.urls)} that run: leave one of the two out"
            )
        if inference.threads is not None:
            raise ConfigError(
                f"{prefix}inference.threads={inference.threads}: the engines of inference.urls have run since before, "
                "with threads of their own: leave it out"
            )
        return
    if inference.port is not None and inference.port + inference.servers - 1 > LAST_PORT:
        raise ConfigError(
            f"{prefix}inference.port={inference.port}: {inference.servers} servers take the ports from there on, and "
            f"the last one is {LAST_PORT}"
        )
    if not inference.host.strip() or not inference.host.isprintable():
        raise ConfigError(f"{prefix}inference.host={inference.host[:80]!r} is no address: leave it out for 127.0.0.1")
    device = resolve_device(inference.device)
    check_options(inference.args, prefix, device=device)
    check_threads(inference.threads, f"{prefix}inference.threads")
    if device == "cpu":
        check_servers(inference, f"{prefix}inference")
        of_each = f" for each of {inference.servers} servers" if inference.servers > 1 else ""
        check_memory(
            inference.kv_cache_gb * inference.servers,
            f"{prefix}inference.kv_cache_gb={inference.kv_cache_gb}{of_each}",
        )
    if inference.host not in ("127.0.0.1", "localhost", "::1"):
        warnings.warn(f"{prefix}inference.host={inference.host}: the engine listens beyond this machine", stacklevel=3)


def ports(inference: InferenceConfig) -> range:
    """The ports that the servers are to have; none where they take free ones."""
    return range(0) if inference.port is None else range(inference.port, inference.port + inference.servers)


def validate_teacher(config: TrainConfig) -> None:
    """A teacher is either hosted by the launcher, or served elsewhere: then it has a name and an address, if needed."""
    teacher = config.teacher
    if teacher.model is not None:
        if teacher.base_url is not None:
            raise ConfigError(
                f"teacher.base_url={teacher.base_url}: teacher=local is hosted by the launcher, which chooses the "
                "address; for a model that is served already write teacher=endpoint teacher.name=… teacher.base_url=…"
            )
        if teacher.api_key_var is not None:
            raise ConfigError(
                "teacher.api_key_var: teacher=local has the run's own key; it belongs to teacher=endpoint"
            )
        if teacher.inference.urls:
            raise ConfigError(
                "teacher.inference.urls: for a model that is served already write teacher=endpoint teacher.base_url=…"
            )
        needed = {"served": hosts_teacher(config), "weights": not config.dry_run}
        validate_server(teacher.model, teacher.inference, "teacher.", **needed)
        policy = [] if config.inference.urls else ports(config.inference)
        if both := set(policy) & set(ports(teacher.inference)):
            raise ConfigError(
                f"inference.port and teacher.inference.port are both {min(both)}: leave one out for a free one"
                if config.inference.servers == teacher.inference.servers == 1
                else f"inference.port and teacher.inference.port: servers of both would have port {min(both)}: leave "
                "one out for free ones"
            )
    elif not (teacher.name and teacher.base_url):
        missing = "base_url" if teacher.name else "name"
        for where, node in [config.node_of(env, "algo") for env in config.envs]:
            for key, reference in frozen_models(plain(node), where):
                if (reference.name, reference.base_url) == (teacher.name, teacher.base_url):
                    raise ConfigError(
                        f"teacher.{missing} has no value, and {key} refers to it: a model that is served already needs "
                        "teacher.name=<served name> teacher.base_url=http://host:port/v1"
                    )


def hosts_teacher(config: TrainConfig) -> bool:
    """Whether the launcher serves the frozen model of `teacher` for the run: an algorithm asks it."""
    algorithms = [plain(config.node_of(env, "algo")[1]) for env in config.envs]
    return any(config.hosts(each) for node in algorithms for _, each in frozen_models(node, ""))


def validate_envs(config: TrainConfig) -> None:
    """Names, group sizes and nodes of the envs."""
    if not config.envs:
        raise ConfigError("envs is empty, no env: choose one with env=<name>, e.g. env=math")
    batch_size, unread = config.orchestrator.batch_size, config.orchestrator.on_evaluations
    if unread and all(env.eval_args is None for env in config.envs.values()):
        keys = " or ".join(f"envs.{name}.eval_args" for name in config.envs)
        raise ConfigError(f"orchestrator.{unread[0]} looks at evaluations, and no env has any: set {keys}, now null")
    for name, env in config.envs.items():
        check_env_name(name)
        key, group_size = config.group_size_of(name)
        if batch_size is not None and batch_size % group_size:
            raise ConfigError(f"orchestrator.batch_size={batch_size} must be divisible by {key}={group_size}")
        for group in ("algo", "loss", "renderer", "buffer"):
            own = getattr(env, group)
            if own is not None and not (hasattr(own, "_target_") or (isinstance(own, dict) and "_target_" in own)):
                raise ConfigError(
                    f"envs.{name}.{group}={own!r} has no _target_: choose the env's own with "
                    f"+{group}@envs.{name}.{group}=<name>"
                )


def check_env_name(name: str) -> None:
    """Refuse a name that metrics or files cannot carry."""
    if name == "all" or not re.fullmatch(r"[\w.-]+", name):
        raise ConfigError(
            f"envs: {name!r} cannot name an env: use letters, digits and _.- ('all' is taken by the metrics)"
        )


def check_device(device: str, key: str) -> None:
    """Refuse a device that this machine does not have."""
    if device == "cuda" and not has_gpu():
        raise ConfigError(f"{key}=cuda: {lacks_gpu()}")
    if resolve_device(device) == "cuda":
        check_compiler()


def resolve_device(device: str) -> str:
    """`cpu` or `cuda`."""
    if device != "auto":
        return device
    return "cuda" if has_gpu() else "cpu"


def has_gpu() -> bool:
    """Whether this machine, or the one that the config is for, has a GPU that the run may and can use."""
    return lacks_gpu() is None


def lacks_gpu() -> str | None:
    """Why a run cannot use a GPU here; None where it can."""
    if (given := assumed().gpus) is not None:
        return None if given else "machine.gpus=0"
    if not hardware.listed():
        return "nvidia-smi finds no GPU on this machine"
    if not visible_gpus():
        return f"{VISIBLE} is set and shows none of this machine's GPUs"
    if not hardware.has_gpu_packages():
        return "the packages installed here are those for a CPU: PRL_ENGINE=gpu scripts/setup installs the others"
    return None
