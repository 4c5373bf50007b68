"""Whether an algorithm fits the run that uses it, and which models the run has to serve for it."""

import warnings
from collections.abc import Callable, Iterable
from typing import Any

from prl.algorithms.base import Algorithm
from prl.algorithms.reference import KLConfig
from prl.config.model_reference import (
    DEMONSTRATIONS,
    POLICY,
    FrozenModelConfig,
    SourceConfig,
    check_reference,
    check_source,
    frozen_models,
)
from prl.errors import ConfigError
from prl.rollouts.components import COMPONENTS


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
    """Raise ConfigError for an algorithm that cannot work in its env; warn of settings that make no sense together.

    `where` is its config key, `algo` or `envs.<name>.algo`; `temperature` that of the env's training rollouts. `hosts`
    says whether the launcher serves a frozen model for the run, so that it needs no URL, and `uses_reward_thresholds`
    whether the env's curriculum pools tasks or drops groups by their rewards.
    """
    name = type(algorithm).__name__
    for key, kind in (("sampling.source", SourceConfig), ("kl.coef", KLConfig)):
        if not isinstance(getattr(algorithm, key.split(".")[0], None), kind):
            remedy = "let its __init__ take **options and pass them on to super().__init__"
            raise ConfigError(f"{where}: {name} has no {key}: {remedy}")
    source, component = algorithm.sampling.source, algorithm.action_loss_type
    check_source(algorithm.sampling, f"{where}.sampling")  # its form; its URL below
    if component not in COMPONENTS:
        raise ConfigError(f"{where}: {name}.action_loss_type={component!r}: it must be one of {', '.join(COMPONENTS)}")
    if source != POLICY and COMPONENTS[component].reads_sampler:
        whose = "demonstrations" if source == DEMONSTRATIONS else "a frozen model"
        raise ConfigError(
            f"{where}.sampling.source is {whose}, but {name} feeds the {component} loss, which needs the policy's own "
            f"rollouts: set {where}.sampling.source=policy, or imitate {whose} with algo=sft"
        )
    algorithm.kl.check(f"{where}.kl", name, component)
    for key, reference in frozen_models(algorithm, where):
        check_reference(reference, key, hosted=hosts(reference))
    by_engine = component == "ref_kl" or isinstance(algorithm.kl.reference, FrozenModelConfig)
    if temperature != 1 and by_engine and not algorithm.trainer_references():
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


def hosted_references(components: Iterable[Any], hosts: Callable[[FrozenModelConfig], bool]) -> list[FrozenModelConfig]:
    """The references of algorithms, and of envs' `references`, to models that the launcher serves; equal ones once."""
    references = [reference for component in components for _, reference in frozen_models(component, "")]
    hosted: list[FrozenModelConfig] = []
    for reference in references:
        if hosts(reference) and reference not in hosted:
            hosted.append(reference)
    return hosted
