"""Weights that a server is asked to load, checked while it still runs on the old ones: names, shapes, kinds, finite.

A load that fails half-way leaves an engine without usable weights. Files are read by `safetensors`, which takes numbers
out of them and runs nothing.
"""

import copy
import functools
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prl.config.tensor_names import as_in_files
from prl.errors import UNREADABLE, PrlError
from prl.monitors.text import in_one_line

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
INDEX = "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")
"""Number formats of safetensors that a server turns into its own."""
LISTED = 3
"""Names in a message."""

Layout = dict[str, tuple[tuple[int, ...], str]]
"""Shape and number format of each tensor by name; `float` stands for those of `FLOATS`."""


class WeightsError(PrlError):
    """Weights that a server will not load: it goes on with the ones that it has."""


class ServedModel:
    """What the weights of a server must be like, which the model says that it was started with."""

    def __init__(self, model_config: Any):
        """`model_config` is vLLM's, copied: vLLM notes the path of the last load in the original."""
        self.config = copy.copy(model_config)
        tied = getattr(model_config.hf_config, "tie_word_embeddings", False)
        self.ignored = {"lm_head.weight"} if tied else set()
        """A head that is tied to the embedding may be in a file or not."""

    def check(self, path: str) -> str:
        """The folder that `path` names, a model's on the hub included, once its weights have passed.

        Raises:
            WeightsError: There are none, they cannot be read, are of another model or are not finite.
        """
        folder = folder_of(path)
        files = files_of(folder)
        self.check_layout(layout_of(files), str(folder))
        for file in files:
            refuse_not_finite(file)
        return str(folder)

    def check_layout(self, layout: Layout, what: str) -> None:
        """Raise WeightsError, which names `what`, for a layout of another model's weights."""
        problem = unlike(layout, self.as_started, self.ignored)
        if problem is not None and unlike(layout, self.as_written, self.ignored) is not None:
            raise WeightsError(f"{what}: {problem}")

    @functools.cached_property
    def as_started(self) -> Layout:
        """The layout of the files that the server was started with; empty where those are not safetensors."""
        try:
            return layout_of(files_of(folder_of(self.config.model, self.config.revision)))
        except WeightsError:
            return {}

    @functools.cached_property
    def as_written(self) -> Layout:
        """The layout of the model as transformers writes it, which may name tensors otherwise than the files at start.

        Empty where it cannot be known.
        """
        import torch
        from transformers import AutoModelForCausalLM

        config = self.config
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config.hf_config, trust_remote_code=config.trust_remote_code)
            parts = [as_in_files(model, name, tensor) for name, tensor in model.state_dict().items()]
        except Exception as error:  # a model's own code
            log.warning("transformers does not make %s: %s", config.model, error)
            return {}
        return {name: (tuple(each.shape), "float") for tensors in parts for name, each in tensors.items()}


def folder_of(path: str, revision: str | None = None) -> Path:
    """The folder of a model: `path` itself, or where the hub's files are kept."""
    folder = Path(path)
    if folder.is_dir():
        return folder.resolve()
    if folder.is_absolute() or not HUB_NAME.fullmatch(path):
        raise WeightsError(f"{path}: there is no such folder")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=["*.safetensors", "*.json"]))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path}: no such folder, and none on the hub: {in_one_line(error)}") from error


def files_of(folder: Path) -> list[Path]:
    """The safetensors files of a folder: those that its index names, where it has one."""
    names = {file.name for file in folder.glob("*.safetensors")}
    index = folder / INDEX
    if index.is_file():
        try:
            names = set(json.loads(index.read_bytes())["weight_map"].values())
        except (OSError, *UNREADABLE, KeyError, TypeError, AttributeError) as error:
            raise WeightsError(f"{index} cannot be read: {in_one_line(error)}") from error
    if not names:
        raise WeightsError(f"{folder} holds no *.safetensors file")
    for name in sorted(map(str, names)):
        if Path(name).name != name or not (folder / name).is_file():
            raise WeightsError(f"{folder / name} is not a file in that folder")
    return [folder / name for name in sorted(names)]


def layout_of(files: list[Path]) -> Layout:
    """What the headers of safetensors files say. Raises WeightsError for a file that is cut short or no safetensors."""
    from safetensors import SafetensorError, safe_open

    result: Layout = {}
    for file in files:
        try:
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    part = tensors.get_slice(name)
                    kind = part.get_dtype()
                    result[name] = tuple(part.get_shape()), "float" if kind in FLOATS else kind
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{file} cannot be read: {in_one_line(error)}") from error
    return result


def unlike(layout: Layout, expected: Layout, ignored: set[str]) -> str | None:
    """How a layout differs from what is expected, None where it does not."""
    missing = sorted(expected.keys() - layout.keys() - ignored)
    if missing:
        return f"{_names(missing)} missing"
    if extra := sorted(layout.keys() - expected.keys() - ignored):
        return f"{_names(extra)} not of this model"
    for name, (shape, kind) in layout.items():
        if name in expected and (shape, kind) != expected[name]:
            given, wanted = (f"{list(shape)} {kind}" for shape, kind in (layout[name], expected[name]))
            return f"{name} is {given}, and the server's model has {wanted}"
    return None


def tensors_of(files: list[Path]) -> "Iterator[tuple[str, torch.Tensor]]":
    """The tensors of safetensors files by name, one after the other. Raises WeightsError where they cannot be read."""
    from safetensors import SafetensorError, safe_open

    for file in files:
        try:
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    yield name, tensors.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{file} cannot be read: {in_one_line(error)}") from error


def refuse_not_finite(file: Path) -> None:
    """Raise WeightsError where a number in a file is NaN or infinite."""
    import torch

    # A sum takes one pass and no memory; finite tensors with an infinite sum are looked at again.
    sums = [t.sum(dtype=torch.float32) for _, t in tensors_of([file]) if t.is_floating_point()]
    if not sums or torch.stack(sums).isfinite().all():
        return
    for name, tensor in tensors_of([file]):
        if tensor.is_floating_point() and (bad := int((~tensor.isfinite()).sum())):
            raise WeightsError(f"{file}: {bad} of {tensor.numel()} numbers of {name} are NaN or infinite")


def _names(names: list[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"{', '.join(names[:LISTED])}{more} {'is' if len(names) == 1 else 'are'}"
