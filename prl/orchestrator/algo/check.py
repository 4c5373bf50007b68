"""Which algorithm each env runs, and whether it can work, before anything is started."""

import warnings
from typing import get_args

from prl.config.build import checked_class
from prl.config.errors import ConfigError
from prl.config.reference import FrozenModelConfig, check_reference, frozen_models
from prl.config.schema import TrainConfig
from prl.orchestrator.algo.base import Algorithm, LossType


def check_algorithms(config: TrainConfig) -> None:
    """Raise ConfigError where an env's algorithm cannot work, or not with the models that it refers to."""
    for name, env in config.envs.items():
        where, node = config.algo_of(name)
        check_reference(node.sampling.source, f"{where}.sampling.source", hosted=True)  # of the right form; its URL below
        advice = f"choose the algorithm whose schema it shares, and its class with {where}._target_={node._target_}"
        algorithm = checked_class(node, Algorithm, where, advice)
        if algorithm.action_loss_type not in get_args(LossType):
            raise ConfigError(
                f"{where}: {algorithm.__name__}.action_loss_type={algorithm.action_loss_type!r}: it must be one of "
                f"{', '.join(get_args(LossType))}"
            )
        for key, reference in frozen_models(node, where):
            check_reference(reference, key, hosted=config.hosts(reference))
        group_size = config.orchestrator.group_size if env.group_size is None else env.group_size
        if group_size == 1 and algorithm.group_relative:
            warnings.warn(f"env {name!r}: {algorithm.__name__} gives a group of one no advantage (group_size=1)", stacklevel=2)


def hosted_references(config: TrainConfig) -> list[FrozenModelConfig]:
    """The references to the model that the launcher is to host; one that several envs share comes once."""
    found = [reference for name in config.envs for _, reference in frozen_models(*reversed(config.algo_of(name)))]
    return [reference for reference in {id(r): r for r in found}.values() if config.hosts(reference)]
