"""What a model, its tokenizer and an address are refused for, before a process starts that would die of it."""

import errno
import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prl.config.engine_options import HEAD_SIZES_ON_A_CPU, as_arguments
from prl.config.hardware import MachineConfig
from prl.config.instantiate import nearest
from prl.config.lora import LoraConfig
from prl.config.model_folder import check_length, embedding_rows, local_folder, positions
from prl.config.schema import InferenceConfig, ModelConfig, PolicyModelConfig, TrainConfig
from prl.config.validate import ports, resolve_device
from prl.errors import ConfigError
from prl.launch import shapes
from prl.launch.launcher import Launcher
from prl.launch.local import LocalLauncher
from prl.launch.shapes import loaded_tensors
from prl.remembered import remembered
from prl.text import in_one_line
from prl.trainer import architecture

ARGUMENTS_S = 600.0
"""[s] By then vLLM has been imported, on any machine."""


def check_engines(config: TrainConfig, launcher: Launcher, *, hosted: bool) -> None:
    """Refuse hosts and ports that the engines cannot have on this machine, and arguments that vLLM does not take.

    `hosted` says whether a teacher is one of the engines.

    Another launcher may start them elsewhere, a dry run be about another machine, and a warm engine may have the port
    already.
    """
    if isinstance(launcher, LocalLauncher):
        for node, prefix, needed in (
            (config.inference, "inference.", not config.inference.urls),
            (config.teacher.inference, "teacher.inference.", hosted),
        ):
            if needed:
                if config.machine == MachineConfig():
                    check_address(node, prefix)
                check_arguments(node, prefix)


def check_address(inference: InferenceConfig, prefix: str) -> None:
    """Raise ConfigError where the engines could not listen at the host and ports of the node under `prefix`."""
    for port in ports(inference) or [None]:
        check_port(inference.host, port, prefix)


def check_port(host: str, port: int | None, prefix: str) -> None:
    """As `check_address`, for one port; None = any free one."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port or 0, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"{prefix}host={host[:80]!r} is no address and no name of one ({in_one_line(error)}): leave it out for "
            "127.0.0.1"
        ) from error
    with socket.socket(family, kind) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT can be had
        try:
            sock.bind(address)
        except OSError as error:
            if port is None or error.errno == errno.EADDRNOTAVAIL:
                raise ConfigError(
                    f"{prefix}host={host!r} is not an address of this machine ({error.strerror})"
                ) from error
            raise ConfigError(
                f"{prefix}port={port} cannot be had on {host} ({error.strerror}): choose another, or leave it "
                "out for a free one"
            ) from error


def check_arguments(inference: InferenceConfig, prefix: str) -> None:
    """Raise ConfigError where vLLM's own parser refuses `args`. It takes seconds to import: where there are any."""
    if not inference.args:
        return
    command = [sys.executable, "-m", "prl.inference._vllm_start", *as_arguments(inference.args)]
    env = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"}
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, encoding="utf-8", errors="replace", timeout=ARGUMENTS_S
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"{prefix}args: vLLM did not say within {ARGUMENTS_S:g} s whether it takes them: start again once the "
            "machine has less to do, or leave them out"
        ) from error
    if done.returncode == 2:  # argparse's; what else goes wrong the engine will say
        said = done.stderr.rpartition("error: ")[2]
        raise ConfigError(f"{prefix}args: vLLM does not take them ({in_one_line(ValueError(said))})")


@dataclass(frozen=True)
class ModelSizes:
    """What a run asks of a model's config."""

    positions: int | None
    """Longest sequence, tokens; None where nothing limits it."""
    rows: int | None
    """Of the embedding: of a folder by its weights' headers, else by the config; None if unknown."""
    head: int | None = None
    """Of an attention head; None if unknown, or where attention is latent."""
    heads: int | None = None
    """Attention heads; None if unknown."""


def check_loadable(model: ModelConfig, inference: InferenceConfig, prefix: str, *, trained: bool) -> ModelSizes:
    """Return what the model's config says of sizes, as transformers reads it.

    Raises ConfigError for an architecture that is not known or trained, for weights that are not the config's, and for
    what the engine cannot serve. A folder that has passed needs neither torch nor transformers for it again.

    Args:
        model: The model's node.
        inference: That of its engine.
        prefix: Of its keys, for messages.
        trained: Whether the trainer is to load it.
    """
    where, folder = f"{prefix}path={model.path!r}", local_folder(model.path)
    lora = lora_of(model)
    device = None if inference.urls else resolve_device(inference.device)

    def look() -> ModelSizes:
        return sizes_of(model, where, prefix, trained=trained, device=device)

    if folder is None or model.trust_remote_code or not (folder / "config.json").is_file():
        sizes = look()
    else:
        files = [Path(file) for file in (__file__, shapes.__file__, architecture.__file__)]
        content = [(folder / "config.json").read_bytes(), json.dumps(loaded_tensors(folder, where)).encode()]
        if lora is not None:
            files.append(files[-1].with_name("lora.py"))
            content.append(json.dumps(lora.target_modules).encode())
        code = [file.read_bytes() for file in files]
        sizes = remembered([*code, *content, str((trained, device)).encode()], look, ModelSizes)
    check_length(model.max_model_len, sizes.positions, prefix, model.path)
    if device == "cpu" and sizes.head is not None and sizes.head not in HEAD_SIZES_ON_A_CPU:
        raise ConfigError(
            f"{where}: its attention heads have {sizes.head} dimensions, and vLLM's engine on a CPU takes heads of "
            f"{', '.join(map(str, HEAD_SIZES_ON_A_CPU))}: choose another model"
        )
    spanned = inference.tensor_parallel_size
    if not inference.urls and sizes.heads is not None and sizes.heads % spanned:
        raise ConfigError(
            f"{prefix.replace('model.', 'inference.')}tensor_parallel_size={spanned} does not divide the {sizes.heads} "
            f"attention heads of {where}: each GPU has the same number of them"
        )
    return sizes


def lora_of(model: ModelConfig) -> LoraConfig | None:
    """The adapters that a model is to be trained with; None for none."""
    lora = model.lora if isinstance(model, PolicyModelConfig) else None
    return lora if lora is not None and lora.rank is not None else None


def check_adapters(lora: LoraConfig, config: Any, where: str) -> None:
    """Raise ConfigError for adapters of layers that the model of a config has not."""
    from prl.trainer.lora import check_targets  # torch

    with shapes.quiet():
        check_targets(shapes.build(config, where, trained=True), lora.target_modules)


def sizes_of(model: ModelConfig, where: str, prefix: str, *, trained: bool, device: str | None) -> ModelSizes:
    """What `check_loadable` returns and raises, found with transformers."""
    from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig, __version__

    try:
        kind = PretrainedConfig.get_config_dict(model.path)[0].get("model_type")
        if not model.trust_remote_code and kind is not None and kind not in CONFIG_MAPPING:
            raise ConfigError(
                f"{where}: its model_type {str(kind)[:80]!r} is not known to transformers {__version__}: a newer one "
                f"may know it, or {prefix}trust_remote_code=true where code comes with the model"
                + (f"; {near}" if (near := nearest(str(kind), CONFIG_MAPPING, "")).startswith("did") else "")
            )
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except ConfigError:
        raise
    except Exception as error:  # transformers has no common class of errors
        raise ConfigError(f"{where}: its config cannot be read ({in_one_line(error)})") from error
    try:
        if trained:
            architecture.check_architecture(config, model.path)
        architecture.check_served(config, model.path, device)
    except ValueError as error:
        raise ConfigError(f"{prefix}path={error}") from error
    shapes.check_shapes(model, config, where, trained=trained)
    if (lora := lora_of(model)) is not None and not shapes.is_beyond(model, config):
        check_adapters(lora, config, where)
    rows, text = embedding_rows(model.path), config.get_text_config()
    known = getattr(text, "vocab_size", None)
    rows = rows if rows is not None else known if isinstance(known, int) else None
    if shapes.number(text, "num_hidden_layers") == 0:
        raise ConfigError(f"{where}: it has no layers (num_hidden_layers=0)")
    return ModelSizes(
        positions(config.to_dict()), rows, shapes.head_size(text), shapes.number(text, "num_attention_heads")
    )
