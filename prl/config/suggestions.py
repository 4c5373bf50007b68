"""Suggestions for a key or an option that does not exist."""

import difflib
import re
from collections.abc import Collection, Mapping

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf

from prl.config.counterparts import counterpart, table, tails
from prl.config.groups import CONF

ADDED = re.compile(
    r"algo\.filter\.|(teacher\.)?engine\.args\.|launcher\.args\.|trainer\.optim\.parts\.|envs\.[\w-]+\.models\."
)
"""Beginnings of keys that are added with a `+`."""
REMOVED = ("envs.", "filters.", "monitor.")
"""Beginnings of keys that a `~` may remove."""
NODES = {"env": "envs", "optim": "trainer", "schedule": "trainer"}
"""Nodes that hold the options of a group, if not under its name."""
ROOT = re.compile(r"(?:^|\s)[+~]?([\w-]+)[^\s=]*=")
"""An override in a hint; the first part of its key."""


def override_key(argument: str) -> str:
    """The config key of a command-line override, without Hydra's `+`, `++` and `~`."""
    return argument.split("=", 1)[0].lstrip("+~")


def hint(argument: str, config: DictConfig, groups: Mapping[str, list[str]]) -> str | None:
    """Return what may have been meant by an override that does not compose; None where nothing is like it.

    `config` is what the other overrides compose to, `groups` are the options of each group.
    """
    key, value = override_key(argument), argument.partition("=")[2]
    keys, group = keys_of(config), re.split("[@/]", key)[0]
    is_known = key in keys or group in groups
    if is_known and "=" in value and not parses(argument):  # the directory of a sweep's job, say
        return f"a value with = in it is written in quotes within quotes: '{key}=\"{value}\"'"
    if group in groups:
        instead = table()["words"].get(argument)
        return f"prl has no {argument}: write {instead}" if instead else option_hint(argument, groups)
    if key in keys or argument.startswith("+"):  # Hydra adds any key, and the class that gets it says what it takes
        return None
    if argument.startswith("~"):
        near = nearest_key(key, [known for known in keys if known.startswith(REMOVED)])
        return f"{key}: did you mean ~{near}?" if near else None
    text = counterpart(key, value) or likeness(key, value, config, groups)
    fits = all(NODES.get(root, root) in config for root in ROOT.findall(text or ""))  # `prl eval` has fewer keys
    return text if fits else None


def option_hint(argument: str, groups: Mapping[str, list[str]]) -> str | None:
    """The override with the options of its group that are spelt like those that were typed."""
    key, _, value = argument.partition("=")
    options = groups[re.split("[@/]", override_key(argument))[0]]
    # gpt_oss, gpt-oss and gptoss are one name to somebody who types.
    names = {re.sub(r"[-_.]", "", name): name for name in options}

    def known(typed: re.Match[str]) -> str:
        near = difflib.get_close_matches(re.sub(r"[-_.]", "", typed[0]), names, n=1)
        return typed[0] if typed[0] in options or not near else names[near[0]]

    meant = re.sub(r"[\w.+-]+", known, value)
    return None if meant == value else f"{argument}: did you mean {key}={meant}?"


def likeness(key: str, value: str, config: DictConfig, groups: Mapping[str, list[str]]) -> str | None:
    """Return what to write for a part of a longer key, for a key of another option, or for a misspelt one."""
    keys = keys_of(config)
    leaves = sorted(set(keys) - {known.rpartition(".")[0] for known in keys})
    for tail in tails(key):
        longer = [each for each in leaves if "." in tail and each.endswith(f".{tail}")]
        if tail in leaves or len(longer) == 1:
            return f"{key}: write {tail if tail in leaves else longer[0]}={value}"
        if chosen := option_with(tail, groups):
            return f"{key}: write {chosen} {tail}={value}"
    near_groups = difflib.get_close_matches(key, groups, cutoff=0.8)
    near = nearest_key(key, leaves) or next((name for name in near_groups if value in groups[name]), None)
    if near:
        present = OmegaConf.select(config, near, throw_on_resolution_failure=False)
        listed = isinstance(present, ListConfig) and not value.startswith("[")
        return f"{key}: did you mean {near}? Write {near}={f'[{value}]' if listed else value}"
    return f"{key}: write +{key}={value}" if ADDED.match(key) else None


def option_with(key: str, groups: Mapping[str, list[str]]) -> str | None:
    """The override that chooses the first option with a key, and gives it what else it wants; None without one."""
    for group, name in ((group, name) for group, names in groups.items() for name in names):
        text = (CONF / group / f"{name}.yaml").read_text(encoding="utf-8")
        package = re.match(r"# @package (\S+)", text)
        where = f"{package[1] if package else group}."
        node = OmegaConf.create(text) if key.startswith(where) and not name.startswith("custom") else None
        keys = [f"{where}{each}" for each in keys_of(node)] if isinstance(node, DictConfig) else []
        if key in keys:
            empty = re.findall(r"(\w+): \?\?\?", text)
            wanted = [each for each in keys if each.rpartition(".")[2] in empty and each != key]
            return " ".join([f"{group}={name}", *(f"{each}=my_{each.rpartition('.')[2]}" for each in wanted)])
    return None


def nearest_key(key: str, known: Collection[str]) -> str | None:
    """The known key that is spelt most like another one, as a whole and in its last part."""
    plain = {re.sub(r"[\W_]", "", name).lower(): name for name in known if "._" not in name}
    typed = re.sub(r"[\W_]", "", key).lower()
    for name in difflib.get_close_matches(typed, plain, cutoff=0.85):
        end, known_end = key.rpartition(".")[2], plain[name].rpartition(".")[2]
        if name == typed or difflib.SequenceMatcher(None, end, known_end).ratio() > 0.6:
            return plain[name]
    return None


def parses(argument: str) -> bool:
    """Return whether Hydra can read an override."""
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
