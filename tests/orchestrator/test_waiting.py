"""Who waits for whom, at each place where a run can stand still."""

import asyncio
from types import SimpleNamespace

import pytest
import verifiers.v1 as vf

from prl.config.schema import ModelConfig
from prl.models import model_path
from prl.orchestrator.config import EvalConfig
from prl.orchestrator.orchestrator import Orchestrator
from prl.orchestrator.waiting import waiting
from prl.wire.files import FileTransport


class Slow(vf.Task):
    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        await asyncio.sleep(30)
        return 0.0


@pytest.fixture
async def running(pool, tmp_path):
    """`running(envs, **knobs)`: an orchestrator at work, without a trainer."""
    tasks = []

    def start(envs, *, every=None, **knobs):
        orchestrator = Orchestrator(
            envs=envs,
            pool=pool,
            transport=FileTransport(tmp_path),
            monitors=SimpleNamespace(step=lambda line: None),
            run_dir=tmp_path,
            model=ModelConfig(path=model_path("tiny")),
            max_steps=5,
            seq_len=64,
            trainer_ranks=1,
            update_timeout_s=5.0,
            **{"batch_size": 8, "group_size": 4, "max_async_level": 0, "eval": EvalConfig(every=every)} | knobs,
        )
        tasks.append(asyncio.create_task(orchestrator.run()))
        return orchestrator

    yield start
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def until(orchestrator, says):
    async with asyncio.timeout(10):
        while says not in waiting(orchestrator).what:
            await asyncio.sleep(0.005)
    return waiting(orchestrator)


async def test_first_for_the_engine_then_for_the_trainer_then_for_the_engine_to_load(running, make_env, pool):
    pool.delay_of = lambda n: 30 if pool.version else 0.2
    orchestrator = running([make_env("math"), make_env("other")])
    first = await until(orchestrator, "waits for 4 rollouts of env math, 4 rollouts of env other from the engine (")
    second = await until(orchestrator, "policy version 1 from the trainer")
    assert second.done != first.done
    pool.loading = 1
    await until(orchestrator, "the engine to load policy version 1")
    pool.loading = None
    orchestrator.transport.publish(1, {"tokens/trained": 60.0})
    third = await until(orchestrator, "rollouts of env math")
    assert third.done != second.done


async def test_for_a_grader_when_nothing_is_asked_of_the_engine(running, make_env):
    orchestrator = running([make_env("math", task=Slow, timeout_s=60.0)])
    found = await until(orchestrator, "from other models, tools and graders")
    assert "8 rollouts of env math" in found.what
