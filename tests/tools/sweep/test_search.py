"""A search over several seeds, with Hydra's own sweeper and a launcher that runs nothing."""

from statistics import fmean
from types import SimpleNamespace

import optuna
import pytest
from hydra import compose, initialize_config_dir
from hydra.core.utils import JobReturn, JobStatus
from hydra.utils import instantiate

from prl.config.compose import CONF
from prl.tools.sweep import search

RATE = "trainer.optim.lr=interval(0.1,0.9)"


@pytest.fixture
def search_for(tmp_path, monkeypatch):
    """`search_for(*overrides, params=…, value=…)`: the jobs of each launch, and the study that is left."""
    monkeypatch.setattr(search._impl, "OptunaSweeperImpl", search._impl.OptunaSweeperImpl)
    search.install()

    def run(*overrides, params=None, value=lambda job: 1.0):
        launches = []

        def launch(jobs, initial_job_idx):
            found = [dict(each.split("=") for each in job) for job in jobs]
            launches.append((initial_job_idx, found))
            return [JobReturn(status=JobStatus.COMPLETED, _return_value=value(job)) for job in found]

        with initialize_config_dir(str(CONF), version_base="1.3"):
            typed = ["run.name=s", "sweep=optuna", f"hydra.sweep.dir={tmp_path}", "hydra.sweeper.n_trials=3"]
            config = compose("train", typed, return_hydra_config=True)
        config.hydra.sweeper.params = params
        sweeper = instantiate(config.hydra.sweeper)
        sweeper.sweeper.config, sweeper.sweeper.hydra_context = config, object()
        sweeper.sweeper.launcher = SimpleNamespace(launch=launch)
        sweeper.sweep(list(overrides))
        return launches, optuna.load_study(study_name=None, storage=f"sqlite:///{tmp_path}/study.db")

    return run


def reward(job):
    return float(job["trainer.optim.lr"]) + float(job["seed"])


@pytest.mark.parametrize("seeds", ["3,5", "range(3,6,2)"])
def test_a_trial_counts_the_mean_over_its_seeds(search_for, seeds):
    launches, study = search_for(RATE, f"seed={seeds}", "max_steps=2", value=reward)
    assert [first for first, _ in launches] == [0, 2, 4]
    for (_, jobs), trial in zip(launches, study.trials, strict=True):
        assert [job["seed"] for job in jobs] == ["3", "5"] and {job["max_steps"] for job in jobs} == {"2"}
        rates = {float(job["trainer.optim.lr"]) for job in jobs}
        assert list(trial.params) == ["trainer.optim.lr"] and rates == set(trial.params.values())
        assert trial.value == pytest.approx(fmean(map(reward, jobs))) == pytest.approx(min(rates) + 4)
    assert len({trial.value for trial in study.trials}) == 3


def test_seeds_of_an_experiment_are_averaged_as_typed_ones_are(search_for):
    params = {"seed": "0,1,2", "trainer.optim.lr": "interval(0.1,0.9)"}
    launches, _ = search_for(params=params)
    assert [[job["seed"] for job in jobs] for _, jobs in launches] == [["0", "1", "2"]] * 3


def test_a_trial_without_all_its_seeds_fails(search_for):
    values = iter([0.5, None, 0.5, 0.7, None, None])
    _, study = search_for(RATE, "seed=0,1", value=lambda job: next(values))
    assert [trial.value for trial in study.trials] == [None, pytest.approx(0.6), None]
    assert [trial.state.name for trial in study.trials] == ["FAIL", "COMPLETE", "FAIL"]


def test_one_seed_is_one_job(search_for):
    launches, study = search_for(RATE, "seed=4", value=reward)
    assert [len(jobs) for _, jobs in launches] == [1, 1, 1]
    assert [trial.value for trial in study.trials] == [trial.params["trainer.optim.lr"] + 4 for trial in study.trials]


def test_a_search_without_a_result_ends_in_a_sentence(search_for, capsys):
    _, study = search_for(RATE, value=lambda job: None)
    assert [trial.state.name for trial in study.trials] == ["FAIL"] * 3
    assert capsys.readouterr().err.splitlines()[-1] == "the search has no result: none of its trials has an objective"
    with pytest.raises(ValueError, match="low"):
        search_for("trainer.optim.lr=interval(0.9,0.1)")
