"""What a launcher and a model are refused for before a process starts.

What engine and trainer say themselves when they start and load a model is left to them.
"""

from dataclasses import dataclass
from pathlib import Path

from prl.config.model_folder import check_length, embedding_rows, local_folder, positions
from prl.config.schema import InferenceConfig, ModelConfig, TrainConfig
from prl.errors import ConfigError
from prl.launch.inline import InlineLauncher
from prl.launch.launcher import Launcher
from prl.remembered import remembered
from prl.text import in_one_line
from prl.trainer import architecture


def check_engines(config: TrainConfig, launcher: Launcher, *, hosted: bool) -> None:
    """Refuse processes for a launcher that starts none. `hosted` says whether a teacher is one of the engines."""
    if not isinstance(launcher, InlineLauncher):
        return
    if config.trainer.num_processes > 1:
        ranks = config.trainer.num_processes
        raise ConfigError(f"trainer.num_processes={ranks}: launcher=inline has one thread for it")
    if not config.inference.urls and not config.inference.in_process:
        raise ConfigError("launcher=inline starts no server: choose inference=transformers, or launcher=local")
    if hosted and not config.teacher.inference.in_process:
        raise ConfigError("launcher=inline starts no server: choose teacher=inline, or launcher=local")


@dataclass(frozen=True)
class ModelSizes:
    """What a model's config says of sizes; None where it does not."""

    positions: int | None
    """Longest sequence, tokens."""
    rows: int | None
    """Of the embedding: of a folder by its weights' headers, else by the config."""


def check_loadable(model: ModelConfig, inference: InferenceConfig, prefix: str, *, trained: bool) -> int | None:
    """Return how many rows the model's embedding has; None where nothing says so.

    Raises ConfigError for a config that transformers cannot read, and for a model that would be trained or sampled from
    as another one, without a word. A folder that has passed needs no transformers for it again.

    Args:
        model: The model's node.
        inference: That of its engine.
        prefix: Of its keys, for messages.
        trained: Whether the trainer is to load it.
    """
    device = None if inference.urls or inference.in_process else inference.device_type

    def look() -> ModelSizes:
        return sizes_of(model, prefix, trained=trained, device=device)

    folder = local_folder(model.path)
    if folder is None or model.trust_remote_code or not (folder / "config.json").is_file():
        sizes = look()
    else:
        code = [Path(file).read_bytes() for file in (__file__, architecture.__file__)]
        rows = str((embedding_rows(model.path), trained, device))
        sizes = remembered([*code, (folder / "config.json").read_bytes(), rows.encode()], look, ModelSizes)
    check_length(model.max_model_len, sizes.positions, prefix, model.path)
    return sizes.rows


def sizes_of(model: ModelConfig, prefix: str, *, trained: bool, device: str | None) -> ModelSizes:
    """What `check_loadable` asks transformers. Raises ConfigError."""
    from transformers import AutoConfig

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
    rows = embedding_rows(model.path)
    if rows is None:
        rows = getattr(config.get_text_config(), "vocab_size", None)
    return ModelSizes(positions(config.to_dict()), rows)
