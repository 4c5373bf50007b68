"""What sweeps and jobs are called."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from prl.tools.sweep import naming
from prl.tools.sweep.naming import apart, job_name

SWEPT = ["algo=grpo,max_rl", "seed=0,1,2", "max_steps=3", "+engine.args.block-size=16"]


def folder_of(typed, **params):
    """The directory of a sweep, of overrides that were typed and of those of an experiment."""
    set_by = [each for each in typed if each.startswith(("run.", "hydra.sweep."))]
    run = {"name": "${now:%Y}", "dir": "outputs/${run.name}"}
    hydra = {"sweep": {"dir": run["dir"]}, "sweeper": {"params": params or None}}
    hydra["overrides"] = {"task": [each for each in typed if not each.startswith("hydra")]}
    defaults = OmegaConf.create({"run": run, "hydra": hydra})
    return naming.folder_of(OmegaConf.merge(defaults, OmegaConf.from_dotlist(set_by)))


def test_varying_overrides_are_told_from_fixed_ones():
    more = ["trainer.optim.lr=interval(1,2)", "env=[math,reverse_text]", "run.name=x", "sweep=lr_search"]
    found, env = apart([*SWEPT, *more]), "[math,reverse_text]"
    assert found.varied == ("algo", "seed", "trainer.optim.lr")
    assert found.fixed == {"env": env, "engine.args.block-size": "16", "max_steps": "3", "sweep": "lr_search"}
    assert "run.name" in found.keys and "seed" not in found.keys, "it names no job either"


def test_a_known_key_varies_with_one_value():
    assert apart(["algo=grpo", "seed=4"], known=("seed",)).varied == ("seed",)


def test_directory_ignores_order_and_number_of_values():
    folder = folder_of(SWEPT)
    assert folder.parent == Path("outputs") and folder.name.startswith("sweep-algo-seed-")
    assert folder_of(SWEPT[::-1]) == folder
    assert folder_of(["seed=0,1,2,3", *SWEPT[:1], *SWEPT[2:]]) == folder, "more values"
    same = ("sweep=joblib", "hydra.launcher.n_jobs=3", "sweep.share_engine=true", "optimized_metric.last=1")
    assert folder_of([*SWEPT, *same]) == folder, "how it is run is not what is run"
    others = [[*SWEPT, "trainer.seq_len=9"], ["max_steps=4", *SWEPT[:2], SWEPT[3]], ["seed=0", *SWEPT[:1], *SWEPT[2:]]]
    assert len({folder, *map(folder_of, others)}) == 4


def test_an_experiment_varies_what_could_have_been_typed():
    assert folder_of([*SWEPT[:1], *SWEPT[2:]], seed="0,1,2") == folder_of(SWEPT)
    assert folder_of(SWEPT, seed="7", algo="opd") == folder_of(SWEPT), "what is typed wins"


@pytest.mark.parametrize(
    ("override", "folder"),
    [
        ("run.name=mine", "outputs/mine"),
        ("run.name=my own", "outputs/my own"),
        ("run.dir=/data/here", "/data/here"),
        ("hydra.sweep.dir=there", "there"),
    ],
)
def test_a_directory_that_is_given(override, folder):
    assert folder_of([*SWEPT, override]) == Path(folder)


def test_varying_run_names_do_not_scatter_a_sweep():
    assert folder_of([*SWEPT, "run.name=${prl.choice:algo}-1"]) == folder_of(SWEPT)


def test_a_job_is_named_by_sorted_varying_keys():
    fixed = ["max_steps", "engine.args.block-size"]
    assert job_name(["seed=1", "max_steps=3", "+algo=grpo", "+engine.args.block-size=16"], fixed) == "algo=grpo,seed=1"
    assert job_name(["max_steps=3"], fixed) == "job"


def test_names_stay_short_flat_and_apart():
    thirteen = [f"trainer.some.option_{index}={'x' * 40}" for index in range(13)]
    other = [*thirteen[:-1], "trainer.some.option_12=y"]
    given = (thirteen, other, ["model.path=/a/../b c"], ["model.path=_a_.._b_c"], ["x=" + "ä" * 99])
    names = {job_name(overrides, []) for overrides in given}
    assert len(names) == 5
    for name in names:
        assert len(name.encode()) <= 100 and len(Path(name).parts) == 1
