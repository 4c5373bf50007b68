"""Whether a model folder's weights are those that its `config.json` speaks of, asked before a process starts.

The model of the config is built on torch's meta device, which takes no memory, and is given tensors of the shapes in
the weights' headers in the way that transformers loads weights: what it renames, splits or fuses is compared as it will
be. What transformers keeps to itself of that is touched here alone; written for transformers 5.17.
"""

import contextlib
import copy
import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from prl.config.model_folder import header, index_of, local_folder
from prl.config.schema import ModelConfig
from prl.errors import ConfigError
from prl.text import in_one_line
from prl.trainer.architecture import has_sinks

HINT = "give the config.json that the weights were saved with"
SIZES = (RuntimeError, ArithmeticError)
"""What torch raises for sizes that no tensor can have."""


def check_shapes(model: ModelConfig, config: Any, where: str, *, trained: bool) -> None:
    """Raise ConfigError where the weights of a folder are not those of its config; a model on the hub passes.

    Args:
        model: The model's node.
        config: The model's config as transformers reads it.
        where: The model's key and value, for messages.
        trained: Whether the trainer is to load it. Else the engine alone does, which is refused less: only what no
            engine could load.
    """
    folder = local_folder(model.path)
    if folder is None or is_beyond(model, config):
        return
    if not (tensors := loaded_tensors(folder, where)):
        return
    with quiet():
        built = build(config, where, trained=trained)
        finding = None if built is None else difference(built, tensors, trained=trained)
    if finding:
        raise ConfigError(f"{where}: {finding}: {HINT}")


def is_beyond(model: ModelConfig, config: Any) -> bool:
    """Whether the model has code of its own, or weights whose shapes are those of a quantization."""
    own_code = model.trust_remote_code and getattr(config, "auto_map", None)
    parts = (config, config.get_text_config())
    packed = any(getattr(part, name, None) for part in parts for name in ("quantization_config", "compression_config"))
    return bool(own_code or packed or getattr(config, "transformers_weights", None))


def loaded_tensors(folder: Path, where: str) -> dict[str, list[int]]:
    """Names and shapes of the tensors that transformers would load; empty where the files have other names.

    A folder may have files beside them, such as the same weights in another library's names.
    """
    files = [single] if (single := folder / "model.safetensors").is_file() else index_of(folder, where)
    return {name: shape for file in files for name, shape in header(file, where)}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' warnings and progress bars off the terminal: the process that loads the weights shows them."""
    from transformers.utils.logging import set_tqdm_hook

    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    hook = set_tqdm_hook(lambda factory, args, kwargs: factory(*args, **kwargs | {"disable": True}))
    try:
        yield
    finally:
        set_tqdm_hook(hook)
        logger.setLevel(level)


def build(config: Any, where: str, *, trained: bool) -> Any:
    """The model of a config, without values; None where only an engine may know it. Raises ConfigError."""
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        if not trained:
            return None
        raise ConfigError(f"{where}: {config.model_type} is no causal language model of transformers: give one of text")
    # The trainer's where it is transformers' own; one that every architecture has.
    attention = "sdpa" if trained and not has_sinks(config) else "eager"
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                copy.deepcopy(config), attn_implementation=attention, dtype=torch.float32, trust_remote_code=False
            )
    except Exception as error:  # transformers has no common class of errors
        if not trained and not isinstance(error, SIZES):
            return None
        raise ConfigError(f"{where}: no model can be built of its config.json ({in_one_line(error)})") from error


def difference(built: Any, tensors: dict[str, list[int]], *, trained: bool) -> str | None:
    """What the weights have otherwise than the model of the config, in words; None where it loads them."""
    import torch
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    wanted = {name: list(value.shape) for name, value in built.state_dict().items()}
    how = LoadStateDictConfig(
        device_map={"": "meta"}, dtype=torch.float32, weight_mapping=get_model_conversion_mapping(built)
    )
    try:
        state = {name: torch.empty(shape, device="meta") for name, shape in tensors.items()}
        loaded, _ = convert_and_load_state_dict_in_model(built, state, how)
        built.tie_weights(missing_keys=loaded.missing_keys, recompute_mapping=False)
        built._adjust_missing_and_unexpected_keys(loaded)
    except Exception:  # such as of a step that needs values: who loads them will say what is wrong
        return None
    others = {name: list(shape) for name, shape, _ in loaded.mismatched_keys}
    if not trained:  # an engine shares a tied head without looking at one in the file
        others = {name: shape for name, shape in others.items() if name not in built.all_tied_weights_keys}
    if name := first(others, wanted):
        return f"{name} has shape {others[name]} in its weights and {wanted[name]} by its config.json{more(others)}"
    missing = set() if loaded.conversion_errors else loaded.missing_keys
    if name := first(missing := missing if trained else missing_layers(missing, wanted), wanted):
        return f"its config.json wants {name} of shape {wanted[name]}, which its weights lack{more(missing)}"
    if further := further_layers(loaded.unexpected_keys, wanted):
        name = next((name for name in tensors if name in further), min(further))
        shape = f" of shape {tensors[name]}" if name in tensors else ""
        return f"its weights have {name}{shape}, a layer beyond those of its config.json{more(further)}"
    return None


def first(found: Iterable[str], wanted: Iterable[str]) -> str | None:
    """The first of `wanted`, which are in the model's order, that was found."""
    names = set(found)
    return next((name for name in wanted if name in names), None)


def more(found: Iterable[str]) -> str:
    """How many tensors there are beside the one that is named."""
    others = len(set(found)) - 1
    return f" (and {others} more)" if others else ""


def layers(names: Iterable[str]) -> dict[str, dict[int, set[str]]]:
    """Names by stack of layers, such as `model.layers.`, and by number in it: what a layer has."""
    found: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in names:
        if split := re.fullmatch(r"(.*?\.)(\d+)(\..+)", name):
            found[split[1]][int(split[2])].add(split[3])
    return found


def missing_layers(missing: Iterable[str], wanted: Iterable[str]) -> set[str]:
    """Those of the missing tensors that are of a whole layer, in a stack of which other layers are there."""
    lacking, found = layers(missing), set()
    for stack, numbered in layers(wanted).items():
        gone = [number for number, parts in numbered.items() if lacking[stack][number] == parts]
        if len(gone) < len(numbered):
            found |= {f"{stack}{number}{part}" for number in gone for part in numbered[number]}
    return found


def further_layers(unexpected: Iterable[str], wanted: Iterable[str]) -> set[str]:
    """Those of the tensors without a place that make a layer like the model's own, with a number beyond theirs.

    An extra layer that has other tensors too, such as one that predicts a second token, is left out in loading.
    """
    known = layers(wanted)
    return {
        f"{stack}{number}{part}"
        for stack, numbered in layers(unexpected).items()
        for number, parts in numbered.items()
        if number not in known[stack] and parts in known[stack].values()
        for part in parts
    }


def setting(config: Any, name: str) -> Any:
    """A setting of a config, the largest where layers differ in it (Gemma 4); None where it has none of that name."""
    if name in (getattr(config, "per_layer_attributes", None) or ()):
        return max(getattr(layer, name) for layer in config.per_layer_config)
    return getattr(config, name, None)


def number(config: Any, name: str) -> int | None:
    """A whole number of a config; None where it has none of that name."""
    found = setting(config, name)
    return found if isinstance(found, int) else None


def head_size(config: Any) -> int | None:
    """Dimensions of an attention head, as vLLM reads them from a config; None where it does not say, or is latent."""
    heads, width = number(config, "num_attention_heads"), number(config, "hidden_size")
    found = setting(config, "head_dim") or getattr(config, "hidden_size_per_head", None)
    if getattr(config, "kv_lora_rank", None) is not None:
        return None
    if not found and heads and width:
        found = width // heads
    return found if isinstance(found, int) else None
