"""Configs with one thing wrong: every key of a composed config is dropped, renamed, given wrong types and odd values.

A case goes the way of an override on the command line, up to the point where processes would start. It is accepted, or
refused by one line that names a key; all else is a finding.
"""

import copy
import random
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from prl.base.errors import ConfigError
from prl.config.compose import CONF, allow_new_filters, options, to_config
from prl.config.hardware import Machine
from prl.config.schema import TrainConfig
from prl.config.validate import validate
from prl.launch.builder import read_tasks
from prl.launch.command import about, one_line, refused
from prl.launch.components import build_components
from prl.launch.plan import plan
from prl.launch.shared_engines import launcher_of

QUICK = ("run.name=fuzz", "engine.device=cpu", "trainer.device=cpu")
"""Overrides of every base: what takes no time, on any machine."""
VALUES: dict[str, str] = {
    "null": "null",
    "empty string": "''",
    "blank": "' '",
    "word": "nonsense",
    "unicode": "'ünï ☃ 名'",
    "negative": "-1",
    "zero": "0",
    "one": "1",
    "float": "2.5",
    "huge": "1000000000000000000000",
    "large": "5000000",
    "infinite": "1e400",
    "not a number": "nan",
    "tiny": "1e-300",
    "bool": "true",
    "list": "[]",
    "list of words": "[a,b]",
    "list of null": "[null]",
    "dict": "{}",
    "dict of a key": "{nonsense: 1}",
    "another's node": "{_target_: prl.weights.files.FileWeights}",
    "missing": "'???'",
    "interpolation": "${nope}",
    "interpolation of itself": "${run}",
    "environment": "${oc.env:PRL_NOT_THERE}",
    "half an interpolation": "'${'",
    "shell": "'$(touch fuzzed)'",
    "newline": "'a\nb'",
    "escape": "'\x1b]0;x\x07'",
    "path": "'../../x'",
    "nul": "'a\x00b'",
    "long": "'" + "x" * 5000 + "'",
    "module": "os.system",
    "class": "torch.optim.Adamm",
}
"""Values by what is wrong with them, as they are typed."""


@dataclass(frozen=True)
class Case:
    """One override of a base."""

    base: tuple[str, ...]
    key: str
    mutation: str
    override: str


@dataclass(frozen=True)
class Finding:
    """What became of a case: accepted, refused, or what is wrong with how it ended."""

    case: Case
    kind: str
    said: str


GROUPS = (
    "env",
    "algo",
    "loss",
    "filters",
    "curriculum",
    "model",
    "renderer",
    "teacher",
    "experiment",
    "monitor",
    "sweep",
)
"""Groups whose options are bases of their own."""
NEEDED: dict[str, tuple[str, ...]] = {
    "algo=opd": ("teacher=local",),
    "algo=sft": ("teacher=local",),
    "algo=custom": ("algo.fn._target_=prl.algorithms.advantage.centred",),
    "algo=custom_class": ("algo._target_=prl.algorithms.grpo.GRPOAlgorithm",),
    "loss=custom": ("loss._target_=prl.losses.aipo_loss",),
    "model=hf": ("model.path=${prl.model:tiny}", "model.max_model_len=512"),
    "teacher=endpoint": ("algo=opd", "teacher.name=t", "teacher.base_url=http://127.0.0.1:9/v1"),
    "env=jsonl": ("envs.jsonl.args.path=nowhere.jsonl",),
}
"""What an option needs beside it."""
DEFAULT = ("envs.math.args.num_tasks=8", "envs.math.eval_args.num_tasks=8")
"""The base of the default run: with few tasks, which are made in every case."""


def bases() -> list[tuple[str, ...]]:
    """The default run, and each option of the groups that a run is composed of."""
    named = [f"{group}={option}" for group in GROUPS for option in options().get(group, ())]
    return [DEFAULT, *((name, *NEEDED.get(name, ())) for name in named)]


def composed(base: tuple[str, ...]) -> DictConfig:
    """The config of a base, as Hydra hands it to a job."""
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra.compose("train", [*QUICK, *base])


def keys(config: DictConfig, prefix: str = "") -> Iterator[str]:
    """Every key of a config, nodes and leaves, dotted."""
    for name in map(str, config):
        yield prefix + name
        child = config._get_node(name)
        if isinstance(child, DictConfig) and not (child._is_none() or child._is_missing() or child._is_interpolation()):
            yield from keys(child, f"{prefix}{name}.")


def cases(base: tuple[str, ...], seen: set[str]) -> tuple[DictConfig, list[Case]]:
    """The config of a base and its cases, of keys that no base before it had; `seen` has those, and grows."""
    config = composed(base)
    new = [key for key in keys(config) if key not in seen]
    seen.update(new)
    return config, [case for key in new for case in cases_of(base, key)]


def cases_of(base: tuple[str, ...], key: str) -> Iterator[Case]:
    """Everything that is done to a key."""
    yield Case(base, key, "dropped", f"~{key}")
    yield Case(base, key, "renamed", f"{key}x=1")
    yield Case(base, key, "added beside", f"+{key}x=1")
    yield Case(base, key, "given keys", f"+{key}.x=1")
    for mutation, value in VALUES.items():
        yield Case(base, key, mutation, f"{key}={value}")


def outcome(case: Case, config: DictConfig) -> Finding:
    """Take the road of `prl train <base> <override>` until processes would start."""
    config = copy.deepcopy(config)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            overrides = allow_new_filters([case.override])
            try:
                parsed = OverridesParser.create().parse_overrides(overrides)
                ConfigLoaderImpl._apply_overrides_to_config(parsed, config)
            except Exception as error:  # as `command.run` does
                return judged(case, about(overrides, one_line(error)))
            typed = to_config(TrainConfig, config, overrides)
            machine = Machine(typed.machine)
            validate(typed, machine)
            keeps = typed.sweep.shares(False)
            with launcher_of(typed.launcher, keeps_engines=keeps) as launcher:
                planned = plan(typed, machine, keeps_engines=keeps)
                launcher.check_plan(planned)
                read_tasks(typed, planned, build_components(typed))
    except ConfigError as error:
        return judged(case, refused(error))
    except Exception as error:
        return Finding(case, "crashed", f"{type(error).__name__}: {str(error)[:300]}")
    return Finding(case, "accepted", "")


def judged(case: Case, said: str) -> Finding:
    """A refusal, if it is one line and names the key or a part of it."""
    lines = said.strip().splitlines()
    if len(lines) != 1 or len(lines[0]) > 2000:
        return Finding(case, "not one line", said)
    parts = [part for part in re.split(r"[.]", case.key) if part]
    if not any(part in said for part in parts):
        return Finding(case, "names no key", said)
    return Finding(case, "refused", said)


def sample(every: list[Case], count: int, seed: int) -> list[Case]:
    """`count` of the cases, the same ones for a seed."""
    return random.Random(seed).sample(every, min(count, len(every)))
