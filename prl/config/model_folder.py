"""A model folder, read without torch: its config, its tokenizer's files, the headers of its weights.

A folder that cannot be loaded is refused here, in a moment, rather than by the engine and the trainer once they run.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from prl.base.errors import UNREADABLE, ConfigError
from prl.models import make

TOKENIZERS = ("tokenizer.json", "vocab*", "*.model", "*.tiktoken", "tokenizer.py", "tokenization*.py")
"""Files of which a folder with a tokenizer has one. Not `tokenizer_config.json`: it has no vocabulary."""
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""Keys of a model's config that tell how many positions it has."""
SCALED = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""Rope types whose number of positions has the scaling factor in it."""
INDEX = "model.safetensors.index.json"
PROCESSORS = tuple(f"{kind}_config.json" for kind in ("preprocessor", "processor", "video_preprocessor"))
"""Files of what makes tokens of pictures and sounds."""
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight", "tok_embeddings.weight")


def check_model(path: str, key: str, *, weights: bool = True) -> None:
    """A path that looks like a folder must be a model folder; anything else is left to the hub.

    Without `weights` it need have none.

    A model that prl makes from a package (`prl.models.MADE`) is made here if it is not there.

    Raises ConfigError naming the `key` and what is missing or damaged.
    """
    if not path.strip() or not path.isprintable():
        raise ConfigError(f"{key}={path[:80]!r}: give a model folder, or a model's name on the hub")
    try:
        folder = local_folder(path)
        if folder is None or make(folder):
            return
        where = f"{key}={path!r}"
        if not folder.is_dir():
            raise ConfigError(f"{where}: there is no such folder")
        read_config(folder, where)
        if (weights or has_weights(folder)) and not dict(tensors_of(folder, where)):
            raise ConfigError(f"{where} has no weights: its *.safetensors files hold no tensor")
        check_tokenizer_files(folder, where)
    except OSError as error:
        raise ConfigError(f"{key}={path[:200]!r} cannot be read: {error.strerror or error}") from error


def local_folder(path: str) -> Path | None:
    """The folder that a model's path names; None for a name on the hub."""
    folder = Path(os.path.expanduser(path) if path.startswith(("~/", "~\\")) else path)
    # `owner/name` may be both; a folder of that name here goes before the hub.
    looks_local = folder.is_absolute() or path.startswith((".", "~")) or folder.exists()
    return folder if looks_local else None


def read_config(folder: Path, where: str) -> dict[str, Any]:
    """The model's `config.json`. Raises ConfigError where it is missing or broken."""
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError(f"{where} is not a model folder: it has no config.json{instead(folder)}")
    try:
        config = json.loads(file.read_bytes())
    except UNREADABLE as error:
        raise ConfigError(f"{where}: its config.json is broken: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ConfigError(f"{where}: its config.json is not that of a model: it names no model_type")
    return config


def check_tokenizer_files(folder: Path, where: str) -> None:
    """Raise ConfigError for a folder without a tokenizer, such as one of the weights that a trainer publishes."""
    if not any(any(folder.glob(pattern)) for pattern in TOKENIZERS):
        hint = instead(folder.parent.parent) or ": copy the files of the tokenizer that the model was trained with"
        raise ConfigError(f"{where} has no tokenizer, none of {', '.join(TOKENIZERS[:4])}{hint}")


def instead(folder: Path) -> str:
    """Return the folder to give in place of this one: of a run its newest checkpoint, of an adapter its model;
    else ''."""
    from prl.base.checkpoint_folders import checkpoint_path, steps_of  # as above

    if (folder / "adapter_config.json").is_file() and (folder.parent / "config.json").is_file():
        return f": it is an adapter; the model with it merged is {folder.parent}"
    steps = steps_of(folder)
    return f": give a checkpoint, {checkpoint_path(folder, steps[-1])}" if steps else ""


def indexed_files(folder: Path) -> set[str]:
    """Return the names of the files that a folder's index of weights has; none where it has no index.

    Raises ValueError for an index that cannot be read, or that names what is no file of the folder.
    """
    index = folder / INDEX
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values()) if index.is_file() else set()
        # A name with a folder in it could point to any file of the machine.
        bad = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
    except (AttributeError, KeyError, TypeError, *UNREADABLE) as error:
        raise ValueError(f"{INDEX} is broken: {error!r}") from error
    if bad:
        raise ValueError(f"{INDEX} names {min(bad)!r}, which is no file of this folder")
    return names


def has_weights(folder: Path) -> bool:
    """Return whether a model folder has files of weights that prl would load."""
    return any(folder.glob("*.safetensors"))


def tensors_of(folder: Path, where: str) -> Iterator[tuple[str, list[int]]]:
    """Names and shapes of the tensors in a folder's safetensors files, of which headers alone are read.

    Raises ConfigError for files that are missing or damaged.
    """
    from safetensors import SafetensorError, safe_open  # composing a config needs none

    files = sorted(folder.glob("*.safetensors"))
    try:
        indexed_files(folder)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    if not files:
        pickled = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
        why = f" ({pickled[0]} is a pickle, which prl does not load; save it as safetensors)" if pickled else ""
        raise ConfigError(f"{where} has no weights: *.safetensors files are missing{why}")
    for file in files:
        try:
            with safe_open(file, "np") as opened:
                yield from [(name, opened.get_slice(name).get_shape()) for name in opened.keys()]  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{where}: {file.name} is damaged: {error}") from error


def positions(config: dict[str, Any]) -> int | None:
    """The longest sequence that a model's config allows; None where it does not say."""
    text = config.get("text_config")
    config = text if isinstance(text, dict) else config
    known: list[int] = [config[key] for key in POSITIONS if type(config.get(key)) is int and config[key] > 0]
    if not known:
        return None
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    nested = [part for part in rope.values() if isinstance(part, dict)] if isinstance(rope, dict) else []
    for part in nested or [rope]:
        factor = part.get("factor") if isinstance(part, dict) else None
        if isinstance(factor, int | float) and part.get("rope_type", part.get("type")) not in SCALED:
            # The config counts positions without the factor by which rope is stretched.
            return int(min(known) * max(factor, 1))
    return min(known)


def check_length(max_model_len: int, limit: int | None, prefix: str, path: str) -> None:
    """Raise ConfigError where sequences are to be longer than the model's `limit`; `prefix` is of its keys."""
    if limit is not None and max_model_len > limit and not os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN"):
        raise ConfigError(f"{prefix}max_model_len={max_model_len} is above the {limit} positions of {path!r}")


def embedding_rows(path: str) -> int | None:
    """Rows of a local model's token embedding, from the headers; None where no tensor has a name known for one."""
    folder = local_folder(path)
    result = dict(tensors_of(folder, path)) if folder is not None and has_weights(folder) else {}
    rows = [shape[0] for name, shape in result.items() if name.endswith(EMBEDDINGS) and len(shape) == 2]
    return max(rows, default=None)


def tokenizer_files(path: str, *, trust_remote_code: bool) -> dict[str, bytes]:
    """The files of a model's tokenizer, by path in a model folder, for `write_files`.

    They are in memory, so that a run needs the model's folder at its start alone: it may be a checkpoint of another
    run, which that removes.
    """
    from transformers import AutoTokenizer  # it takes seconds

    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = (file for file in Path(folder).rglob("*") if file.is_file())
        return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def file_of(path: str, name: str) -> Path | None:
    """A file of a model, in its folder or in the hub's cache; None where it has none."""
    from transformers.utils import cached_file

    found = cached_file(
        path, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
    return None if found is None else Path(found)


def sees(config: Any) -> bool:
    """Return whether a model has a vision tower, by its config: transformers' object, or the content of its file."""
    if isinstance(config, dict):
        return config.get("vision_config") is not None
    return getattr(config, "vision_config", None) is not None


def sees_at(path: str) -> bool:
    """Return whether the model at a path `sees`; not by a config that cannot be read, which is refused elsewhere."""
    try:
        file = file_of(path, "config.json")
        return file is not None and sees(json.loads(file.read_bytes()))
    except (OSError, *UNREADABLE):
        return False


def companion_files(path: str) -> dict[str, bytes]:
    """Return what loading a model takes beside weights and tokenizer, by path: config, its processors' files, and its
    code.

    Code of another repository (`repo--module.Class` in an `auto_map`) stays there.
    """
    names = ("config.json", *PROCESSORS, "chat_template.json")
    files = {name: file for name in names if (file := file_of(path, name)) is not None}
    for file in list(files.values()):
        classes = json.dumps(json.loads(file.read_bytes()).get("auto_map"))
        for folder in set(re.findall(r'"((?:\w+/)*)\w+\.\w+"', classes)):  # code imports from its own folder alone
            files |= {folder + source.name: source for source in (file.parent / folder).glob("*.py")}
    return {name: file.read_bytes() for name, file in files.items()}


def write_files(files: Mapping[str, bytes], folder: Path) -> None:
    """Write files, by path in `folder`, into it."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
