"""Differences between runs, and the runs that differ in nothing but their seeds."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import msgspec

from prl.config.run_yaml import flat
from prl.config.suggestions import override_key
from prl.runs.run_dir import NOT_OF_A_RUN
from prl.tools.report.runs import Run

NOT_COMPARED = ("*.urls", "*.port", "*.base_url")
"""Config keys that say which servers a run used; they make no variant, as those of `NOT_OF_A_RUN` make none."""
LENGTH = ("max_steps", "checkpoint.", "monitor.", "orchestrator.eval.")
"""Beginnings of keys that say for how long a run trains and what it records: others tell runs apart better."""
RUN = "run"
"""Column with the names of runs of several places."""
TYPED = 3
"""Most typed keys that stand beside the names of runs of several places."""
ABSENT = "–"
NUMBER = r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?"
LONG_NUMBER = r"-?\d+\.\d{5,}(e[-+]?\d+)?"


@dataclass(frozen=True, kw_only=True)
class Variants:
    """Runs sorted by what differs between their configs. A run without a config is in none of these."""

    columns: list[str]
    """Keys that a sweep varies, and the fewest others that tell the variants apart; typed ones come first. Before them
    `RUN`, where the runs are of several places."""
    members: dict[tuple[str, ...], list[Run]]
    """Values of `columns` -> the runs of the variant, in the order in which they were given; the variants in the order
    of their values."""
    differences: dict[str, list[str]]
    """Config key -> its value in each variant, for all keys that vary, seeds left out."""

    @property
    def heads(self) -> list[str]:
        """`columns`, each with no more of its end than tells it from the others: `lr` for `trainer.optim.lr`."""
        ends = [[key.split(".", up)[-1] for up in range(key.count("."), -1, -1)] for key in self.columns]
        counts = Counter(end for mine in ends for end in mine)
        return [next((end for end in mine if counts[end] == 1), mine[-1]) for mine in ends]

    def label(self, values: tuple[str, ...]) -> str:
        """`algo=grpo, lr=0.001`; of several places `first (algo=grpo)`; where nothing varies, `all runs`."""
        texts = [shown_text(value) if ", " in value else value for value in values]  # else two could read alike
        pairs = [f"{key}={text}" for key, text in zip(self.heads, texts, strict=True)]
        if self.columns[:1] != [RUN]:
            return ", ".join(pairs) or "all runs"
        return f"{values[0]} ({', '.join(pairs[1:])})" if pairs[1:] else values[0]


def variants(runs: list[Run], *, named: bool = False) -> Variants:
    """Sort runs by their configs; `named` says that they are of several places, whose names tell more than a key."""
    known = [run for run in runs if run.config]
    configs = [{key: shown(value) for key, value in flat(run.config).items()} for run in known]
    keys = [key for key in dict.fromkeys(key for config in configs for key in config) if _compared(key)]
    varying = {key: values for key in keys if len(set(values := [config.get(key, ABSENT) for config in configs])) > 1}
    same = [tuple(values[place] for values in varying.values()) for place in range(len(known))]
    searched = [key for key in dict.fromkeys(key for run in runs for key in run.searched) if _compared(key)]
    typed = [key for key in dict.fromkeys(key for run in known for key in overrides_of(run)) if _compared(key)]
    candidates = {key: _values(key, known, configs) for key in [*searched, *typed]} | varying
    if named:
        told = sorted((key for key in typed if key in varying), key=_says_little)
        searched += [key for key in told[:TYPED] if key not in searched]
    chosen = _telling(candidates, same, searched)
    columns = {RUN: _places(known, same)} if named else {}
    columns |= {key: _short(chosen[key]) for key in sorted(chosen, key=_says_little)}
    orders = {key: in_order(values) for key, values in columns.items()}
    members: dict[tuple[str, ...], list[Run]] = {}
    # Variants in the order of their values; the runs of each as they were given.
    for place in sorted(
        range(len(known)), key=lambda place: [orders[key].index(columns[key][place]) for key in columns]
    ):
        members.setdefault(tuple(values[place] for values in columns.values()), []).append(known[place])
    firsts = [known.index(group[0]) for group in members.values()]
    differences = {key: [values[place] for place in firsts] for key, values in varying.items()}
    return Variants(columns=list(columns), members=members, differences=differences)


def in_order(values: Iterable[str]) -> list[str]:
    """The values of a key, each once: numbers by their size, then texts in the order in which they are given."""
    distinct = dict.fromkeys(values)
    return sorted(filter(is_number, distinct), key=float) + [value for value in distinct if not is_number(value)]


def is_number(value: str) -> bool:
    return re.fullmatch(NUMBER, value) is not None


def seed_of(run: Run) -> str:
    """The run's seed, as text."""
    return shown(run.config["seed"]) if "seed" in run.config else ABSENT


def overrides_of(run: Run) -> dict[str, str]:
    """Return what was typed for the run: config key -> value, as text."""
    return {override_key(override): override.partition("=")[2] for override in run.overrides}


def short_paths(paths: Sequence[Path]) -> list[str]:
    """The fewest last parts of each absolute path that no other one ends in: `run`, or `a/run` beside `b/run`."""
    ends = {path: [str(Path(*path.parts[place:])) for place in reversed(range(len(path.parts)))] for path in paths}
    counts = Counter(end for mine in ends.values() for end in mine)
    return [next(end for end in ends[path] if counts[end] == 1) for path in paths]


def shown(value: Any) -> str:
    """A config value in a cell: text as it is, but for `"null"` and the like, anything else as JSON."""
    plain = isinstance(value, str) and value not in ("null", "true", "false")
    return str(value) if plain else shown_text(value)


def shown_text(value: Any) -> str:
    """A value as JSON."""
    return msgspec.json.encode(value, enc_hook=str).decode()


def number(value: float) -> str:
    """A number in at least three digits, or a dash for NaN. What is below 1e-12 comes of rounding, and is 0."""
    if math.isnan(value):
        return ABSENT
    if value == round(value) and abs(value) >= 1:
        return f"{value:,.0f}"
    if 1e-12 < abs(value) < 0.01:
        return f"{value:.3g}"
    return f"{value:,.{3 if abs(value) < 10 else 1 if abs(value) < 100 else 0}f}"


def interval(mean: float, half: float) -> str:
    """`0.285 ± 0.004`: a mean and half the width of its interval, in no more digits than it."""
    return f"{number(mean)} ± {half:.3f}" if half < 0.01 <= abs(mean) else f"{number(mean)} ± {number(half)}"


def _compared(key: str) -> bool:
    """Return whether a key makes a difference; seeds, the env's own included, are what a variant varies in."""
    if key.split(".")[-1] == "seed" or f"{key}.".startswith(NOT_OF_A_RUN):  # with a dot: a group's own choice, `sweep`
        return False
    return not any(fnmatch(key, pattern) for pattern in NOT_COMPARED)


def _values(key: str, runs: list[Run], configs: list[dict[str, str]]) -> list[str]:
    """The value of a key for each run: in its config, else as it was typed, as for a group."""
    return [config.get(key, overrides_of(run).get(key, "default")) for run, config in zip(runs, configs, strict=True)]


def _says_little(key: str) -> bool:
    """Return whether a key is one of `LENGTH`."""
    return key.startswith(LENGTH)


def _places(runs: list[Run], same: list[tuple[str, ...]]) -> list[str]:
    """For each run the names of the runs that differ from it in their seed alone; its own where two have one seed.

    Jobs of a sweep have the name of the sweep.
    """
    names = short_paths([run.dir.parent if run.searched else run.dir for run in runs])
    groups = [[place for place, config in enumerate(same) if config == own] for own in same]
    distinct = [len({seed_of(runs[place]) for place in group}) == len(group) for group in groups]
    joined = ["+".join(dict.fromkeys(names[place] for place in group)) for group in groups]
    return [joined[place] if distinct[place] else name for place, name in enumerate(names)]


def _short(values: list[str]) -> list[str]:
    """The long numbers among values of a key in four digits, where that tells as many values apart."""
    short = [f"{float(value):.4g}" if re.fullmatch(LONG_NUMBER, value) else value for value in values]
    return short if len(set(short)) == len(set(values)) else values


def _telling(
    candidates: dict[str, list[str]], same: list[tuple[str, ...]], searched: list[str]
) -> dict[str, list[str]]:
    """Return the keys that were searched, then those with most values, until all different runs are told apart."""

    def parts(keys: list[str]) -> int:
        return len(set(zip(*(candidates[key] for key in keys), strict=True))) or 1

    def parts_the_same(key: str) -> bool:
        return len(set(zip(same, candidates[key], strict=True))) > len(set(same))

    chosen = [key for key in searched if not parts_the_same(key)]
    for key in sorted(candidates, key=lambda key: (_says_little(key), -len(set(candidates[key])))):
        if parts([*chosen, key]) > parts(chosen) and not parts_the_same(key):
            chosen.append(key)
    return {key: values for key, values in candidates.items() if key in chosen}
