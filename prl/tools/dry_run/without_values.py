"""A model as its config has it, without values: built on torch's meta device, which takes no memory."""

import contextlib
import copy
import logging
from collections.abc import Iterator
from typing import Any

from prl.errors import ConfigError
from prl.monitors.text import in_one_line
from prl.trainer.architecture import has_sinks

SIZES = (RuntimeError, ArithmeticError)
"""What torch raises for sizes that no tensor can have."""


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


def setting(config: Any, name: str) -> Any:
    """A setting of a config, the largest where layers differ in it (Gemma 4); None where it has none of that name."""
    if name in (getattr(config, "per_layer_attributes", None) or ()):
        return max(getattr(layer, name) for layer in config.per_layer_config)
    return getattr(config, name, None)
