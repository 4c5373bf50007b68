"""Run again: `prl train --from <run> [group=option …] [key=value …]`.

The run's `config.yaml` says what it was. Its recorded overrides are composed again, so that what follows another key
(`trainer.seq_len` follows `model.max_model_len`) still does; whatever then differs from `config.yaml`, because prl's
defaults have changed or because somebody edited it, is set to what stands there. Last come the new overrides. A new
option of a group begins with its own settings: what the run had set in the group goes.

A run directory may come from a stranger. Of its own accord prl takes nothing from it that names code or a secret:
`--trust` says that whoever made it is trusted.
"""

import contextlib
import json
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import hydra
from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig, OmegaConf

from prl.compose import CONF, allow_new_filters, options, schemas, to_config
from prl.config import suggestions
from prl.config.instantiate import plain, schema_defaults
from prl.config.trust import foreign, refuse_foreign, refuse_hydras
from prl.errors import UNREADABLE, ConfigError
from prl.masking import masked
from prl.run_yaml import yaml_of
from prl.text import safe
from prl.wire.files import regular

OUTPUTS = Path("outputs")
LISTED = 12
"""Differences that are printed one by one."""


def expand(arguments: list[str]) -> list[str]:
    """Command-line arguments with `--from <run>` replaced by the overrides that make its config (`recorded_run`).

    Raises:
        ConfigError: there is no such run, it cannot be composed, or it names what needs `--trust`.
    """
    rest, named = list[str](), list[str]()
    for argument in arguments:
        if named == ["--from"]:
            named = [argument]
        elif argument == "--from" or argument.startswith("--from="):
            if named:
                raise ConfigError(f"--from is given twice, {named[0]} first: name one run")
            named = argument.split("=", 1)[1:] or ["--from"]
        else:
            rest.append(argument)
    trusted, rest = "--trust" in rest, [argument for argument in rest if argument != "--trust"]
    if not named:
        if trusted:
            raise ConfigError("--trust is about a run that is run again: it goes with --from <run>")
        return rest
    if named == ["--from"]:
        raise ConfigError("--from names no run: give its directory, its name under outputs/, or its config.yaml")
    new = [each for each in rest if not each.startswith("-") and ("=" in each or each.startswith("~"))]
    typed = frozenset(map(suggestions.override_key, new))
    carried = without_superseded(recorded_run(named[0], trusted=trusted, typed=typed)[1], new)
    first = next((at for at, argument in enumerate(rest) if argument in new), len(rest))
    return [*rest[:first], *carried, *rest[first:]]  # Hydra takes overrides in one row only


def recorded_run(name: str, *, trusted: bool, typed: frozenset[str] = frozenset()) -> tuple[Path, list[str]]:
    """The `config.yaml` of the run `name`, and the overrides that make its config.

    Keys that are `typed` anew need no trust: what the run has there is not used. Changes into the folder that the run
    was started in, where its relative paths are. Raises ConfigError as `expand`.
    """
    path = find(name)
    recorded, old, cwd = load(path), recorded_overrides(path.parent), recorded_cwd(path.parent)
    needs = needing_trust(recorded, old)
    if cwd != Path.cwd():
        needs.append(f"the folder it ran in, {cwd} (or go there first)")
    if not trusted:
        refuse_foreign(path, needs, typed)
    if cwd != Path.cwd():
        os.chdir(cwd)
        sys.path.insert(0, str(cwd))  # where `python -m` finds modules
    old, pins = as_recorded(recorded, old, path)
    if not trusted and old:
        refuse_foreign(path.parent / ".hydra" / "overrides.yaml", foreign(composed([*old, *pins])[1]), typed)
    return path, [*old, *pins]


def needing_trust(recorded: dict[str, Any], old: list[str]) -> list[str]:
    """What of a run's config and of its recorded overrides is followed with `--trust` alone."""
    return [*filter(is_search_path, old), *foreign(recorded)]


def going_on(run_dir: Path) -> str:
    """The command that goes on with the run in `run_dir`, which this process has run, as a shell takes it."""
    trusted = "--trust" in sys.orig_argv  # it may be about the folder
    with contextlib.suppress(ConfigError):  # it cannot be read any more, and the command will say so
        trusted |= bool(needing_trust(load(run_dir / "config.yaml"), recorded_overrides(run_dir)))
    return f"python -m prl.train {shlex.quote(f'run.resume={run_dir}')}" + " --trust" * trusted


def find(name: str) -> Path:
    """The `config.yaml` of a run, given by its directory, its name under `outputs/`, or the file itself."""
    for folder in (Path(name), OUTPUTS / name):
        path = folder / "config.yaml" if folder.is_dir() else folder
        if path.is_file():
            return path.resolve()
    raise ConfigError(f"{name}: there is no run here or under {OUTPUTS}/ (a directory with a config.yaml)")


def load(path: Path) -> dict[str, Any]:
    """The content of a run's `config.yaml`, without what names the run."""
    recorded = read(path)
    if not isinstance(recorded, dict) or not isinstance(recorded.get("envs"), dict):
        raise ConfigError(f"{path} is not the config of a run")
    return {str(key): value for key, value in recorded.items() if key not in ("run", "hydra", "_target_")}


def read(path: Path) -> Any:
    """The content of a YAML file, with interpolations as they are. Raises ConfigError where it cannot be read."""
    try:
        return yaml_of(regular(path).read_text(encoding="utf-8"))
    except Exception as error:  # YAML's and OmegaConf's errors have no common base
        raise ConfigError(f"{path} cannot be read: {' '.join(safe(str(error)).split())}") from error


def recorded_overrides(run_dir: Path) -> list[str]:
    """What was typed for a run, the search path included; nothing where Hydra did not start it."""
    folder = run_dir / ".hydra"
    if not (folder / "overrides.yaml").is_file() or not (folder / "hydra.yaml").is_file():
        return []
    try:
        hydra, typed = read(folder / "hydra.yaml"), read(folder / "overrides.yaml")
        searched = [o for o in hydra["overrides"]["hydra"] if is_search_path(o)]
        own = [o for o in typed if suggestions.override_key(o).split(".")[0] != "run"]
    except (ConfigError, TypeError, KeyError, AttributeError) as error:
        reason = f"{error}; without that folder, config.yaml is followed alone"
        raise ConfigError(f"{folder} does not say what was typed: {reason}") from error
    refuse_hydras(folder / "overrides.yaml", own)
    return [*searched, *own]


def recorded_cwd(run_dir: Path) -> Path:
    """The folder that a run was started in; this one where it does not say, or where that is gone."""
    path, here = run_dir / "provenance.json", Path.cwd()
    try:
        cwd = Path(json.loads(path.read_bytes())["cwd"]) if path.is_file() else here
    except (*UNREADABLE, TypeError, KeyError) as error:
        raise ConfigError(f"{path} does not say where the run was started") from error
    if cwd.is_dir():
        return cwd
    print(f"{cwd}, where the run was started, is not there: its relative paths are taken from here", file=sys.stderr)
    return here


def is_search_path(override: str) -> bool:
    return suggestions.override_key(override) == "hydra.searchpath"


# --- what differs -----------------------------------------------------------------------------------------------------


def as_recorded(recorded: dict[str, Any], overrides: list[str], path: Path) -> tuple[list[str], list[str]]:
    """The overrides, none where they do not compose any more, and further ones that make `recorded` of them.

    Keys that there are no more are left out.
    """
    gone: list[str] = []
    try:
        now = composed(overrides)[1]
        if now == recorded:
            return overrides, []
        choices = list(choices_of(recorded, now))
        kept = without_superseded(overrides, choices)
        pins = [*choices, *differences(recorded, [*kept, *choices], gone)]
    except Exception as error:  # Hydra's, OmegaConf's and prl's own
        reason = ": ".join(safe(str(each)).partition("\n")[0] for each in (error, error.__cause__) if each)
        if not overrides:
            raise ConfigError(f"{path} cannot be followed any more: {reason}. Change or remove that there") from error
        found = as_recorded(recorded, [], path)  # raises where they are not what is wrong
        print(f"the overrides of {path.parent.name} do not compose any more ({reason})", file=sys.stderr)
        return found
    if gone:
        names = ", ".join(dict.fromkeys(gone))
        print(f"{path} has keys that there are no more, which are left out: {safe(names)}", file=sys.stderr)
    if pins:
        print(f"{path} is followed where its overrides now compose something else:", file=sys.stderr)
        more = [f"… and {len(pins) - LISTED} more"] if len(pins) > LISTED else []
        print("\n".join(f"  {pin}" for pin in [*pins[:LISTED], *more]), file=sys.stderr)
    return kept, pins


def choices_of(recorded: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """The options of groups whose classes are those of `recorded`, where `now` has others, and of further envs."""
    known: dict[tuple[str, Any], str] = {}
    for path, schema in schemas().items():
        group, name = path.split("/")
        known.setdefault((group, plain(schema() if isinstance(schema, type) else schema).get("_target_")), name)
    for group, names in options().items():
        node, other = recorded.get(group), now.get(group)
        if isinstance(node, dict) and isinstance(other, dict) and node.get("_target_") != other.get("_target_"):
            own = [name for name in ("custom_class", "custom") if name in names]
            for option in [name for name in [known.get((group, node["_target_"])), *own] if name][:1]:
                yield from (f"{group}={option}", f"++{group}._target_={written(node['_target_'])}")
    for name in recorded["envs"].keys() - now["envs"].keys():
        option = f"env@envs.{name}={name}" if name in options()["env"] else f"schema/env@envs.{name}=default"
        yield from (f"+{option}", f"++envs.{name}.taskset={written(recorded['envs'][name]['taskset'])}")


def differences(recorded: dict[str, Any], overrides: list[str], gone: list[str]) -> list[str]:
    """Further overrides that turn what `overrides` compose into `recorded`; keys that there are no more go to `gone`.

    Keys that follow others are compared once these are as recorded, so that they go on following them.
    """
    pins: list[str] = []
    for interpolated in (False, True):
        cfg, now = composed([*overrides, *pins])
        if now == recorded:
            break
        pins += between(cfg, now, recorded, gone, interpolated=interpolated)
    return pins


def composed(overrides: list[str]) -> tuple[DictConfig, dict[str, Any]]:
    """The config of `overrides`, as Hydra composes it, and as a run would write it."""
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = hydra.compose("train", allow_new_filters(["run.name=again", *overrides]))
    config = masked({key: node for key, node in plain(to_config(cfg, overrides)).items() if key != "run"})
    return cfg, cast(dict[str, Any], OmegaConf.to_container(OmegaConf.create(config)))


def between(
    cfg: Any, now: dict[str, Any], recorded: dict[str, Any], gone: list[str], where: str = "", *, interpolated: bool
) -> Iterator[str]:
    """The overrides that turn the node `now` into `recorded`.

    A key that only `now` has is a new knob where the node has a schema, and stays; elsewhere it was removed. A key that
    only `recorded` has was removed from the schema, and goes to `gone`; elsewhere it was added. A class other than the
    schema's has knobs of its own.
    """
    known = schema_defaults(cfg) if isinstance(cfg, DictConfig) else {}
    closed = known.get("_target_") == recorded.get("_target_")
    for key in [key for key in now if key not in recorded and key not in known and where]:
        yield f"~{where}{key}"
    for key, value in recorded.items():
        node = cfg._get_node(key) if isinstance(cfg, DictConfig) and key in cfg else None
        follows = node is not None and node._is_interpolation()
        if known and closed and key not in known:
            gone.append(f"{where}{key}")
            continue
        if (key in now and now[key] == value) or (follows and not interpolated):
            continue
        if isinstance(value, dict) and isinstance(now.get(key), dict) and not follows:
            yield from between(node, now[key], value, gone, f"{where}{key}.", interpolated=interpolated)
        elif isinstance(value, dict) and value:
            yield from (f"++{where}{key}.{name}={written(item)}" for name, item in value.items())
        else:
            yield f"++{where}{key}={written(value)}"


def written(value: Any) -> str:
    """A value in the grammar of Hydra's overrides."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    if isinstance(value, str):
        return str(QuotedString(value, Quote.single).with_quotes())
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)


def without_superseded(overrides: list[str], new: list[str]) -> list[str]:
    """`overrides` less those about a group for which `new` chooses an option, and those of keys that `new` sets.

    What `+key` added stays where `~key` removes it or `key` sets it: Hydra does so only with what is there. Where it is
    set to a mapping it goes, since Hydra would merge the two.
    """
    groups = options()
    keys = {suggestions.override_key(override) for override in new}
    altered = {suggestions.override_key(o) for o in new if not o.startswith("+") and "{" not in o}
    nodes = {key.split("@")[-1] for key in keys if key.split("@")[0] in groups} - {"env", "experiment", "debug"}
    if any(suggestions.override_key(override) == "env" for override in new):
        nodes |= {f"envs.{name}" for name in chosen_envs(overrides) - chosen_envs(new)}
    return [
        override
        for override in overrides
        for key in [suggestions.override_key(override)]
        for place in [key.split("@")[-1]]
        if (override.startswith("+") and key in altered)
        or not (key in keys or any(place == node or place.startswith(f"{node}.") for node in nodes))
    ]


def chosen_envs(overrides: list[str]) -> set[str]:
    """The options of `env=`; math where there is none, as by default."""
    values = [override.partition("=")[2] for override in overrides if suggestions.override_key(override) == "env"]
    return {name.strip() for value in values or ["math"] for name in value.strip(" []").split(",")}
