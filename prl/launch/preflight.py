"""What a run needs beside its config, looked at before anything starts: tokenizers, renderers, tasks."""

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prl.config.instantiate import function, knobs_of, target_of
from prl.config.schema import ModelConfig, TrainConfig
from prl.episodes.environment import Environment
from prl.errors import ConfigError
from prl.inference.auth import TOKEN_VARIABLE
from prl.inference.sampler import derive_seed
from prl.launch.components import RunComponents
from prl.orchestrator.buffer.task_buffer import warn_of_other_envs

if TYPE_CHECKING:
    from renderers.base import Renderer
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(model: ModelConfig, key: str) -> "PreTrainedTokenizerBase":
    """The model's tokenizer; `key` names its path in the config, for messages."""
    from transformers import AutoTokenizer

    local = Path(model.path).expanduser().is_dir()
    try:
        return AutoTokenizer.from_pretrained(
            model.path, trust_remote_code=model.trust_remote_code, local_files_only=local
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{key}={model.path!r}: no tokenizer there, on this machine or on the hub ({error})"
        ) from error


def check_vocabulary(policy: Any, teacher: Any, config: TrainConfig) -> None:
    """Refuse a hosted teacher with another tokenizer: tokens go to it as ids."""
    hosted = config.teacher.model
    if hosted is not None and policy.get_vocab() != teacher.get_vocab():
        raise ConfigError(
            f"the teacher ({hosted.path}) has another tokenizer than the policy ({config.model.path}): "
            "choose one of the policy's family with teacher.model.path, or teacher=endpoint"
        )


def make_renderers(config: TrainConfig, components: RunComponents, tokenizer: Any) -> dict[str, "Renderer"]:
    """The renderer of each env; envs that share the run's share the object."""
    made: dict[str, Renderer] = {}
    renderers: dict[str, Renderer] = {}
    for name, env in components.envs.items():
        where, node = env.renderer
        if where not in made:
            options = {**knobs_of(node), "where": where}
            if options.get("name") == "auto" and config.model.renderer is not None:
                options |= {"name": config.model.renderer, "name_key": "model.renderer"}
            made[where] = function({"_target_": target_of(node, "a renderer", where), **options}, where)(tokenizer)
        renderers[name] = made[where]
    return renderers


def load_buffers(config: TrainConfig, components: RunComponents, environments: dict[str, Environment]) -> None:
    """Give each env's buffer its tasks. Raises ConfigError where `load_from` leaves nothing to train on."""
    for name, env in components.envs.items():
        env.buffer.load(environments[name].tasks, seed=derive_seed(config.seed, f"buffer/{name}"), env_name=name)
    given = [getattr(env.buffer, "load_from", None) for env in components.envs.values()]
    folders = {folder for folder in given if folder is not None}
    for folder in sorted(folders):
        warn_of_other_envs(folder, config.envs)
    if all(env.buffer.ended for env in components.envs.values()):
        raise ConfigError(
            f"buffer.load_from={', '.join(sorted(folders))!r} retires every task of every env: take a share of them "
            "back with buffer.easy_fraction and buffer.hard_fraction, or all with buffer.refill=true"
        )


def run_token(config: TrainConfig) -> str:
    """A fresh token for this run's servers, or the one that running engines were started with."""
    if not config.inference.urls:
        return secrets.token_hex(24)
    if not os.environ.get(TOKEN_VARIABLE):
        raise ConfigError(f"inference.urls names servers that already run: set {TOKEN_VARIABLE} to their token")
    return os.environ[TOKEN_VARIABLE]
