"""The files of weights that a server is asked to load, and whether they are of the model that it runs.

A load that fails half-way leaves an engine without usable weights. Files are read by `safetensors`, which takes numbers
out of them and runs nothing.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from prl.base.errors import PrlError
from prl.base.text import in_one_line
from prl.config.model_folder import indexed_files

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
ADAPTER_CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"
"""Files of peft's folder of an adapter."""
OF_ADAPTER = "base_model.model."
"""Before the names of layers in it."""


class WeightsError(PrlError):
    """Weights that cannot be read."""


def folder_of(path: str) -> Path:
    """The folder of a model: `path` itself, or where the hub's files are kept."""
    folder = Path(path)
    if folder.is_dir():
        return folder.resolve()
    if folder.is_absolute() or not HUB_NAME.fullmatch(path):
        raise WeightsError(f"{path}: there is no such folder")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=["*.safetensors", "*.json"]))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path}: no such folder, and none on the hub: {in_one_line(error)}") from error


def files_of(folder: Path) -> list[Path]:
    """The safetensors files of a folder: those that its index names, where it has one."""
    try:
        names = indexed_files(folder) or {file.name for file in folder.glob("*.safetensors")}
    except ValueError as error:
        raise WeightsError(f"{folder}: {error}") from error
    if not names:
        raise WeightsError(f"{folder} holds no *.safetensors file")
    return [folder / name for name in sorted(names)]


def shapes_of(files: list[Path]) -> dict[str, list[int]]:
    """The shapes of tensors by name. Raises WeightsError for a file that is cut short or no safetensors."""
    return dict(read_each(files, lambda file, name: file.get_slice(name).get_shape()))


def shapes_at(path: str) -> dict[str, list[int]]:
    """The shapes of a model's tensors by name; empty where its files are no safetensors."""
    try:
        return shapes_of(files_of(folder_of(path)))
    except WeightsError:
        return {}


def refuse_other_policy(folder: Path, started: dict[str, list[int]], *, tied: bool) -> None:
    """Raise WeightsError for a folder without weights, or with those of another model (`refuse_other_model`)."""
    if not (folder / ADAPTER_CONFIG).is_file():
        return refuse_other_model(files_of(folder), started, tied=tied)
    matrices = shapes_of([folder / ADAPTER])
    for name in [name for name in matrices if name.endswith(".lora_B.weight")]:
        layer = name.removeprefix(OF_ADAPTER).removesuffix(".lora_B.weight")
        shape = [matrices[name][0], matrices[name.replace("lora_B", "lora_A")][1]]
        if started and started.get(f"{layer}.weight") != shape:
            raise WeightsError(f"an adapter is for {layer} of the shape {shape}, which this model has not")


def refuse_other_model(files: list[Path], started: dict[str, list[int]], *, tied: bool) -> None:
    """Raise WeightsError for weights of another model than `started`, the shapes of the server's first ones.

    transformers may write a model under other names than its own files have. Where names differ both ways, shapes of
    common names are compared alone, and vLLM's loading says what does not fit.

    Args:
        files: safetensors files.
        started: by name; empty where they are not known.
        tied: whether the output head is the embedding: it may be in a file or not.
    """
    shapes = shapes_of(files)
    head = {"lm_head.weight"} if tied else set()
    other = {name for name in shapes.keys() & started.keys() if shapes[name] != started[name]}
    missing, added = started.keys() - shapes.keys() - head, shapes.keys() - started.keys() - head
    if not (missing and added):
        other |= missing | added
    if started and other:
        raise WeightsError(f"{min(other)} in {files[0].parent} is not as in the server's model")


def tensors_of(files: list[Path]) -> "Iterator[tuple[str, torch.Tensor]]":
    """The tensors of safetensors files by name, one after the other. Raises WeightsError where they cannot be read."""
    return read_each(files, lambda file, name: file.get_tensor(name))


def read_each(files: list[Path], read: Callable[[Any, str], T]) -> Iterator[tuple[str, T]]:
    """Yield what `read` makes of each tensor in safetensors files, by name. Raises WeightsError where they cannot be
    read."""
    from safetensors import SafetensorError, safe_open

    for file in files:
        try:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    yield name, read(opened, name)
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{file} cannot be read: {in_one_line(error)}") from error


def policy_tensors(path: str, base: Path) -> "Iterator[tuple[str, torch.Tensor]]":
    """The tensors of a policy by name: of a model's folder, or of an adapter's added to those of the folder `base`."""
    folder = folder_of(path)
    if not (folder / ADAPTER_CONFIG).is_file():
        return tensors_of(files_of(folder))
    return merged(tensors_of(files_of(base)), folder)


def merged(tensors: "Iterable[tuple[str, torch.Tensor]]", adapter: Path) -> "Iterator[tuple[str, torch.Tensor]]":
    """Add an adapter of peft's to the weights of its layers, in float32: W + alpha / rank * B A (arXiv 2106.09685).

    Raises WeightsError for layers that are not among `tensors`.
    """
    config = json.loads((adapter / ADAPTER_CONFIG).read_bytes())
    scale = config["lora_alpha"] / config["r"]
    matrices = dict(tensors_of([adapter / ADAPTER]))
    for name, tensor in tensors:
        layer = OF_ADAPTER + name.removesuffix(".weight")
        if f"{layer}.lora_A.weight" in matrices:
            a = matrices.pop(f"{layer}.lora_A.weight")
            b = matrices.pop(f"{layer}.lora_B.weight")
            tensor = tensor.float() + b @ a * scale
        yield name, tensor
    if matrices:
        raise WeightsError(f"{min(matrices)} of {adapter} is for no weight of the server's model")
