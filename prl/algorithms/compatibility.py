"""Checks of an algorithm against the run that uses it, and the models that the run has to serve for it."""

import ast
import inspect
import textwrap
import warnings
from collections.abc import Callable
from typing import Any

from prl.algorithms.base import Algorithm
from prl.algorithms.kl import KLPenalty
from prl.algorithms.reference import KLConfig
from prl.base.errors import ConfigError
from prl.config.model_reference import (
    DEMONSTRATIONS,
    POLICY,
    FrozenModelConfig,
    SourceConfig,
    check_reference,
    check_source,
    frozen_models,
)
from prl.rollouts.components import COMPONENTS

VALUES = {"sampling", "kl", "mask_truncated", "action_loss_type", "group_relative", "reads_reward", "waits_for_group"}
"""Names of `Algorithm` that a subclass may give another default in its body."""
PIPELINE = {"start", "begin_step", "finalize_rollout", "finalize_group", "finalize_batch", "log", "take_logged"}
"""Methods of `Algorithm` that a subclass must not define."""
LIVE = {"policy_pool", "policy_renderer", "clients", "probe", "pools", "step", "max_steps"}
"""Attributes that an `Algorithm` gets once the run begins."""


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
    check_names(type(algorithm), where)
    if not isinstance(getattr(algorithm, "sampling", None), SourceConfig):
        remedy = "let its __init__ take **options and pass them on to super().__init__"
        raise ConfigError(f"{where}: {name} has no sampling.source: {remedy}")
    kl = algorithm.kl if isinstance(algorithm, KLPenalty) else KLConfig()
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
    kl.check(f"{where}.kl", name, component)
    for key, reference in frozen_models(algorithm, where):
        check_reference(reference, key, hosted=hosts(reference))
    warn_of_settings(algorithm, kl, env, group_size=group_size, temperature=temperature)
    if uses_reward_thresholds and not algorithm.reads_reward:
        warnings.warn(
            f"env {env!r}: thresholds on rewards (easy_threshold, hard_threshold, online_difficulty_filtering) "
            f"choose its tasks, but {name} reads no reward",
            stacklevel=2,
        )


def warn_of_settings(algorithm: Algorithm, kl: KLConfig, env: str, *, group_size: int, temperature: float) -> None:
    """Warn of a temperature or a group size of an env with which its algorithm learns something else, or nothing."""
    name = type(algorithm).__name__
    # A prefill in an engine is at temperature 1. References in the trainer are computed at the policy's temperature.
    by_engine = algorithm.action_loss_type == "ref_kl" or isinstance(kl.reference, FrozenModelConfig)
    if temperature != 1 and by_engine and not algorithm.trainer_references():
        warnings.warn(
            f"envs.{env}.sampling.temperature={temperature:g}: {name} scores the reference at temperature 1, and pulls "
            "the policy at its own temperature there",
            stacklevel=3,
        )
    if group_size == 1 and algorithm.group_relative:
        warnings.warn(f"env {env!r}: {name} gives a group of one no advantage (group_size=1)", stacklevel=3)


def check_names(kind: type[Algorithm], where: str) -> None:
    """Raise ConfigError for a user's class that gives a name of `Algorithm` another meaning."""
    # KLPenalty has all names of Algorithm and `kl`, which means the same in every algorithm that has it.
    names = {name for name in dir(KLPenalty) if not name.startswith("__")} | LIVE | VALUES
    for owner in kind.__mro__:
        if owner is object or owner.__module__.startswith("prl."):
            continue
        own = inspect.get_annotations(owner) | vars(owner)
        defined = {name for name in own.keys() & names if not may_define(name, own[name])}
        if taken := sorted(defined | assigned_names(owner) & names):
            raise ConfigError(
                f"{where}: {owner.__name__} sets {taken[0]!r}, a name that prl's Algorithm has for itself: choose "
                "another name (an option of Algorithm is set in the config)"
            )


def may_define(name: str, value: Any) -> bool:
    """Return whether the body of a user's class may give a name of `Algorithm` this value."""
    return name in VALUES or (inspect.isroutine(value) and not name.startswith("_") and name not in PIPELINE | LIVE)


def assigned_names(kind: type) -> set[str]:
    """The attributes of `self` that the code of a class assigns; none where its source is not there."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return set()
    stored = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    return {node.attr for node in stored if isinstance(node.value, ast.Name) and node.value.id == "self"}
