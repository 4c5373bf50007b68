"""The optimisers of a model, made from `trainer.optim`: one for each part of its parameters, used as one."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from prl.base.errors import ConfigError
from prl.base.text import in_one_line
from prl.config.build import maker, plain
from prl.trainer.sharding import is_part

FUSED_OVER_RANKS = (torch.optim.Adam, torch.optim.AdamW)
"""Optimisers whose fused kernel torch 2.13 has for parameters that are spread over ranks."""
Parameters = dict[str, torch.nn.Parameter]


class Optimizers:
    """Several optimisers as one; no parameter is in two of them."""

    def __init__(self, optimizers: list[Optimizer]):
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups of all optimisers; those of `trainer.optim` itself come first."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[torch.Tensor, Any]:
        """Return the state of each parameter that has one."""
        return {parameter: state for optimizer in self.optimizers for parameter, state in optimizer.state.items()}

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        """Update all parameters."""
        for optimizer in self.optimizers:
            optimizer.step()


def make_optimizers(model: torch.nn.Module, node: Mapping[str, Any]) -> Optimizers:
    """Make the optimisers of the trainable parameters.

    A parameter belongs to the first entry of `parts` that matches it, else to the optimiser that `node` itself names.

    Args:
        model: the policy.
        node: `trainer.optim` as plain data: `_target_`, settings of that class, and `parts`.

    Raises ConfigError for a class that is not an optimiser, for settings that it does not take, and for an entry of
    `parts` that matches nothing.
    """
    rest = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    settings = plain(node)
    made = []
    for part, part_settings in (settings.pop("parts", None) or {}).items():
        where = f"trainer.optim.parts.{part}"
        match, dims = part_settings.pop("match", None), part_settings.pop("dims", None)
        chosen = {
            name: parameter
            for name, parameter in rest.items()
            if re.search(match or "", name) and dims in (None, parameter.dim())
        }
        if not chosen:
            raise ConfigError(f"{where}: match={match!r} with dims={dims} is no parameter that is left to train")
        made.append(make_optimizer(chosen, part_settings, where))
        rest = {name: parameter for name, parameter in rest.items() if name not in chosen}
    if rest or not made:
        # First, since metrics show the rate of the first group.
        made.insert(0, make_optimizer(rest, settings, "trainer.optim"))
    return Optimizers(made)


def make_optimizer(parameters: Parameters, node: Mapping[str, Any], where: str) -> Optimizer:
    """Make one optimiser of `parameters`; its weight decay, where the node sets one, is for matrices only."""
    make = maker(node, Optimizer, where)
    if any(is_part(parameter) for parameter in parameters.values()) and make.func not in FUSED_OVER_RANKS:
        # torch refuses the fused kernel of others for parts of parameters: they run without it.
        make.keywords.pop("fused", None)
    matrices = [parameter for parameter in parameters.values() if parameter.dim() >= 2]
    others = [parameter for parameter in parameters.values() if parameter.dim() < 2]
    exempt = {"weight_decay": 0.0} if "weight_decay" in make.keywords else {}
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, **exempt}]
    try:
        return make([group for group in groups if group["params"]])
    except ValueError as error:  # LBFGS takes no groups, Muon no vectors
        raise ConfigError(f"{where}._target_={node['_target_']}: {in_one_line(error)}") from error
