"""The experiments: each sweep has the jobs of the command beside it, none would be refused, and a README has it."""

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

COMMON = (
    "seed=0,1,2 sweep.share_engine=true model.lr=5e-4 trainer.schedule.decay_fraction=0.5 orchestrator.batch_size=128"
    " orchestrator.group_size=8 orchestrator.eval.every=10"
)
OPSD = "algo=opsd orchestrator.group_size=1 max_steps=50 trainer.optim.lr=5e-4,2e-4"
EXPERIMENTS = {
    "async": "run.name=exp-async orchestrator.max_async_level=0,1,2,3,4 max_steps=20"
    " orchestrator.max_off_policy_steps=${orchestrator.max_async_level}",
    "custom_credit": "run.name=exp-custom-credit algo=custom filters=none trainer.token_export=true max_steps=30"
    " algo.fn._target_=experiments.custom_credit.credit.alternating",
    "difficulty": "run.name=exp-difficulty curriculum=default,pools,odf,pools_odf max_steps=20"
    " envs.math.args.num_tasks=200",
    "echo": "run.name=exp-echo algo=echo env=math_retry sampling.max_tokens=16 max_steps=20"
    " +algo.roles.user.alpha=1e-9,0.5",
    "mixed": "run.name=exp-mixed experiment=mixed_grpo_opd orchestrator.keep_batches=true max_steps=30",
    "opd_advantages": "run.name=exp-opd-advantages experiment=on_policy trainer.token_export=true max_steps=20"
    " algo=opd algo._target_=experiments.opd_advantages.credit.OPDWithAdvantages +algo.scale=0,1",
    "opd_grpo_sft": "run.name=exp-distil algo=opd,sft orchestrator.group_size=1 max_steps=30",
    "opd_grpo_sft algo=grpo orchestrator.group_size=8 run.name=exp-grpo": "run.name=exp-grpo algo=grpo max_steps=30",
    "opsd_drift": f"run.name=exp-opsd-drift {OPSD}",
    "opsd_drift sampling.max_tokens=3 run.name=exp-opsd-cut-off": f"run.name=exp-opsd-cut-off {OPSD}"
    " sampling.max_tokens=3",
    "three_seeds algo=max_rl run.name=three-seeds": "algo=max_rl run.name=three-seeds",
}
"""After `experiment=`, and as it would be typed without one, beside COMMON."""


RECIPES = {"dapo", "dr_grpo", "rloo", "gspo", "cispo", "tis", "gkd", "sdft", "reinforce_pp"}
"""Single runs, by the names of papers: `tests/e2e/test_recipes.py` trains them."""


def jobs(overrides):
    """Each job of a sweep: what varies, and the overrides that it has in common with the others."""
    given = {each.get_key_element().lstrip("+"): each for each in OverridesParser.create().parse_overrides(overrides)}
    varied = {key: list(each.sweep_string_iterator()) for key, each in given.items() if each.is_sweep_override()}
    values = sorted(itertools.product(*([f"{key}={value}" for value in varied[key]] for key in sorted(varied))))
    return values, [each.input_line for key, each in given.items() if key not in varied]


@functools.cache
def composed(*overrides):
    """The config of a sweep as Hydra has it; nobody may change it."""
    overrides = list(overrides)
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        config = hydra.compose("train", overrides, return_hydra_config=True)
    config.hydra.overrides.task = overrides
    return config


@pytest.mark.parametrize("words", EXPERIMENTS)
def test_a_sweep_has_the_jobs_that_could_be_typed(words):
    typed = [f"experiment={words.split()[0]}", *words.split()[1:]]
    config = composed(*typed)
    varied, _ = jobs(overrides_of(config.hydra))
    expected, fixed = jobs([*COMMON.split(), *EXPERIMENTS[words].split()])
    assert config.hydra.mode.name == "MULTIRUN" and varied == expected
    job = varied[-1]
    run = compose([*typed, *job])
    new = [f"+{each}" if each.startswith(("algo.scale", "algo.roles")) else each for each in job]
    assert run == compose([*fixed, *new])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        validate(run)
        build_components(run)


@pytest.mark.parametrize("words", [words for words in EXPERIMENTS if not words.startswith("three_seeds")])
def test_its_readme_has_the_command_and_the_report(words):
    name, *more = words.split()
    page = Path(__file__).parents[1].joinpath("experiments", name, "README.md").read_text()
    assert f"\npython -m prl.train experiment={words}\n" in page
    folder = folder_of(composed(f"experiment={name}", *more))
    [report] = [line for line in page.splitlines() if line.startswith("prl report ")]
    assert f" {folder} " in report and report.endswith(f" --out experiments/{name}")


def test_every_experiment_is_here():
    single = {"mixed_grpo_opd", "on_policy", *RECIPES}
    assert {words.split()[0] for words in EXPERIMENTS} | single == {
        path.stem for path in CONF.glob("experiment/*.yaml")
    }
