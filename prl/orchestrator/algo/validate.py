"""Validate an algorithm against the run that uses it. What it can check of itself is in its own `check`."""

import warnings
from collections.abc import Callable, Iterable

from prl.config.model_reference import POLICY, FrozenModelConfig, check_reference, frozen_models
from prl.config.sampling import SourceConfig
from prl.errors import ConfigError
from prl.orchestrator.algo.base import Algorithm
from prl.wire.components import COMPONENTS


def validate_algorithm(
    algorithm: Algorithm,
    where: str,
    *,
    group_size: int,
    temperature: float,
    hosts: Callable[[FrozenModelConfig], bool],
    uses_reward_thresholds: bool,
    env: str,
) -> None:
    """Refuse an algorithm that cannot work in its env, and warn about settings that make no sense together.

    Args:
        algorithm: the algorithm, built and checked.
        where: its config key, `algo` or `envs.<name>.algo`.
        group_size: rollouts of one task.
        temperature: of the env's training rollouts.
        hosts: whether the launcher serves this frozen model for the run, so that it needs no URL.
        uses_reward_thresholds: whether the env's buffer pools tasks or drops groups by their rewards.
        env: name of the env, for warnings.

    Raises:
        ConfigError: naming the key, the reason and what to write instead.
    """
    refuse_misfit(algorithm, where, hosts)
    name = type(algorithm).__name__
    if temperature != 1 and algorithm.action_loss_type == "ref_kl":
        warnings.warn(
            f"envs.{env}.sampling.temperature={temperature:g}: {name} scores the reference at temperature 1, and pulls "
            "the policy at its own temperature there",
            stacklevel=2,
        )
    if group_size == 1 and algorithm.group_relative:
        warnings.warn(f"env {env!r}: {name} gives a group of one no advantage (group_size=1)", stacklevel=2)
    if uses_reward_thresholds and not algorithm.reads_reward:
        warnings.warn(
            f"env {env!r}: thresholds on rewards (easy_threshold, hard_threshold, online_difficulty_filtering) "
            f"choose its tasks, but {name} reads no reward",
            stacklevel=2,
        )


def refuse_misfit(algorithm: Algorithm, where: str, hosts: Callable[[FrozenModelConfig], bool]) -> None:
    """Raise ConfigError where the component or the models of an algorithm cannot work."""
    name = type(algorithm).__name__
    if not isinstance(getattr(algorithm, "sampling", None), SourceConfig):
        raise ConfigError(
            f"{where}: {name} has no sampling.source: let its __init__ take **knobs and pass them on to "
            "super().__init__"
        )
    source, component = algorithm.sampling.source, algorithm.action_loss_type
    check_reference(source, f"{where}.sampling.source", hosted=True)  # its form; its URL below
    if component not in COMPONENTS:
        raise ConfigError(f"{where}: {name}.action_loss_type={component!r}: it must be one of {', '.join(COMPONENTS)}")
    if source != POLICY and COMPONENTS[component].reads_sampler:
        raise ConfigError(
            f"{where}.sampling.source is a frozen model, but {name} feeds the {component} loss, which needs the "
            f"policy's own rollouts: set {where}.sampling.source=policy, or choose algo=sft to imitate the model"
        )
    for key, reference in frozen_models(algorithm, where):
        check_reference(reference, key, hosted=hosts(reference))


def hosted_references(
    algorithms: Iterable[Algorithm], hosts: Callable[[FrozenModelConfig], bool]
) -> list[FrozenModelConfig]:
    """The references of these algorithms to models that the launcher serves; equal ones once."""
    found = [each for algorithm in algorithms for _, each in frozen_models(algorithm, "") if hosts(each)]
    return [each for index, each in enumerate(found) if each not in found[:index]]
