"""Which algorithm each env runs, and whether it can work, before anything is started."""

import warnings
from collections.abc import Sequence
from typing import Any, get_args

from prl.config.instantiate import class_of, run_check
from prl.config.model_reference import POLICY, FrozenModelConfig, check_reference, frozen_models
from prl.config.schema import TrainConfig
from prl.errors import ConfigError
from prl.orchestrator.algo.base import Algorithm, LossType


def check_algorithms(config: TrainConfig) -> None:
    """Raise ConfigError where an env's algorithm cannot work, or not with the models that it refers to."""
    for name, env in config.envs.items():
        where, node = config.algo_of(name)
        check_reference(
            node.sampling.source, f"{where}.sampling.source", hosted=True
        )  # of the right form; its URL below
        algorithm = class_of(node, Algorithm, where)
        if algorithm.action_loss_type not in get_args(LossType):
            raise ConfigError(
                f"{where}: {algorithm.__name__}.action_loss_type={algorithm.action_loss_type!r}: it must be one of "
                f"{', '.join(get_args(LossType))}"
            )
        if node.sampling.source != POLICY and algorithm.action_loss_type != "ce":
            raise ConfigError(
                f"{where}.sampling.source is a frozen model, but {algorithm.__name__} feeds the {algorithm.action_loss_type} "
                f"loss, which needs the policy's own rollouts: set {where}.sampling.source=policy, or choose algo=sft to "
                "imitate the model"
            )
        advice = f"choose the algorithm whose schema it shares, and its class with {where}._target_={node._target_}"
        run_check(algorithm, node, where, advice)
        if node.sampling.temperature != 1 and algorithm.action_loss_type == "ref_kl":
            warnings.warn(
                f"{where}.sampling.temperature={node.sampling.temperature:g} (env {name!r}): the reference is scored at temperature "
                "1, and it is the policy at its own temperature that is pulled there",
                stacklevel=2,
            )
        for key, reference in frozen_models(node, where):
            check_reference(reference, key, hosted=config.hosts(reference))
        group_size = config.orchestrator.group_size if env.group_size is None else env.group_size
        if group_size == 1 and algorithm.group_relative:
            warnings.warn(
                f"env {name!r}: {algorithm.__name__} gives a group of one no advantage (group_size=1)", stacklevel=2
            )


def check_tasks(config: TrainConfig, tasks: dict[str, Sequence[Any]]) -> None:
    """Raise ConfigError where an env's algorithm cannot work with its tasks; `tasks` are by env."""
    for name, own in tasks.items():
        where, node = config.algo_of(name)
        run_check(class_of(node, Algorithm, where), node, where, "add it", own, hook="check_tasks")


def hosted_references(config: TrainConfig) -> list[FrozenModelConfig]:
    """The references to the model that the launcher is to host; one that several envs share comes once."""
    found = [reference for name in config.envs for _, reference in frozen_models(*reversed(config.algo_of(name)))]
    return [reference for reference in {id(r): r for r in found}.values() if config.hosts(reference)]
