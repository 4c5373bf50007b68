"""Checks of launcher and model before a process starts.

What engine and trainer say themselves when they start and load a model is left to them.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from prl.base.errors import ConfigError
from prl.base.text import in_one_line
from prl.config.build import build, class_of
from prl.config.model_folder import check_length, positions
from prl.config.schema import ModelConfig, TrainConfig
from prl.config.validate import places_processes
from prl.engines.base import Engine
from prl.launch.inline import InlineLauncher
from prl.launch.launcher import Launcher
from prl.trainer import architecture
from prl.weights.base import Weights


def check_engines(config: TrainConfig, launcher: Launcher, *, hosted: bool) -> None:
    """Refuse engines and weights that do not go with the launcher. `hosted`: a teacher is one of the engines."""
    placed = places_processes(config)
    weights = build(config.weights, Weights, "weights")
    if weights.needs_ray and not placed:
        raise ConfigError("weights=ray goes between the nodes of launcher=ray: choose weights=files, or that launcher")
    if not weights.needs_shared_folder and config.engine.urls:
        raise ConfigError("engine.urls are servers that the run does not start: they load weights=files alone")
    if not (weights.writes_model or class_of(config.engine, Engine, "engine").receives_weights):
        raise ConfigError("weights=transfer: this engine loads folders alone: choose engine=default, or weights=files")
    if not weights.writes_model and config.orchestrator.eval.keep_best:
        raise ConfigError("orchestrator.eval.keep_best copies a folder, weights=transfer writes none: weights=files")
    if not weights.writes_model and config.sweep.share_engine:
        raise ConfigError("sweep.share_engine has the engine load the base weights from a folder: weights=files")
    if weights.receiver == "nccl" and "cpu" in (config.engine.device_type, config.trainer.device_type):
        raise ConfigError("weights.backend=nccl goes between GPUs, of trainer and engine: choose weights.backend=gloo")
    if placed and config.engine.in_process:
        raise ConfigError("launcher=ray places processes, and engine=transformers has none: choose engine=default")
    if placed and config.sweep.share_engine:
        raise ConfigError("sweep.share_engine keeps engines of one process for the next run: not those of launcher=ray")
    if not isinstance(launcher, InlineLauncher):
        return
    if config.trainer.num_processes > 1:
        raise ConfigError(f"trainer.num_processes={config.trainer.num_processes}: launcher=inline has one thread")
    if not config.engine.urls and not config.engine.in_process:
        raise ConfigError("launcher=inline starts no server: choose engine=transformers, or launcher=local")
    if hosted and not config.teacher.engine.in_process:
        raise ConfigError("launcher=inline starts no server: choose teacher=inline, or launcher=local")


def check_loadable(model: ModelConfig, prefix: str, engine: Any, *, trained: bool) -> int | None:
    """Refuse a config that transformers cannot read, and a model that would silently be taken for another one.

    Returns the rows of its embedding, as its config has them.

    Args:
        model: The model's node.
        prefix: Of its keys, for messages.
        engine: What is to run it.
        trained: Whether the trainer is to load it.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
        if trained:
            architecture.check_architecture(config, model.path, model.max_model_len)
    except Exception as error:  # transformers has no common class of errors
        raise ConfigError(f"{prefix}path={model.path!r}: {in_one_line(error)}") from error
    check_length(model.max_model_len, positions(config.to_dict()), prefix, model.path)
    text = config.get_text_config()
    fault = None if engine.urls else class_of(engine, Engine, "engine").fault_of(engine, text.model_type)
    if fault:
        remedy = "engine=transformers" if prefix == "model." else "teacher=inline"
        raise ConfigError(f"{prefix}path={model.path!r}: {fault}: choose {remedy}, or a GPU")
    return getattr(text, "vocab_size", None)


def check_rows(path: str, rows: int | None, tokenizer: Any, prompts: Iterable[Sequence[int]]) -> None:
    """Refuse a model whose embedding has no row for a token that may come up, or that one of the prompts has.

    Tokens for pads, pictures and sounds come up in no text: models without these may lack them.
    """
    spared = {getattr(tokenizer, f"{kind}_token", None) for kind in ("pad", "image", "audio", "video")}
    known = [number for token, number in tokenizer.get_vocab().items() if token not in spared]
    largest = max(itertools.chain(known, *prompts))
    if rows is not None and largest >= rows:
        token = tokenizer.convert_ids_to_tokens(largest)
        raise ConfigError(
            f"model.path={path!r}: its tokenizer has {token!r} as token {largest}, its embedding has {rows} rows: give "
            "the model rows for all tokens (transformers' resize_token_embeddings), or the tokenizer no more tokens"
        )
