"""Engines that die in the middle of a run and are started again, and who waits for whom."""

import asyncio
import re
import shutil
from types import SimpleNamespace

import pytest
from policy_server import GENERATE, UPDATE, policy_servers, start, until

from prl.base.errors import DeadlinePassed, EngineError, PrlError
from prl.engines import rotation
from prl.engines.client import InferencePool
from prl.launch.launcher import ProcessDied
from prl.launch.supervisor import Supervisor
from prl.orchestrator.who_waits import Waiting


class Engines:
    """A launcher of servers in this process. One that was killed is dead until it is started again."""

    def __init__(self, **servers):
        self.servers, self.dead, self.loop = servers, set(), asyncio.get_running_loop()

    async def kill(self, name):
        await self.servers[name].stop()
        self.servers[name].gates.clear()
        self.dead.add(name)

    def ensure_alive(self):
        for name in self.dead:
            raise ProcessDied(f"process {name!r} ended with status 137\nits last lines", name)

    def restart_engine(self, name):
        asyncio.run_coroutine_threadsafe(self.servers[name].start(), self.loop).result(10)
        self.dead.discard(name)
        return self.servers[name].url


@pytest.fixture
async def run(monkeypatch):
    """Two supervised engines with their client, which have loaded version 3."""
    monkeypatch.setattr(rotation, "LOOK_S", 0.02)
    async with policy_servers(2) as (first, second):
        launcher, said = Engines(**{"engine": first, "engine 2": second}), []
        pool = InferencePool([first.url, second.url], "policy", "t", restart_s=600.0)
        await pool.update_weights(3, "/w3")
        supervisor = Supervisor(launcher, said.append, {"engine": 1, "engine 2": 1})
        supervisor.serve(pool)
        first.calls.clear()
        second.calls.clear()
        yield SimpleNamespace(supervisor=supervisor, pool=pool, launcher=launcher, said=said, servers=(first, second))
        await pool.close()


async def test_requests_wait_for_an_engine_with_the_same_weights(run):
    first, second = run.servers
    first.hold(GENERATE)

    async def work():
        await run.launcher.kill("engine 2")
        second.start = lambda: asyncio.sleep(0)  # it is started again, and does not answer
        asked = [start(run.pool) for _ in range(5)]
        await until(lambda: first.asked() == 5)
        await run.launcher.kill("engine")
        replies = await asyncio.gather(*asked)
        await until(lambda: any("engine answers again" in line for line in run.said))
        return replies

    assert await run.supervisor.guard(work()) == [(3, 3)] * 5
    assert first.work == [GENERATE] * 5 + [UPDATE] + [GENERATE] * 5, "the weights come first"
    assert run.pool.counts["engine/restarts"] == 2
    assert any("process 'engine' ended with status 137. It is started again" in line for line in run.said)


async def test_update_of_a_dead_engine_is_done_after_restart(run):
    first, second = run.servers
    first.hold(UPDATE)

    async def work():
        update = asyncio.create_task(run.pool.update_weights(4, "/w4"))
        await until(lambda: first.asked(UPDATE) == 1)
        await run.launcher.kill("engine")
        await update
        await until(lambda: run.pool.servers[0].open)

    await run.supervisor.guard(work())
    assert run.pool.version == 4 and first.holds == second.holds == 4


async def test_second_engine_serves_while_the_first_restarts(run):
    first, second = run.servers
    first.hold(GENERATE)
    gate = second.hold(GENERATE)

    async def work():
        asked = [start(run.pool) for _ in range(6)]
        await until(lambda: first.asked() == second.asked() == 3)
        await run.launcher.kill("engine")
        await until(lambda: second.asked() == 6)
        gate.set()
        await asyncio.gather(*asked)
        await run.pool.update_weights(4, "/w4")
        await until(lambda: run.pool.servers[0].open)
        return await asyncio.gather(*(start(run.pool) for _ in range(20)))

    assert await run.supervisor.guard(work()) == [(4, 4)] * 20
    assert run.pool.counts == {"engine/restarts": 1, "engine/requests_reissued": 3}
    assert run.supervisor.restarts == {"engine": 0, "engine 2": 1}, "each has its own"


async def test_a_second_death_ends_the_run_with_its_cause(run):
    async def work():
        for _ in range(2):
            await run.launcher.kill("engine")
            await until(lambda: run.pool.counts["engine/restarts"] and run.pool.servers[0].open)
        await asyncio.sleep(60)

    with pytest.raises(ProcessDied, match="^process 'engine' ended with status 137\nits last lines"):
        await run.supervisor.guard(work())
    assert run.pool.counts["engine/restarts"] == 1


async def test_engine_silent_after_its_restart_ends_the_run(run):
    run.supervisor.startup_timeout_s = 0.3
    run.servers[0].start = lambda: asyncio.sleep(0)

    async def work():
        await run.launcher.kill("engine")
        await asyncio.sleep(60)

    with pytest.raises(DeadlinePassed, match=f"engine does not answer after its restart: {run.servers[0].url}"):
        await run.supervisor.guard(work())


async def test_dead_core_is_the_cause_of_a_failed_update():
    """vLLM answers for seconds after its core has died, before it ends."""
    launcher = Engines()
    supervisor = Supervisor(launcher, print, {"engine": 0})
    supervisor.serve(SimpleNamespace(ailing=False, servers=[]))
    asyncio.get_running_loop().call_later(1.5, launcher.dead.add, "engine")

    async def update():
        raise EngineError(
            '/prl/load_policy answered HTTP 500: {"error": "EngineCore encountered an issue. See above"}', 500
        )

    with pytest.raises(ProcessDied, match="status 137"):
        await supervisor.guard(update())


async def test_no_engine_is_restarted_before_the_run_begins():
    launcher = Engines()
    launcher.dead.add("engine")
    with pytest.raises(ProcessDied, match="'engine' ended with status 137"):
        await Supervisor(launcher, print, {"engine": 1}).guard(asyncio.sleep(20))


async def test_a_directory_that_is_removed_ends_the_run_by_its_name(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    launcher = SimpleNamespace(ensure_alive=lambda: None)
    supervisor = Supervisor(launcher, print, run_dir=tmp_path / "run")
    running = asyncio.create_task(supervisor.guard(asyncio.sleep(60)))
    await asyncio.sleep(0.3)
    assert not running.done()
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(PrlError, match=f"^{tmp_path}/run has no config.yaml any more"):
        await running


async def test_waiting_is_reported_once_who_waits_for_whom(monkeypatch):
    monkeypatch.setattr("prl.launch.supervisor.QUIET_S", 0.2)
    monkeypatch.setattr("prl.launch.supervisor.POLL_S", 0.02)
    lines, done = [], []
    supervisor = Supervisor(Engines(), lines.append)
    with supervisor.awaiting("the trainer to load the model", ["trainer"]):
        await supervisor.guard(asyncio.sleep(0.7))
    assert "the start waits for the trainer to load the model" in lines[0]
    assert re.fullmatch(r"waited 0\.\d s for the trainer to load the model", lines[1]) and len(lines) == 2
    lines.clear()

    async def work():
        for _ in range(10):
            await asyncio.sleep(0.05)
            done.append("a step")
        assert lines == [], "it goes on"
        for number in (1, 2):
            await asyncio.sleep(0.7)
            assert len(lines) == number and "the orchestrator waits for the trainer" in lines[-1]
            done.append("a step")

    await supervisor.guard(work(), lambda: Waiting("the orchestrator waits for the trainer", len(done)))
