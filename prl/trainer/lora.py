"""Adapters of low rank (LoRA) through peft: beside the frozen weights of a model, they alone are trained.

peft replaces layers of the model in place. A layer `x` then has its weights under `x.base_layer`, and its adapter's
under `x.lora_A.default` and `x.lora_B.default`. peft is imported where a run has adapters; written for peft 0.21.
"""

import copy
import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from prl.base.errors import ConfigError
from prl.base.files import write_tensors
from prl.base.text import in_one_line
from prl.config.tensor_names import as_in_files
from prl.trainer.architecture import sees
from prl.trainer.sharding import part_like, whole

ADAPTER = "adapter"
"""Folder of a checkpoint that peft loads."""
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Beginning of the names of tensors in peft's files."""
NAME = "default"
"""Name of a run's adapter, the one that each layer has."""
OF_ADAPTER = re.compile(r"(.+\.lora_[AB])\.(\w+)\.weight")
OF_LAYER = re.compile(r"(.+)\.base_layer\.(\w+)")
CLOSE = 1e-5
"""Largest difference of a checkpoint's merged weights from those merged again, which ranks add up in another order;
relative to the largest weight."""


def add_adapters(model: PreTrainedModel, node: Mapping[str, Any], path: str) -> None:
    """Give layers of `model` adapters that change nothing yet, drawn from torch's generator, and freeze all else.

    Args:
        model: the policy, on any device, meta too.
        node: the node `model.lora`, with a rank.
        path: path or name of the model, for peft's config.

    Raises ConfigError for target modules that the model has not, or that cannot have an adapter.
    """
    import peft

    named = node["target_modules"]
    targets = check_targets(model, None if named is None else list(named))
    # A vision tower's layers get adapters where they are named; their names may end as those of the language part do.
    tower = rf"(?!{model.base_model_prefix}\.language_model\.).*" if named is None and sees(model.config) else None
    config = peft.LoraConfig(
        r=node["rank"],
        lora_alpha=node["alpha"],
        target_modules=targets,
        exclude_modules=tower,
        task_type="CAUSAL_LM",
        base_model_name_or_path=path,
    )
    try:
        peft.inject_adapter_in_model(config, model, NAME)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ConfigError(f"model.lora: peft cannot give this model adapters ({in_one_line(error)})") from error
    config.target_modules = sorted(config.target_modules)  # a set, whose order in a file is another each time


def check_targets(model: PreTrainedModel, named: list[str] | None) -> list[str] | str:
    """Return the `target_modules` of peft: those named, or all linear layers that can have an adapter.

    A model that sees has adapters in its vision tower only where they are named: `add_adapters` excludes it.

    The output head cannot: its weight is read where the layer is not run (`prl.trainer.logprobs`). Nor can layers that
    are named as matrices of experts are in files: peft takes these for the experts.

    Raises ConfigError unless there are linear layers, and each name is the end of those of some and of nothing else.
    """
    layers, experts = dict(model.named_modules()), names_of_experts(model)
    linear = linear_layers(model)
    known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linear)) or "none"
    if not linear or named == []:
        raise ConfigError(f"model.lora.target_modules names no layer; this model has {known}")
    for end in named or ():
        chosen = {name for name in layers if f".{name}".endswith(f".{end}")}
        if not chosen or not chosen <= set(linear):
            raise ConfigError(
                f"model.lora.target_modules: {end!r} is not the name of linear layers that can have an adapter; this "
                f"model has {known}"
            )
    # peft's "all-linear" would take layers that are named as experts are, too.
    if named is None and experts:
        return known.split(", ")
    return "all-linear" if named is None else named


def linear_layers(model: PreTrainedModel) -> list[str]:
    """Return the names of the layers that can have an adapter, of a model without any."""
    experts, head, kinds = names_of_experts(model), model.get_output_embeddings(), (torch.nn.Linear, Conv1D)
    return [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, kinds) and layer is not head and name.rpartition(".")[2] not in experts
    ]


def names_of_experts(model: PreTrainedModel) -> set[str]:
    """Return the names that files have for the matrices of an expert (`up_proj`); empty without experts."""
    names = set()
    for name, parameter in model.named_parameters():
        # Transformers has the matrices of all experts of a layer in one tensor.
        if parameter.dim() == 3:
            names |= {key.split(".")[-2] for key in as_in_files(model, name, parameter.to("meta"))}
    return names


def has_adapters(model: torch.nn.Module) -> bool:
    """Return whether `add_adapters` has given this model adapters."""
    return hasattr(model, "peft_config")


def weights_of(model: PreTrainedModel, adapter: str = NAME) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a model by their names without adapters, the adapter added to its layers; no tied ones.

    They are made one by one; of a model that is spread over ranks they are parts, and all ranks must go through them.
    """
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    layers = dict(model.named_modules()) if has_adapters(model) else {}
    for name, tensor in model.state_dict().items():
        if name in tied or (layers and OF_ADAPTER.fullmatch(name)):
            continue
        tensor = tensor.detach()
        if layers and (split := OF_LAYER.fullmatch(name)):
            if split[2] == "weight" and adapter in layers[split[1]].lora_A:
                with torch.no_grad():
                    tensor = tensor + part_like(tensor, layers[split[1]].get_delta_weight(adapter))
            name = f"{split[1]}.{split[2]}"
        yield name, tensor


def adapters_of(model: torch.nn.Module, adapter: str = NAME) -> dict[str, torch.nn.Parameter]:
    """Return the matrices of an adapter, by their names in peft's files."""
    matched = ((OF_ADAPTER.fullmatch(name), parameter) for name, parameter in model.named_parameters())
    return {f"{PREFIX}{split[1]}.weight": parameter for split, parameter in matched if split and split[2] == adapter}


def adapters_alone(model: PreTrainedModel) -> bool:
    """Return whether an engine with the base model's files can add the adapters: each to one tensor of the files.

    Experts are a tensor each in files, where the model has one of all. A transposed layer (Conv1D) has the transpose of
    what an adapter's product is.
    """
    layers = dict(model.named_modules())
    for name in adapters_of(model):
        layer = re.sub(r"\.lora_[AB]\.weight$", "", name.removeprefix(PREFIX))
        weight = f"{layer}.weight"
        base: Any = layers[layer].base_layer
        if isinstance(base, Conv1D) or list(as_in_files(model, weight, base.weight.to("meta"))) != [weight]:
            return False
    return True


def save_adapters(model: PreTrainedModel, folder: Path | None) -> None:
    """Write the folder that `peft.PeftModel.from_pretrained` loads beside the base model, float32.

    Of a model that is spread over ranks, all must call it, those that write nothing with None.
    """
    gathered = {name: whole(matrix.detach()).cpu() for name, matrix in adapters_of(model).items()}
    if folder is not None:
        write_adapters(folder, model, gathered)


def write_adapters(
    folder: Path, model: PreTrainedModel, matrices: dict[str, torch.Tensor], adapter: str = NAME
) -> None:
    """Write the folder that `save_adapters` does: the config of an adapter of the model, and these matrices."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(matrices, folder / WEIGHTS, {"format": "pt"})
    config = copy.copy(model.peft_config[adapter])
    config.inference_mode = True
    config.save_pretrained(str(folder))


@torch.no_grad()
def load_adapters(model: PreTrainedModel, checkpoint: Path) -> None:
    """Give the adapters of `model` the values that they have in a checkpoint.

    Raises ConfigError where the model's own weights are not those that they were trained beside: then the checkpoint's
    merged weights are not what comes out here.
    """
    saved = load_file(checkpoint / ADAPTER / WEIGHTS)
    for name, matrix in adapters_of(model).items():
        matrix.copy_(saved[name])
    with safe_open(checkpoint / "model.safetensors", "pt") as merged:
        names = set(merged.keys())
        tensors = (as_in_files(model, name, tensor) for name, tensor in weights_of(model))
        for name, now in itertools.chain.from_iterable(each.items() for each in tensors):
            then = (merged.get_tensor(name) if name in names else torch.empty(0)).to(now.device)
            if then.shape != now.shape or not (now - then).abs().max() <= CLOSE * then.abs().max():
                raise ConfigError(
                    f"{name} of model.path has other values than when the run began, of which {checkpoint} has the "
                    "adapters: give the model that it began with, or begin a new run from the merged weights, "
                    f"model.path={checkpoint}"
                )
