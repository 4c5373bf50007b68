"""Warm engines: which runs of a process have one in common, and when it ends."""

from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from prl.config.compose import compose
from prl.config.schema import LoraConfig, PolicyModelConfig
from prl.engines.base import EngineConfig, EngineSpec
from prl.launch.launcher import Launcher, ProcessDied
from prl.launch.shared_engines import WarmLauncher, may_keep_engines, stop_all

alive: list[str] = []
numbers = count()
OF_THIS_MACHINE = {"keeps_engines": True, "policy": SimpleNamespace(is_server=True)}


class Noted(Launcher):
    """Starts nothing; notes what it would have started and stopped."""

    def __init__(self):
        self.started = []

    def start_engine(self, spec):
        self.started.append(f"{spec.process} {next(numbers)}")
        alive.extend(self.started)
        return self.started[-1]

    def start_trainer(self, spec):
        raise AssertionError("not asked for")

    def ensure_alive(self):
        for engine in self.started:
            if engine not in alive:
                raise ProcessDied(f"process {engine!r} ended", engine)

    async def finish(self, timeout_s):
        pass

    def stop(self):
        alive[:] = [engine for engine in alive if engine not in self.started]


@pytest.fixture(autouse=True)
def none_is_left():
    yield
    stop_all()
    assert alive == []


@pytest.fixture
def spec(tmp_path):
    model = PolicyModelConfig(path="m")
    return EngineSpec(
        "engine", "policy", model, EngineConfig(_target_="e"), "cpu", 0, "t", tmp_path / "s" / "job" / "logs" / "e.log"
    )


def run(*specs, error=None):
    """The addresses of a run's engines."""
    launcher = WarmLauncher({"_target_": f"{__name__}.Noted"})
    launcher.__enter__()
    launcher.check_plan(SimpleNamespace(models=[SimpleNamespace(servers=[spec]) for spec in specs], **OF_THIS_MACHINE))
    urls = [launcher.start_engine(spec) for spec in specs]
    launcher.__exit__(type(error) if error else None, error, None)
    return urls


def test_what_another_run_left_is_stopped_before_an_engine_starts(spec):
    """A teacher of another model may hold the GPU or the port that the policy's engine is about to take."""
    teacher = replace(spec, process="teacher", model=replace(spec.model, path="t"))
    run(spec, teacher)
    other = replace(teacher, model=replace(spec.model, path="other"))
    plan = SimpleNamespace(models=[SimpleNamespace(servers=[each]) for each in (spec, other)], **OF_THIS_MACHINE)
    WarmLauncher({"_target_": f"{__name__}.Noted"}).check_plan(plan)
    assert len(alive) == 1 and alive[0].startswith("engine ")


def test_what_the_trainer_alone_reads_asks_for_no_other_engine(spec):
    lora = replace(spec.model, lr=0.1, lora=LoraConfig(rank=4))
    assert run(spec) == run(replace(spec, model=lora, seed=7, log=Path("/a/b/c"))) == alive


def test_another_engine_takes_the_place_of_the_one_before(spec):
    """A GPU, or the memory, has room for one."""
    teacher = replace(spec, process="teacher", model=replace(spec.model, path="t"))
    first = run(spec, teacher)
    second = run(replace(spec, model=replace(spec.model, max_model_len=64)), teacher)
    assert first[0] != second[0] and first[1] == second[1] and sorted(alive) == sorted(second)


def test_a_run_that_fails_leaves_none_warm(spec):
    failed = run(spec, error=RuntimeError())
    assert alive == [] and run(spec) != failed


def test_an_engine_that_the_next_run_does_not_ask_is_stopped_before_it_begins(spec):
    """The trainer of the next run may need its GPU."""
    teacher = replace(spec, process="teacher")
    policy, _ = run(spec, teacher)
    assert run(spec) == alive == [policy]


def test_an_engine_that_died_between_two_runs_is_started_again(spec):
    first = run(spec)
    alive.clear()
    second = run(spec)
    assert second != first and alive == second


@pytest.mark.parametrize(
    "overrides, alone, in_series",
    [
        ([], False, True),
        (["sweep.share_engine=false"], False, False),
        (["sweep.share_engine=true"], True, True),
        (["weights=transfer"], False, False),
        (["launcher=ray"], False, False),
        (["debug=fast"], False, False),
    ],
)
def test_runs_in_series_keep_engines_where_these_can_be_used_again(overrides, alone, in_series):
    config = compose(["run.name=a", *overrides])
    possible = may_keep_engines(config.launcher, config.weights)
    assert (config.sweep.shares(False), config.sweep.shares(possible)) == (alone, in_series)
