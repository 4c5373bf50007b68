"""What an address and a model are refused for before a process starts.

What engine and trainer say themselves when they load a model is left to them.
"""

from prl.config.hardware import MachineConfig
from prl.config.model_folder import check_length, embedding_rows, positions
from prl.config.schema import InferenceConfig, ModelConfig, TrainConfig
from prl.config.validate import ports
from prl.errors import ConfigError, PrlError
from prl.launch.inline import InlineLauncher
from prl.launch.launcher import Launcher
from prl.launch.local import LocalLauncher, free_port
from prl.text import in_one_line
from prl.trainer import architecture


def check_engines(config: TrainConfig, launcher: Launcher, *, hosted: bool) -> None:
    """Refuse hosts and ports that the engines cannot have here, and processes for a launcher that starts none.

    `hosted` says whether a teacher is one of the engines.

    Another launcher may start them elsewhere, a dry run be about another machine, and a warm engine may have the port
    already.
    """
    inline = isinstance(launcher, InlineLauncher)
    if inline and config.trainer.num_processes > 1:
        ranks = config.trainer.num_processes
        raise ConfigError(f"trainer.num_processes={ranks}: launcher=inline has one thread for it")
    for node, prefix, needed in (
        (config.inference, "inference.", not config.inference.urls),
        (config.teacher.inference, "teacher.inference.", hosted),
    ):
        if not needed or node.in_process:
            continue
        if inline:
            remedy = "teacher=inline" if node is config.teacher.inference else "inference=transformers"
            raise ConfigError(f"launcher=inline starts no server: choose {remedy}, or launcher=local")
        if isinstance(launcher, LocalLauncher) and config.machine == MachineConfig():
            check_address(node, prefix)


def check_address(inference: InferenceConfig, prefix: str) -> None:
    """Raise ConfigError where the engines could not listen at the host and ports of the node under `prefix`."""
    for port in ports(inference) or [None]:
        try:
            free_port(inference.host, port)
        except PrlError as error:
            where = f"{prefix}port={port}" if port is not None else f"{prefix}host={inference.host[:80]!r}"
            raise ConfigError(f"{where}: {error}: choose another, or leave it out") from error


def check_loadable(model: ModelConfig, inference: InferenceConfig, prefix: str, *, trained: bool) -> int | None:
    """Return how many rows the model's embedding has, by its weights' headers or its config; None if neither says so.

    Raises ConfigError for a config that transformers cannot read, and for a model that would be trained or sampled from
    as another one, without a word.

    Args:
        model: The model's node.
        inference: That of its engine.
        prefix: Of its keys, for messages.
        trained: Whether the trainer is to load it.
    """
    from transformers import AutoConfig

    device = None if inference.urls or inference.in_process else inference.device_type
    where = f"{prefix}path={model.path!r}"
    try:
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except Exception as error:  # transformers has no common class of errors
        raise ConfigError(f"{where}: its config cannot be read ({in_one_line(error)})") from error
    try:
        if trained:
            architecture.check_architecture(config, model.path)
        architecture.check_served(config, model.path, device)
    except ValueError as error:
        raise ConfigError(f"{prefix}path={error}") from error
    text = config.get_text_config()
    if getattr(text, "num_hidden_layers", None) == 0:
        raise ConfigError(f"{where}: it has no layers (num_hidden_layers=0)")
    rows = embedding_rows(model.path)
    check_length(model.max_model_len, positions(config.to_dict()), prefix, model.path)
    return rows if rows is not None else getattr(text, "vocab_size", None)
