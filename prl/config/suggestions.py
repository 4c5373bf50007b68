"""What to write instead of a key or an option that there is not."""

import difflib
import re
from collections.abc import Mapping

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig

INSTEAD = {
    "training_mode": "algo=grpo, algo=opd, …",
    "advantage": "algo, the credit's own group",
    "orchestrator.filters": "filters=default|monitor|enforce|enforce_post|none, filters.post_batch.<name>…",
    "orchestrator.teacher": "algo.teacher, which teacher=local|endpoint fills",
    "client": "engine.urls",
    "kl_coef": "algo.kl.coef",
    "beta": "algo.kl.coef",
    "num_generations": "orchestrator.group_size",
    "clip_ratio": "loss=ppo loss.clip_low=… loss.clip_high=…",
    "epsilon": "loss=ppo loss.clip_low=… loss.clip_high=…",
    "epsilon_high": "loss=ppo loss.clip_high=…",
    "clip_low": "loss=ppo loss.clip_low=…",
    "clip_high": "loss=ppo loss.clip_high=…",
    "num_iterations": "trainer.epochs",
    "max_completion_length": "sampling.max_tokens",
    "gradient_accumulation_steps": "trainer.seq_len and trainer.tokens_per_forward: a step is orchestrator.batch_size",
    "lr": "trainer.optim.lr",
    "save_every": "checkpoint.every",
    "wandb": "monitor=wandb, monitor.wandb.…",
}
"""Keys of other projects that are like none of prl's in a word."""


def override_key(argument: str) -> str:
    """The config key of a command-line override, without Hydra's `+`, `++` and `~`."""
    return argument.split("=", 1)[0].lstrip("+~")


def hint(argument: str, config: DictConfig, groups: Mapping[str, list[str]]) -> str | None:
    """What may have been meant by an override that does not compose; None where nothing is like it.

    `config` is what the other overrides compose to, `groups` are the options of each group.
    """
    key, value = override_key(argument), argument.partition("=")[2]
    if "=" in value and not parses(argument):  # the directory of a sweep's job, say
        return f"a value with = in it is written in quotes within quotes: '{key}=\"{value}\"'"
    nodes = [key.rsplit(".", up)[0] for up in range(key.count(".") + 1)]  # from the key itself outwards
    nodes.append(key.rpartition(".")[2])
    node = next((node for node in nodes if node in INSTEAD), None)
    if node is not None:
        return f"there is no {node!r} here: {INSTEAD[node]}"
    group = re.split("[@/]", key)[0]
    if group in groups:
        names = {re.sub(r"[-_.]", "", name): name for name in groups[group]}
        near = difflib.get_close_matches(re.sub(r"[-_.]", "", value), names, n=1)
        known = value in groups[group] or not near
        return None if known else f"{group}={value}: did you mean {group}={names[near[0]]}?"
    keys = keys_of(config)
    same_name = [known for known in keys if known.rpartition(".")[2] == key.rpartition(".")[2]]
    near = difflib.get_close_matches(key, [*keys, *groups], n=1, cutoff=0.7) or same_name[:1]
    return f"{key}: did you mean {near[0]}?" if near and key not in keys else None


def parses(argument: str) -> bool:
    """Whether Hydra can read an override."""
    try:
        OverridesParser.create().parse_override(argument)
    except HydraException:
        return False
    return True


def keys_of(config: DictConfig, prefix: str = "") -> list[str]:
    """Every dotted key of a config."""
    result: list[str] = []
    for name in map(str, config):
        child = config._get_node(name)
        result.append(prefix + name)
        if isinstance(child, DictConfig) and not child._is_none() and not child._is_missing():
            result += keys_of(child, f"{prefix}{name}.")
    return result
