"""Weight sync: versions in order, one line per step, and no group that starts while the engines change."""

import asyncio
import random
from collections import Counter
from types import SimpleNamespace

import pytest
from patience import patient

from prl.config.schema import CheckpointConfig, ModelConfig
from prl.errors import PrlError
from prl.models import model_path
from prl.orchestrator.checkpoints import Checkpoints
from prl.orchestrator.config import OrchestratorConfig
from prl.orchestrator.types import GenerationResumed, PolicyUpdated
from prl.orchestrator.weight_sync import WeightSync
from prl.wire.files import FileTransport

SHIPPED = {"off_policy/max": 0.0, "tokens/generated": 10.0}
TRAINED = {"tokens/trained": 5.0}


@pytest.fixture
def make_sync(pool, tmp_path):
    def make(steps=3, transport=None, **knobs):
        config = OrchestratorConfig(**knobs)
        lines = []
        sync = WeightSync(
            config,
            pool,
            transport or FileTransport(tmp_path),
            SimpleNamespace(step=lines.append),
            [],
            asyncio.Queue(),
            checkpoints=Checkpoints(CheckpointConfig(), tmp_path, []),
            run_dir=tmp_path,
            model=ModelConfig(path=model_path("tiny")),
            max_steps=steps,
            update_timeout_s=5.0,
        )
        return sync, lines

    return make


def events_of(sync):
    return [sync.events.get_nowait() for _ in range(sync.events.qsize())]


async def test_versions_rise_each_is_announced_once_and_every_step_has_its_line(make_sync, pool):
    sync, lines = make_sync(steps=5)
    for step in range(1, 6):
        sync.expect(step, SHIPPED)
    for step in (1, 2, 3):
        sync.transport.publish(step, TRAINED)
    running = asyncio.create_task(sync.run())
    while pool.version < 3:
        await asyncio.sleep(0.001)
    for step in (4, 5):
        sync.transport.publish(step, TRAINED)
    assert await asyncio.wait_for(running, 5) == {}
    versions = [event.version for event in events_of(sync) if isinstance(event, PolicyUpdated)]
    assert versions == pool.updates == sorted(set(versions)) and versions[-1] == 5 and 3 in versions
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["step"] for line in lines if "time/update_weights" in line] == versions
    assert sync.updates_s > 0 and not sync.busy


async def test_a_strict_version_is_loaded_only_when_its_batch_has_been_shipped(make_sync, pool):
    sync, _ = make_sync(steps=9, strict_async_level=True, max_async_level=1)
    for step in (1, 2, 3):
        sync.transport.publish(step, TRAINED)
        sync.expect(step, SHIPPED)
    running = asyncio.create_task(sync.run())
    await asyncio.sleep(0.1)
    assert pool.version == 2
    running.cancel()


async def test_it_is_busy_from_before_the_request_to_the_engine_until_generation_resumes(make_sync, pool, monkeypatch):
    seen, (sync, _) = [], make_sync(steps=1)
    update = pool.update_weights

    async def watched(*args):
        seen.append((sync.busy, events_of(sync)))
        await update(*args)

    monkeypatch.setattr(pool, "update_weights", watched)
    sync.expect(1, SHIPPED)
    sync.transport.publish(1, TRAINED)
    await sync.run()
    assert seen == [(True, [])] and events_of(sync) == [PolicyUpdated(1), GenerationResumed()] and not sync.busy


async def test_a_trainer_that_publishes_nothing_is_named_with_its_deadline(make_sync):
    sync, _ = make_sync(steps=1, policy_timeout_s=0.05)
    sync.expect(1, SHIPPED)
    with pytest.raises(
        PrlError, match=r"step 1: no policy newer than version 0 .*0\.05 s \(orchestrator\.policy_timeout_s\)"
    ):
        await sync.run()


@pytest.mark.parametrize("seed", range(3))
async def test_a_group_records_the_version_that_it_runs_under(make_env, pool, run_to_end, monkeypatch, seed):
    """Each rollout bears the versions that the engine ran when its request was sent and when it was answered."""
    choose, sent = random.Random(seed), Counter()
    update, generate = pool.update_weights, pool.generate

    async def slow_update(version, *args):
        await asyncio.sleep(0.005 * choose.random())
        await update(version, *args)

    async def watched(prompt_ids, sampling, **rest):
        start = pool.version
        completions = await generate(prompt_ids, sampling, **rest)
        sent[start, pool.version] += rest["n"]
        return completions

    monkeypatch.setattr(pool, "update_weights", slow_update)
    monkeypatch.setattr(pool, "generate", watched)
    pool.delay = patient(0.2)
    seen = []
    env = make_env()
    finalize = env.algorithm.finalize_rollout

    async def noted(rollout):
        seen.append((rollout.start_version, rollout.end_version))
        await finalize(rollout)

    monkeypatch.setattr(env.algorithm, "finalize_rollout", noted)
    await run_to_end([env], steps=15, max_async_level=2)
    assert not Counter(seen) - sent
    assert (sent - Counter(seen)).total() <= 4, "but for the group whose reply came as the run ended"
    assert any(start < end for start, end in sent), "no update came between"


async def test_it_looks_often_only_while_the_trainer_has_a_batch(make_sync, pool, monkeypatch):
    sync, lines = make_sync(steps=2)
    looks = []
    receive = sync.transport.receive_metrics
    monkeypatch.setattr(sync.transport, "receive_metrics", lambda step: looks.append(step) or receive(step))
    running = asyncio.create_task(sync.run())
    await asyncio.sleep(0.35)
    assert 2 <= len(looks) <= 6, "every 0.1 s, for a checkpoint"
    sync.expect(1, SHIPPED)
    before = len(looks)
    await asyncio.sleep(0.02)
    assert len(looks) > before, "from the moment that a batch is sent"
    while len(looks) < before + 20:
        await asyncio.sleep(0.001)
    sync.transport.publish(1, TRAINED)
    sync.transport.publish(2, TRAINED)
    sync.expect(2, SHIPPED)
    await asyncio.wait_for(running, 5)
    assert [line["step"] for line in lines] == [1, 2] and pool.version == 2
