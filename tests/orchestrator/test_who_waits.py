"""Who waits for whom, at each place where a run can stand still."""

import asyncio
from types import SimpleNamespace

import pytest

from prl.orchestrator.who_waits import waiting


@pytest.fixture
async def running(make_orchestrator):
    """`running(envs)`: an orchestrator at work, without a trainer."""
    tasks = []

    def start(envs):
        orchestrator = make_orchestrator(envs, SimpleNamespace(step=lambda line: None), 5, max_async_level=0)
        tasks.append(asyncio.create_task(orchestrator.run()))
        return orchestrator

    yield start
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def until(orchestrator, text):
    async with asyncio.timeout(10):
        while text not in waiting(orchestrator).what:
            await asyncio.sleep(0.005)
    return waiting(orchestrator).done


async def test_run_waits_for_engine_then_trainer_then_weights(running, make_env, pool):
    pool.delay_of = lambda n: 30 if pool.version else 0.2
    orchestrator = running([make_env("math"), make_env("other")])
    first = await until(orchestrator, "waits for 4 rollouts of env math, 4 rollouts of env other from the engine (")
    second = await until(orchestrator, "policy version 1 from the trainer")
    pool.loading = 1
    await until(orchestrator, "the engine to load policy version 1")
    pool.loading = None
    orchestrator.weight_sync.transport.publish(1, {"tokens/trained": 60.0})
    third = await until(orchestrator, "rollouts of env math")
    assert len({first, second, third}) == 3, "each is progress"
