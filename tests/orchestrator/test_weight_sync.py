"""Weight sync: versions in order, one line per step, and no group that starts while the engines change."""

import asyncio
from types import SimpleNamespace

import pytest

from prl.base.errors import PrlError
from prl.config.orchestrator import EvalConfig

SHIPPED = {"off_policy/max": 0.0, "tokens/generated": 10.0}
TRAINED = {"tokens/trained": 5.0}


@pytest.fixture
def make_sync(make_orchestrator, make_env):
    """`make_sync(steps, envs, **options)`: that of an orchestrator; its metrics lines are `sync.lines`."""

    def make(steps, envs=None, **options):
        lines = []
        sync = make_orchestrator(envs or [make_env()], SimpleNamespace(step=lines.append), steps, **options).weight_sync
        sync.lines = lines
        return sync

    return make


async def test_versions_rise_and_every_step_has_its_line(make_sync, pool):
    sync = make_sync(steps=5)
    for step in range(1, 6):
        sync.steps.ship(step, SHIPPED)
    for step in (1, 2, 3):
        sync.transport.publish(step, TRAINED)
    running = asyncio.create_task(sync.run())
    while pool.version < 3:
        await asyncio.sleep(0.001)
    for step in (4, 5):
        sync.transport.publish(step, TRAINED)
    assert await asyncio.wait_for(running, 5) == {}
    assert pool.updates == sorted(set(pool.updates)) and pool.updates[-1] == 5 and 3 in pool.updates
    assert [line["step"] for line in sync.lines] == [1, 2, 3, 4, 5]
    assert [line["step"] for line in sync.lines if "time/update_weights" in line] == pool.updates
    assert sync.updates_s > 0 and not sync.busy


async def test_sync_is_busy_until_its_event(make_sync, pool, monkeypatch):
    sync, update = make_sync(steps=1), pool.update_weights

    async def watched(*args):
        assert sync.busy and sync.events.empty()
        await update(*args)

    monkeypatch.setattr(pool, "update_weights", watched)
    sync.steps.ship(1, SHIPPED)
    sync.transport.publish(1, TRAINED)
    await sync.run()
    assert pool.updates == [1] and not sync.events.empty() and not sync.busy


@pytest.mark.parametrize(
    ("every", "loaded", "expected"),
    [
        (2, [1, 2, 3, 4, 5], [0, 2, 4, 5]),
        (2, [3, 5], [0, 3, 5]),  # an evaluation that was due for a skipped version is made of the next
        (9, [1, 5], [0, 5]),
        (None, [1, 5], []),
    ],
)
async def test_which_versions_are_evaluated(make_sync, make_env, every, loaded, expected):
    evaluator = make_sync(5, [make_env(held_out=1)], eval=EvalConfig(every=every)).evaluator
    versions = [0, *loaded, 5]  # the last one is asked for once more when the run ends
    assert [version for version in versions if await evaluator.evaluate_if_due(version, last=version == 5)] == expected


@pytest.fixture
def evaluations(monkeypatch):
    """Evaluations in place of the orchestrator's: `begun` has their versions; each ends as its gate is set."""
    begun, gates = [], {}

    async def evaluate(envs, config, run_dir, version):
        begun.append(version)
        await gates.setdefault(version, asyncio.Event()).wait()
        return {"eval/x/avg@1": float(version)}

    monkeypatch.setattr("prl.orchestrator.evaluate.evaluate", evaluate)
    return SimpleNamespace(begun=begun, end=lambda version: gates.setdefault(version, asyncio.Event()).set())


async def trained(sync, step):
    sync.transport.publish(step, TRAINED)
    while sync.pool.version < step or sync.busy:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0)  # what has been begun begins


async def test_training_goes_on_beside_an_evaluation(make_sync, evaluations):
    sync = make_sync(steps=9, eval=EvalConfig(every=2, mode="beside"))
    for step in range(1, 10):
        sync.steps.ship(step, SHIPPED)
    running = asyncio.create_task(sync.run())
    for step in (1, 2, 3, 4, 5):
        await trained(sync, step)
    assert evaluations.begun == [2] and sync.state_dict().evaluated == -1, "one at a time; a kill now repeats it"
    evaluations.end(2)
    await asyncio.sleep(0)
    assert sync.state_dict().evaluated == -1
    await trained(sync, 6)
    assert sync.state_dict().evaluated == 2
    assert evaluations.begun == [2, 6], "that of version 4 was due while another ran, and is made of the next"
    for step in (7, 8):
        await trained(sync, step)
    evaluations.end(9)
    sync.transport.publish(9, TRAINED)
    await asyncio.wait_for(running, 5)
    assert evaluations.begun == [2, 6, 9], "the last is made alone, and one that still runs is given up for it"
    assert {line["step"]: line["eval/x/avg@1"] for line in sync.lines if "eval/x/avg@1" in line} == {6: 2.0, 9: 9.0}
    assert sync.state_dict().evaluated == 9


async def test_an_evaluation_that_fails_beside_training_ends_the_run(make_sync, monkeypatch):
    async def evaluate(*_):
        raise PrlError("no such env")

    monkeypatch.setattr("prl.orchestrator.evaluate.evaluate", evaluate)
    sync = make_sync(steps=3, eval=EvalConfig(every=1, mode="beside"))
    for step in (1, 2, 3):
        sync.steps.ship(step, SHIPPED)
    running = asyncio.create_task(sync.run())
    await trained(sync, 1)
    sync.transport.publish(2, TRAINED)
    with pytest.raises(PrlError, match="no such env"):
        await asyncio.wait_for(running, 5)
