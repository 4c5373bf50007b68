"""The optimiser, made of its config node."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from prl.config.instantiate import factory
from prl.trainer.config import OptimConfig


def make_optimizer(
    model: torch.nn.Module, node: OptimConfig | Mapping[str, Any], where: str = "trainer.optim"
) -> torch.optim.Optimizer:
    """The optimiser that `node` names, over the trainable parameters; its weight decay is for matrices only.

    Args:
        model: the policy.
        node: an `OptimConfig`, or its keys and values with further settings of the chosen class.
        where: the node's config key, for messages.

    Raises ConfigError for a class that is not an optimiser, and for settings that it does not take.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    make = factory(_with_defaults(node), torch.optim.Optimizer, where)
    matrices: dict[str, Any] = {"params": [p for p in parameters if p.dim() >= 2]}
    others: dict[str, Any] = {"params": [p for p in parameters if p.dim() < 2]}
    if "weight_decay" in make.keywords:
        others["weight_decay"] = 0.0
    return make([matrices, others])


def _with_defaults(node: OptimConfig | Mapping[str, Any]) -> OptimConfig:
    """The node as an `OptimConfig`, which tells its defaults from given settings; further settings as attributes."""
    if isinstance(node, OptimConfig):
        return node
    known = {field.name for field in fields(OptimConfig)}
    config = OptimConfig(**{name: value for name, value in node.items() if name in known})
    for name in set(node) - known:
        setattr(config, name, node[name])
    return config
