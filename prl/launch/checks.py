"""What a launcher and a model are refused for before a process starts.

What engine and trainer say themselves when they start and load a model is left to them.
"""

from prl.config.model_folder import check_length, positions
from prl.config.schema import ModelConfig, TrainConfig
from prl.errors import ConfigError
from prl.launch import specs
from prl.launch.inline import InlineLauncher
from prl.launch.launcher import Launcher
from prl.monitors.text import in_one_line
from prl.trainer import architecture
from prl.trainer.config import RayTransportConfig


def check_engines(config: TrainConfig, launcher: Launcher, *, hosted: bool) -> None:
    """Refuse engines and weights that do not go with the launcher. `hosted`: a teacher is one of the engines."""
    placed, carried = specs.places_processes(config), config.weights["_target_"] == RayTransportConfig._target_
    if carried and not placed:
        raise ConfigError("weights=ray goes between the nodes of launcher=ray: choose weights=files, or that launcher")
    if carried and config.engine.urls:
        raise ConfigError("weights=ray does not reach engine.urls, beyond launcher=ray: choose weights=files")
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


def check_loadable(model: ModelConfig, prefix: str, *, trained: bool) -> None:
    """Refuse a config that transformers cannot read, and a model that would silently be taken for another one.

    Args:
        model: The model's node.
        prefix: Of its keys, for messages.
        trained: Whether the trainer is to load it.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
        if trained:
            architecture.check_architecture(config, model.path)
    except Exception as error:  # transformers has no common class of errors
        raise ConfigError(f"{prefix}path={model.path!r}: {in_one_line(error)}") from error
    check_length(model.max_model_len, positions(config.to_dict()), prefix, model.path)
