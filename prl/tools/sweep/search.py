"""Searches over several seeds: what Hydra's Optuna sweeper optimises is their mean."""

import sys
from dataclasses import replace
from functools import partial
from statistics import fmean
from types import SimpleNamespace
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn
from hydra_plugins.hydra_optuna_sweeper import _impl

NO_BEST = "Record does not exist."
"""What Optuna 2.10 says when it is asked for the best of a study whose trials have all failed."""


class MeanOverSeeds(_impl.OptunaSweeperImpl):
    """The sweeper of hydra-optuna-sweeper 1.3, but for a choice of seeds: each trial has a job for each of them."""

    def sweep(self, arguments: list[str]) -> None:
        """Run the search that `hydra.sweeper.params` and then the overrides `arguments` ask for."""
        given = OverridesParser.create().parse_overrides([*self._parse_sweeper_params_config(), *arguments])
        of_seed = [override for override in given if override.get_key_element() == "seed"]
        if of_seed and of_seed[-1].is_discrete_sweep():
            seeds = [f"seed={value}" for value in of_seed[-1].sweep_string_iterator()]
            self.launcher: Any = SimpleNamespace(launch=partial(launch_each, self.launcher, seeds))
            self.params = None  # they are among the arguments now
            arguments = [str(override.input_line) for override in given if override not in of_seed]
        try:
            super().sweep(arguments)
        except ValueError as error:
            if str(error) != NO_BEST:
                raise
            print("the search has no result: none of its trials has an objective", file=sys.stderr, flush=True)


def launch_each(launcher: Any, seeds: list[str], trials: Any, initial_job_idx: int) -> list[JobReturn]:
    """Launch a job for each seed of each trial, all of them at once.

    Returns:
        For each trial a job with their mean; where not all have a value, one that has none.
    """
    jobs = [[*trial, seed] for trial in trials for seed in seeds]
    # Hydra counts jobs, of which a trial has one for each seed.
    returned = list(launcher.launch(jobs, initial_job_idx=initial_job_idx * len(seeds)))
    return [mean_of(returned[place : place + len(seeds)]) for place in range(0, len(returned), len(seeds))]


def mean_of(jobs: list[JobReturn]) -> JobReturn:
    """A job with the mean of what the jobs returned; the first that returned no number, if there is one."""
    without = [job for job in jobs if not isinstance(job._return_value, float)]
    return without[0] if without else replace(jobs[0], _return_value=fmean(job.return_value for job in jobs))


def install() -> None:
    """Have Hydra's Optuna sweeper average over seeds: Hydra takes no sweeper from outside the package hydra_plugins."""
    _impl.OptunaSweeperImpl = MeanOverSeeds  # type: ignore[misc]
