"""Checks of launcher and model before a process starts.

What engine and trainer say themselves when they start and load a model is left to them.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from prl.base.errors import ConfigError
from prl.base.text import in_one_line
from prl.config.model_folder import check_length, local_folder, positions
from prl.config.schema import ModelConfig
from prl.launch.plan import ModelPlan, RunPlan
from prl.trainer import architecture


def check_weights(plan: RunPlan, *, placed: bool, keep_best: bool) -> None:
    """Refuse weights that do not go with the rest of a run.

    Args:
        plan: The processes of the run.
        placed: Whether the launcher places them on a Ray cluster.
        keep_best: Whether the best policy of the evaluations is kept (`orchestrator.eval.keep_best`).
    """
    weights = plan.weights
    if weights.needs_ray and not placed:
        raise ConfigError("weights=ray goes between the nodes of launcher=ray: choose weights=files, or that launcher")
    if not weights.needs_shared_folder and plan.policy.urls:
        raise ConfigError("engine.urls are servers that the run does not start: they load weights=files alone")
    if plan.policy.spec.weight_transfer == "nccl" and "cpu" in (plan.policy.spec.device, plan.trainer.device):
        raise ConfigError("weights.backend=nccl goes between GPUs, of trainer and engine: choose weights.backend=gloo")
    if weights.writes_model:
        return
    if not plan.policy.engine.receives_weights:
        raise ConfigError("weights=transfer: this engine loads folders alone: choose engine=default, or weights=files")
    if keep_best:
        raise ConfigError("orchestrator.eval.keep_best copies a folder, weights=transfer writes none: weights=files")
    if plan.keeps_engines:
        raise ConfigError("sweep.share_engine has the engine load the base weights from a folder: weights=files")


def check_loadable(model: ModelConfig, plan: ModelPlan, prefix: str, *, trained: bool) -> int | None:
    """Refuse a config that transformers cannot read, and a model that would silently be taken for another one.

    Returns the rows of its embedding, as its config has them.

    Args:
        model: The model, as its config has it.
        plan: The plan of the model and its engine.
        prefix: The beginning of its keys, for messages.
        trained: Whether the trainer is to load it.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
        if trained:
            architecture.check_architecture(config, model.path, model.max_model_len)
    except Exception as error:  # transformers has no common class of errors
        # Without a network the hub's error alone would hide that a folder's name is misspelt.
        missing = isinstance(error, OSError) and local_folder(model.path) is None
        where = "there is no such folder, and on the hub: " if missing else ""
        raise ConfigError(f"{prefix}path={model.path!r}: {where}{in_one_line(error)}") from error
    check_length(model.max_model_len, positions(config.to_dict()), prefix, model.path)
    text = config.get_text_config()
    fault = None if plan.urls else plan.engine.fault_of(text.model_type, plan.spec.device)
    if fault:
        remedy = "engine=transformers" if prefix == "model." else "teacher=inline"
        raise ConfigError(f"{prefix}path={model.path!r}: {fault}: choose {remedy}, or a GPU")
    if plan.is_started and plan.spec.sees:
        lacking = plan.engine.lacks(plan.spec.device, pictures=True)
        if lacking:
            raise ConfigError(f"{prefix}path={model.path!r} sees pictures: {lacking}")
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
