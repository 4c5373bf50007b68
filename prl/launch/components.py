"""Every component of a run, built from the config and checked. Nothing is loaded or started here."""

import copy
from dataclasses import dataclass
from typing import Any, get_args

from prl.config.instantiate import (
    build,
    factory,
    function,
    knobs_of,
    locate,
    plain,
    schema_defaults,
    schema_target,
    target_of,
)
from prl.config.model_reference import FrozenModelConfig
from prl.config.sampling import env_sampling
from prl.config.schema import TrainConfig
from prl.inference.sampler import Sampler, validate_for_training
from prl.launch.launcher import Launcher
from prl.monitors import Monitors
from prl.monitors.base import Monitor
from prl.orchestrator.algo.base import Algorithm, hosted_references, validate_algorithm
from prl.orchestrator.buffer.base import Buffer
from prl.orchestrator.filters.base import Filters, SlotName, build_filters
from prl.trainer.schedule import Schedule


@dataclass
class EnvComponents:
    """The components of one env: its own where it has them, else the run's, but always instances of its own."""

    algorithm: Algorithm
    where: str
    """The config key of the algorithm, for messages."""
    sampler: Sampler
    """Samples the training rollouts."""
    eval_sampler: Sampler
    buffer: Buffer
    filters: Filters
    renderer: tuple[str, Any]
    """The renderer's config key and node: it is made over a tokenizer, which has not been loaded yet."""
    loss: str
    """The name of the function that its `rl` tokens train with: "" = the run's, else the env's name."""


@dataclass
class RunComponents:
    """The components of a run."""

    envs: dict[str, EnvComponents]
    monitors: Monitors
    launcher: Launcher
    losses: dict[str, Any]
    """The nodes of the rl losses by name, for the trainer; "" is the run's."""
    hosted: list[FrozenModelConfig]
    """References to the frozen model that the launcher is to host; empty = none is hosted."""


def build_components(config: TrainConfig) -> RunComponents:
    """Build and check every component. Raises ConfigError with its config key."""
    envs = {name: _env_components(config, name) for name in config.envs}
    losses = {"": config.loss} | {name: config.envs[name].loss for name, env in envs.items() if env.loss}
    for name, node in losses.items():
        check_loss(node, f"envs.{name}.loss" if name else "loss")
    build(config.trainer.schedule, Schedule, "trainer.schedule")
    return RunComponents(
        envs=envs,
        monitors=Monitors({name: build(node, Monitor, f"monitor.{name}") for name, node in config.monitor.items()}),
        launcher=build(config.launcher, Launcher, "launcher"),
        losses=losses,
        hosted=hosted_references([env.algorithm for env in envs.values()], config.hosts),
    )


def _env_components(config: TrainConfig, name: str) -> EnvComponents:
    env = config.envs[name]
    where, node = config.node_of(name, "algo")
    algorithm = build(node, Algorithm, where)
    sampling = env_sampling(config.sampling, env.sampling)
    sampling_key = "sampling" if sampling == plain(config.sampling) else f"envs.{name}.sampling"
    sampler = build(sampling, Sampler, sampling_key)
    buffer = build(config.node_of(name, "buffer")[1], Buffer, config.node_of(name, "buffer")[0])
    validate_algorithm(
        algorithm,
        where,
        env=name,
        group_size=config.group_size_of(name)[1],
        temperature=sampler.temperature,
        hosts=config.hosts,
        uses_reward_thresholds=buffer.reads_rewards,
    )
    live = not isinstance(algorithm.sampling.source, FrozenModelConfig)
    validate_for_training(sampler, sampling_key, live=live, max_model_len=config.model.max_model_len)
    filters_key, filters_node = config.node_of(name, "filters")
    slots = plain(filters_node)  # an env's own conf file may name one slot alone
    return EnvComponents(
        algorithm=algorithm,
        where=where,
        sampler=sampler,
        eval_sampler=sampler.with_overrides(config.orchestrator.eval.sampling, "orchestrator.eval.sampling"),
        buffer=buffer,
        filters={slot: build_filters(slots.get(slot) or {}, f"{filters_key}.{slot}") for slot in get_args(SlotName)},
        renderer=config.node_of(name, "renderer"),
        loss="" if env.loss is None else name,
    )


def check_loss(node: Any, where: str) -> None:
    """Look a loss up before anything starts. prl's own are known to fit, and would load torch here."""
    if target_of(node, "a function", where) != schema_target(node) or schema_target(node) is None:
        function(node, where)


def check_target(node: Any, base: str, where: str) -> None:
    """Look up a class that only the trainer's process uses, with its knobs; `base` is the path of its base class.

    That loads torch, so it is left out where the node is prl's own class with the knobs of its schema. The nodes of
    components inside it, which the class builds itself, are not looked at.
    """
    target, knobs = target_of(node, f"a subclass of {base}", where), knobs_of(node)
    if target != schema_target(node) or not set(knobs) <= set(schema_defaults(node)):
        alone = copy.copy(node)
        for name, value in knobs.items():
            if isinstance(value, dict) and "_target_" in value:
                (alone if isinstance(alone, dict) else vars(alone)).pop(name)
        factory(alone, locate(base, where), where)
