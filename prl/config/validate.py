"""Checks across fields of a composed config. Everything here fails before a process starts."""

import math
import re
import shutil
import subprocess
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from prl.config.model_reference import frozen_models
from prl.config.schema import TrainConfig
from prl.errors import ConfigError

MIN_TEMPERATURE = 0.01  # vLLM raises lower ones to it
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def check(config: TrainConfig) -> None:
    """Raise ConfigError naming the first key that is out of range or does not fit the others."""
    for name in ("algo", "loss", "filters", "buffer", "orchestrator", "trainer", "inference", "monitor"):
        if isinstance(getattr(config, name), dict):
            raise ConfigError(
                f"{name} has no schema: let its conf file begin with defaults: [/schema/{name}@_here_: <name>, _self_], as those "
                f"of conf/{name} do"
            )
    one_of("trainer.device", config.trainer.device, ("auto", "cpu", "cuda"))
    one_of("trainer.schedule.decay", config.trainer.schedule.decay, ("constant", "linear", "cosine"))
    one_of("monitor.console", config.monitor.console, ("auto", "live", "plain", "quiet"))
    one_of("monitor.wandb", config.monitor.wandb, ("disabled", "offline", "online"))
    at_least(
        config,
        1,
        (
            "max_steps",
            "orchestrator.group_size",
            "orchestrator.eval.num_tasks",
            "orchestrator.eval.k",
            "trainer.num_processes",
            "trainer.tokens_per_forward",
            "trainer.head_chunk",
        ),
    )
    at_least(config, 2, ("trainer.seq_len",))
    at_least(
        config,
        0,
        (
            "seed",
            "orchestrator.max_async_level",
            "orchestrator.max_off_policy_steps",
            "trainer.schedule.warmup_steps",
            "trainer.optim.weight_decay",
        ),
    )
    at_most(config, 2**32 - 1, ("seed",))  # vLLM takes no more
    optional_at_least(config, 1, ("orchestrator.eval.every", "trainer.checkpoint_every"))
    positive(
        config,
        (
            "trainer.optim.lr",
            "trainer.optim.eps",
            "trainer.optim.max_grad_norm",
            "orchestrator.batch_timeout_s",
            "orchestrator.policy_timeout_s",
            "trainer.ready_timeout_s",
            "trainer.batch_timeout_s",
        ),
    )
    for key in ("decay_fraction", "min_ratio"):
        value = getattr(config.trainer.schedule, key)
        if not 0 <= value <= 1:
            raise ConfigError(f"trainer.schedule.{key} must be from 0 to 1, got {value}")
    if config.orchestrator.eval.temperature is not None and not config.orchestrator.eval.temperature >= 0:
        raise ConfigError(
            f"orchestrator.eval.temperature must be at least 0, got {config.orchestrator.eval.temperature}"
        )
    if not 0 <= config.orchestrator.max_error_share < 1:
        raise ConfigError(
            f"orchestrator.max_error_share must be from 0 to below 1, got {config.orchestrator.max_error_share}"
        )
    if len(config.trainer.optim.betas) != 2 or not all(0 <= beta < 1 for beta in config.trainer.optim.betas):
        raise ConfigError(
            f"trainer.optim.betas must be two numbers from 0 to below 1, got {list(config.trainer.optim.betas)}"
        )
    name = config.run.name
    if name in ("", ".", "..") or set(name) & set("/\\\0"):
        raise ConfigError(f"run.name={name!r} must be one directory's name; run.dir takes a whole path")
    if config.trainer.device == "cuda" and not has_gpu():
        raise ConfigError("trainer.device=cuda: nvidia-smi finds no GPU on this machine")
    check_loss(config.loss)
    check_batch(config)
    check_envs(config)
    check_sampling(config.algo, "algo", config)
    check_server(config)
    check_teacher(config)


def check_server(config: Any, prefix: str = "") -> None:
    """The `model` and `inference` nodes under `prefix`."""
    model, inference = f"{prefix}model", f"{prefix}inference"
    one_of(f"{model}.dtype", get(config, f"{model}.dtype"), ("auto", "float32", "bfloat16", "float16"))
    one_of(f"{inference}.device", get(config, f"{inference}.device"), ("auto", "cpu", "cuda"))
    integers = (f"{inference}.max_num_seqs", f"{inference}.tensor_parallel_size", f"{model}.max_model_len")
    at_least(config, 1, integers)
    at_least(config, 0, (f"{inference}.poll_s",))
    optional_at_least(config, 1, (f"{inference}.port",))
    share = f"{inference}.gpu_memory_utilization"
    positive(
        config, (*(f"{inference}.{key}" for key in ("kv_cache_gb", "startup_timeout_s", "update_timeout_s")), share)
    )
    at_most(config, 1, (share,))
    if get(config, f"{inference}.port") is not None:
        at_most(config, 65535, (f"{inference}.port",))
    if get(config, f"{inference}.device") == "cuda" and not has_gpu():
        raise ConfigError(f"{inference}.device=cuda: nvidia-smi finds no GPU on this machine")
    check_model(get(config, f"{model}.path"), f"{model}.path")
    host = get(config, f"{inference}.host")
    if host not in LOOPBACK and not get(config, f"{inference}.urls"):
        warnings.warn(f"{inference}.host={host}: the engine listens beyond this machine", stacklevel=3)


def check_teacher(config: TrainConfig) -> None:
    """A teacher is either hosted by the launcher or served elsewhere."""
    teacher = config.teacher
    if teacher.model is None and not (teacher.name and teacher.base_url):
        for env in config.envs:
            where, node = config.algo_of(env)
            for key, reference in frozen_models(node, where):
                if (reference.name, reference.base_url) == (teacher.name, teacher.base_url):
                    missing = "base_url" if teacher.name else "name"
                    raise ConfigError(
                        f"teacher.{missing} has no value, and {key} refers to it: a model that is served already needs "
                        "teacher.name=<served name> teacher.base_url=http://host:port/v1"
                    )
    if teacher.model is None:
        return
    if config.teacher.base_url is not None:
        raise ConfigError(
            f"teacher.base_url={config.teacher.base_url}: teacher=local is hosted by the launcher, which chooses the address; "
            "for a model that is served already write teacher=endpoint teacher.name=… teacher.base_url=…"
        )
    if config.teacher.api_key_var is not None:
        raise ConfigError("teacher.api_key_var: teacher=local has the run's own key; it belongs to teacher=endpoint")
    if config.teacher.inference.urls:
        raise ConfigError(
            "teacher.inference.urls: for a model that is served already write teacher=endpoint teacher.base_url=…"
        )
    check_server(config, "teacher.")


def check_loss(loss: Any) -> None:
    """The knobs of prl's own losses; a custom loss checks its own."""
    for key in ("dppo_mask_low", "dppo_mask_high", "kl_tau"):
        if not 0 <= getattr(loss, key, 0) < math.inf:
            raise ConfigError(f"loss.{key} must be at least 0 and finite, got {getattr(loss, key)}")
    if not math.isfinite(getattr(loss, "adv_tau", 0)):
        raise ConfigError(f"loss.adv_tau must be a finite number, got {loss.adv_tau}")
    if getattr(loss, "delta", None) is not None and not 0 < loss.delta < math.inf:
        raise ConfigError(f"loss.delta must be above 0 and finite, got {loss.delta}")


def check_batch(config: TrainConfig) -> None:
    orchestrator = config.orchestrator
    sizes = {key: getattr(orchestrator, key) for key in ("batch_size", "token_batch_size")}
    given = {key: size for key, size in sizes.items() if size is not None}
    if len(given) != 1:
        raise ConfigError(
            f"set exactly one of orchestrator.batch_size and orchestrator.token_batch_size (the other null); got {sizes}"
        )
    optional_at_least(config, 1, ("orchestrator.batch_size", "orchestrator.token_batch_size"))


def check_envs(config: TrainConfig) -> None:
    if not config.envs:
        raise ConfigError("no env: choose one with env=<name>, e.g. env=math")
    batch_size = config.orchestrator.batch_size
    for name, env in config.envs.items():
        if name == "all" or not re.fullmatch(r"[\w.-]+", name):
            raise ConfigError(f"envs: {name!r} cannot name an env: take letters, digits and _.- ('all' is taken)")
        group_size = config.orchestrator.group_size if env.group_size is None else env.group_size
        key = "orchestrator.group_size" if env.group_size is None else f"envs.{name}.group_size"
        if group_size < 1:
            raise ConfigError(f"{key} must be at least 1, got {group_size}")
        if batch_size is not None and batch_size % group_size:
            raise ConfigError(f"orchestrator.batch_size={batch_size} must be divisible by {key}={group_size}")
        for field in ("weight", "timeout_s"):
            if not 0 < getattr(env, field) < math.inf:
                raise ConfigError(f"envs.{name}.{field} must be above 0, got {getattr(env, field)}")
        if env.group_timeout_s is not None and not 0 < env.group_timeout_s < math.inf:
            raise ConfigError(f"envs.{name}.group_timeout_s must be above 0 (or null), got {env.group_timeout_s}")
        if env.algo is not None and not hasattr(env.algo, "_target_"):
            raise ConfigError(
                f"envs.{name}.algo={env.algo!r} is no algorithm: an env's own is chosen with +algo@envs.{name}.algo=<name>, e.g. "
                f"+algo@envs.{name}.algo=opd"
            )
        if env.algo is not None:
            check_sampling(env.algo, f"envs.{name}.algo", config)


def check_sampling(algo: Any, where: str, config: TrainConfig) -> None:
    sampling = getattr(algo, "sampling", None)
    if not hasattr(sampling, "temperature"):
        raise ConfigError(
            f"{where}.sampling is no sampling config: let the algorithm's conf file begin with "
            "defaults: [/schema/algo@_here_: custom_class, _self_]"
        )
    if not MIN_TEMPERATURE <= sampling.temperature < math.inf:
        raise ConfigError(
            f"{where}.sampling.temperature must be at least {MIN_TEMPERATURE}, got {sampling.temperature}: below that "
            "the engine samples at another temperature than the trainer divides by"
        )
    if sampling.max_tokens is not None and not 1 <= sampling.max_tokens < config.model.max_model_len:
        raise ConfigError(
            f"{where}.sampling.max_tokens={sampling.max_tokens} must be from 1 to below "
            f"model.max_model_len={config.model.max_model_len}, which holds the prompt too"
        )


def check_model(path: str, key: str) -> None:
    """A path that looks like a folder must be a model folder; anything else is left to the hub."""
    folder = Path(path).expanduser()
    looks_local = folder.is_absolute() or path.startswith((".", "~")) or folder.exists()
    if looks_local and not (folder / "config.json").is_file():
        raise ConfigError(f"{key}={path!r} is not a model folder: it has no config.json")
    if looks_local and not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{key}={path!r} has no weights: *.safetensors files are missing")


def resolve_device(device: str) -> str:
    """`cpu` or `cuda`."""
    if device != "auto":
        return device
    return "cuda" if has_gpu() else "cpu"


def has_gpu() -> bool:
    found = shutil.which("nvidia-smi") and subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False)
    return bool(found and found.returncode == 0 and found.stdout.strip())


def one_of(key: str, value: str, choices: Iterable[str]) -> None:
    if value not in choices:
        raise ConfigError(f"{key}={value!r}: choose one of {', '.join(choices)}")


def at_least(config: TrainConfig, low: float, keys: Iterable[str]) -> None:
    for key in keys:
        value = get(config, key)
        if not low <= value < math.inf:  # catches nan as well
            raise ConfigError(f"{key} must be at least {low}, got {value}")


def at_most(config: TrainConfig, high: float, keys: Iterable[str]) -> None:
    for key in keys:
        if not get(config, key) <= high:
            raise ConfigError(f"{key} must be at most {high}, got {get(config, key)}")


def optional_at_least(config: TrainConfig, low: float, keys: Iterable[str]) -> None:
    at_least(config, low, (key for key in keys if get(config, key) is not None))


def positive(config: TrainConfig, keys: Iterable[str]) -> None:
    for key in keys:
        if not 0 < get(config, key) < math.inf:
            raise ConfigError(f"{key} must be above 0, got {get(config, key)}")


def get(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config
