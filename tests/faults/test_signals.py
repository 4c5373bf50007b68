"""SIGKILL, SIGSTOP and SIGTERM to every process of a run, in every phase.

The run ends or goes on, says so, leaves nothing behind, and goes on in its directory when it is begun again: there the
next fault finds it.
"""

import signal

import pytest
from phased_run import PhasedRun, half_written

pytestmark = pytest.mark.engine

PHASES = ("generating", "scoring", "packing", "training", "updating", "checkpointing", "start")
SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)
VICTIMS = {
    "two ranks": ("launcher", "keeper", "trainer rank 0", "trainer rank 1", "trainer rank 0, shim"),
    "own engine": ("engine", "engine, core", "engine, shim"),
    "own teacher": ("teacher", "teacher, core", "teacher, shim"),
}
"""The processes of each run that are told: those that the others have as well are told once."""
IN_SUITE = {
    ("two ranks", "trainer rank 1", signal.SIGKILL, "training"),
    ("two ranks", "launcher", signal.SIGKILL, "checkpointing"),
    ("own engine", "engine, core", signal.SIGTERM, "generating"),
    ("own engine", "engine, core", signal.SIGSTOP, "updating"),
}
CASES = [
    pytest.param(
        run,
        (victim, number, phase),
        id=f"{victim.replace(', ', '-').replace(' ', '-')}-{number.name}-{phase}",
        marks=() if (run, victim, number, phase) in IN_SUITE else pytest.mark.chaos,
    )
    for run, victims in VICTIMS.items()
    for phase in PHASES
    for victim in victims
    for number in SIGNALS
]


@pytest.fixture(scope="module")
def broken_run(request, tmp_path_factory):
    """The run of that name, in one directory for all of its faults."""
    overrides, env = (
        {
            "two ranks": ["trainer.num_processes=2"],
            "own engine": ["inference.restarts=1000"],
            "own teacher": ["algo=opd", "teacher=local", "teacher.inference.restarts=1000"],
        }[request.param],
        {},
    )
    if request.param != "own engine":
        engine = request.getfixturevalue("engine")
        overrides, env = [*overrides, f"inference.urls=[{engine.url}]"], {"PRL_TOKEN": engine.token}
    run = PhasedRun(tmp_path_factory.mktemp("broken"), *overrides, env=env)
    yield run
    if run.alive:
        run.kill()
    assert run.rollouts_twice() == []


@pytest.mark.parametrize("broken_run, fault", CASES, indirect=["broken_run"])
def test_a_signal_to_a_process(broken_run, fault, outcome):
    run, (victim, number, phase) = broken_run, fault
    found = run.break_it(victim, number, phase)
    row = {"fault": f"{number.name} {victim}", "phase": phase}
    left = "runs on"
    if not found.ended and (number is signal.SIGSTOP or "keeper" in victim or "shim" in victim):
        happened = found.happened
        status = run.stop()
        found.happened = f"{happened}; asked to end: {status}"
        assert status == 130, run.said
        found.ended = True
    if found.ended:
        left = ", ".join([*run.left(10.0), *half_written(run.dir)]) or "nothing"
    try:
        assert "Traceback" not in run.said, run.said
        resumed = went_on(run, found.ended)
    except AssertionError:
        outcome(**row, happened=found.happened, noticed_s=found.noticed_s, left=left, resumed=False)
        raise
    outcome(**row, happened=found.happened, noticed_s=found.noticed_s, left=left, resumed=resumed)
    assert left in ("nothing", "runs on"), found.said
    if found.ended and not found.happened.startswith("went on") and victim != "launcher":
        assert "error: process '" in found.said or "asked to end" in found.happened, found.said


def went_on(run, ended):
    """How the run goes on: it has each step once, and files that can be read."""
    run.trains()
    steps = run.recorded()
    assert steps == list(range(len(steps)))
    assert ended or half_written(run.dir) == []
    if not ended:
        return "was not ended"
    point = next((line for line in run.said.splitlines() if line.startswith("going on after step")), None)
    return "began again: no checkpoint yet" if point is None else point.partition(":")[0].removeprefix("going on ")
