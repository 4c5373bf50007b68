"""SIGKILL and SIGTERM to every process of a run, in every phase.

The run ends or goes on, says so, leaves nothing behind, and goes on in its directory when it is begun again: there the
next fault finds it.
"""

import signal
import zlib
from itertools import product

import pytest
from phased_run import PhasedRun, half_written

pytestmark = pytest.mark.engine

PHASES = ("generating", "scoring", "packing", "training", "updating", "checkpointing", "start")
SIGNALS = (signal.SIGKILL, signal.SIGTERM)
VICTIMS = {
    "two ranks": ("launcher", "trainer rank 0", "trainer rank 1", "trainer rank 0, shim"),
    "own engine": ("engine", "engine, core", "engine, shim"),
    "own teacher": ("teacher", "teacher, core", "teacher, shim"),
}
"""The processes of each run that are told: those that the others have as well are told once."""
OVERRIDES = {
    "two ranks": ["trainer.num_processes=2"],
    "own engine": ["inference.restarts=1000"],
    "own teacher": ["algo=opd", "teacher=local", "teacher.inference.restarts=1000"],
}
IN_SUITE = {
    ("two ranks", "trainer rank 1", signal.SIGKILL, "training"),
    ("two ranks", "launcher", signal.SIGKILL, "checkpointing"),
    ("own engine", "engine, core", signal.SIGTERM, "updating"),
}


def named(case):
    """The name of a case, without what a shell would split."""
    _, victim, number, phase = case
    return f"{victim.replace(', ', '-').replace(' ', '-')}-{number.name}-{phase}"


CASES = [
    pytest.param(case[0], case[1:], id=named(case), marks=() if case in IN_SUITE else pytest.mark.chaos)
    # In no order that a reader would expect, but always the same: the first hour of a run has some of everything.
    for case in sorted(
        ((run, *each) for run, victims in VICTIMS.items() for each in product(victims, SIGNALS, PHASES)),
        key=lambda case: (case[0], zlib.crc32(named(case).encode())),
    )
]


@pytest.fixture(scope="module")
def broken_run(request, tmp_path_factory):
    """`broken_run(name)`: the run of that name, in one directory for all of its faults."""
    runs = {}

    def named(name):
        if name not in runs:
            overrides, env = OVERRIDES[name], {}
            if name != "own engine":
                engine = request.getfixturevalue("engine")
                overrides, env = [*overrides, f"inference.urls=[{engine.url}]"], {"PRL_TOKEN": engine.token}
            for other in runs.values():  # one at a time
                end(other)
            runs[name] = PhasedRun(tmp_path_factory.mktemp("broken"), *overrides, env=env)
        return runs[name]

    yield named
    for run in runs.values():
        end(run)
        assert run.rollouts_twice() == []


def end(run):
    if run.alive:
        run.kill()


@pytest.mark.parametrize("name, fault", CASES)
def test_a_signal_to_a_process(broken_run, name, fault, outcome):
    run = broken_run(name)
    try:
        breaks(run, *fault, outcome)
    except BaseException:  # the next fault finds a run that can be broken
        end(run)
        raise


def breaks(run, victim, number, phase, outcome):
    """Send the signal, and tell what came of it."""
    found = run.break_it(victim, number, phase)
    row = {"fault": f"{number.name} {victim}", "phase": phase}
    left = "runs on"
    if found.ended:
        left = ", ".join([*run.left(10.0), *half_written(run.dir)]) or "nothing"
    try:
        assert "Traceback" not in run.said, run.said
        assert not found.happened.startswith("hangs"), found.said
        resumed = went_on(run, found.ended)
    except AssertionError:
        outcome(**row, happened=found.happened, noticed_s=found.noticed_s, left=left, resumed=False)
        raise
    outcome(**row, happened=found.happened, noticed_s=found.noticed_s, left=left, resumed=resumed)
    assert left in ("nothing", "runs on"), found.said
    if found.ended and not found.happened.startswith("went on") and victim != "launcher":
        assert "error: process '" in found.said or "asked to end" in found.happened, found.said


def went_on(run, ended):
    """How the run goes on: it has each step once."""
    run.trains()
    lines = run.recorded()
    assert [line["step"] for line in lines] == list(range(len(lines)))
    if "algo=opd" not in run.argv:  # of a teacher that is away, rollouts may fail
        failed = {key: value for line in lines for key, value in line.items() if key.startswith("errors/") and value}
        assert failed == {}, "a request that a server did not answer is sent again"
    if not ended:
        return "was not ended"
    point = next((line for line in run.said.splitlines() if line.startswith("going on after step")), None)
    return "began again: no checkpoint yet" if point is None else point.partition(":")[0].removeprefix("going on ")
