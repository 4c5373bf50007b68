"""The experiments: no job of theirs would be refused, and a page has the command of each."""

import functools
import itertools
import warnings
from pathlib import Path

import hydra
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from prl.config.compose import CONF, compose
from prl.config.validate import validate
from prl.launch.components import build_components
from prl.tools.sweep.naming import folder_of, overrides_of

BASES = {"sanity_tasks", "max_rl_base", "forgetting_start", "distil_back_teacher"}
"""Single runs that a sweep begins with; the page of the sweep has their commands."""
RECIPES = {"dapo", "dr_grpo", "rloo", "gspo", "cispo", "tis", "gkd", "sdft", "reinforce_pp"}
"""Single runs, by the names of papers: `tests/e2e/test_recipes.py` trains them."""
SINGLE = {"mixed_grpo_opd", "on_policy", *BASES, *RECIPES}
AGAIN = [
    "staleness loss=ppo loss.proximal=true loss.correction=tis run.name=exp-staleness-decoupled",
    "opsd_drift sampling.max_tokens=3 run.name=exp-opsd-cut-off",
]
"""Sweeps that a page makes of an experiment's."""
SWEEPS = sorted({path.stem for path in CONF.glob("experiment/*.yaml")} - SINGLE)


@functools.cache
def composed(*overrides):
    """The config of a sweep as Hydra has it; nobody may change it."""
    overrides = list(overrides)
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        config = hydra.compose("train", overrides, return_hydra_config=True)
    config.hydra.overrides.task = overrides
    return config


def jobs(words):
    """The overrides of each job of a sweep."""
    typed = [f"experiment={words[0]}", *words[1:]]
    sweep = composed(*typed)
    assert sweep.hydra.mode.name == "MULTIRUN"
    given = {
        each.get_key_element(): each for each in OverridesParser.create().parse_overrides(overrides_of(sweep.hydra))
    }
    varied = [
        [f"{key}={value}" for value in each.sweep_string_iterator()]
        for key, each in given.items()
        if each.is_sweep_override() and key != "seed"
    ]
    return [[*typed, *job] for job in itertools.product(*varied)]


def check(overrides):
    """Build a job as a run would, with pools that another run would have left."""
    run = compose([*overrides, "curriculum.load_from=null"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        validate(run)
        build_components(run)


@pytest.mark.parametrize("words", [*SWEEPS, *AGAIN])
def test_no_job_of_a_sweep_is_refused(words):
    for overrides in jobs(words.split()):
        check(overrides)


@pytest.mark.parametrize("name", sorted(BASES))
def test_no_base_is_refused(name):
    check([f"experiment={name}", "run.name=x"])


@pytest.mark.parametrize("words", [words for words in [*SWEEPS, *AGAIN] if words != "three_seeds"])
def test_its_page_has_the_command_and_the_report(words):
    name, *more = words.split()
    page = Path(__file__).parents[1].joinpath("experiments", name, "README.md").read_text()
    assert f"\nprl train experiment={words}\n" in page.replace("python -m prl.train", "prl train")
    folder = folder_of(composed(f"experiment={name}", *more))
    [report] = [line for line in page.splitlines() if line.startswith("prl report ")]
    assert f" {folder} " in report and report.endswith(f" --out experiments/{name}")
