"""Several servers of the policy: one that dies, comes back or is slow, while the others go on."""

import asyncio

import pytest
from aiohttp import web
from policy_server import GENERATE, UPDATE, ask, policy_servers, start, until

from prl.base.errors import EngineError
from prl.engines import rotation
from prl.engines.client import InferencePool


@pytest.fixture
async def policies():
    async with policy_servers(2) as found:
        yield found


@pytest.fixture
async def pool(policies, monkeypatch):
    """Of servers by URL, which nobody of ours starts; they have loaded version 1."""
    monkeypatch.setattr(rotation, "LOOK_S", 0.02)
    pool = InferencePool([server.url for server in policies], "policy", "t")
    await pool.update_weights(1, "/w1")
    for server in policies:
        server.calls.clear()
    yield pool
    await pool.close()


# --- death and comeback -----------------------------------------------------------------------------------------------


async def test_dead_server_comes_back_with_newest_weights(pool, policies):
    first, second = policies
    for server in policies:
        server.hold(GENERATE)
    tasks = [start(pool) for _ in range(6)]
    await until(lambda: (first.asked(), second.asked()) == (3, 3))
    await first.stop()
    await until(lambda: second.asked() == 6, "the requests of the first are at the second")
    second.gates[GENERATE].set()
    assert await asyncio.gather(*tasks) == [(1, 1)] * 6
    assert pool.counts["engine/requests_reissued"] == 3
    await pool.update_weights(2, "/w2")  # without the first
    assert pool.version == 2 and first.asked(UPDATE) == 0
    assert await ask(pool) == (2, 2)
    first.calls.clear()
    first.gates.clear()
    await first.start()
    await until(lambda: not pool.servers[0].away, "the first is back")
    assert first.work == [UPDATE] and first.bodies[UPDATE][-1] == {"path": "/w2"}
    pool.servers[0].failed_at = float("-inf")  # it is no longer avoided
    assert [await ask(pool) for _ in range(3)] == [(2, 2)] * 3 and first.asked() == 3


async def test_restarted_server_samples_nothing_from_base_weights(pool, policies):
    """Nobody has noticed: no request failed."""
    first, second = policies
    await first.stop()
    await first.start()
    replies = [await ask(pool) for _ in range(3)]
    assert replies == [(1, 1)] * 3
    await until(lambda: not pool.servers[0].away)
    assert first.work == [GENERATE, UPDATE] and first.holds == 1, "refused, and brought up to date"
    assert second.asked() == 3


async def test_removed_weights_are_followed_by_the_newest(pool, policies):
    """They are discarded once all servers of the rotation have newer ones, and this one is on its way back."""
    [first, _] = policies
    gone = asyncio.Event()

    async def load():
        if first.bodies[UPDATE][-1]["path"] == "/w1":
            await gone.wait()
            return web.json_response({"error": "no such folder"}, status=400)
        return await first.load()

    first.replies[UPDATE] = load
    first.instance = "another"
    pool.rotation.leave(pool.servers[0], EngineError("it died"))
    await until(lambda: first.asked(UPDATE) == 1, "it loads version 1")
    await pool.update_weights(2, "/w2")
    gone.set()
    await until(lambda: pool.servers[0].open, "it is back")
    assert [body["path"] for body in first.bodies[UPDATE][-2:]] == ["/w1", "/w2"]
    assert first.holds == 2 and pool.servers[0].version == 2 and pool.servers[0].open


# --- updates ----------------------------------------------------------------------------------------------------------


async def test_updated_server_works_while_another_loads(pool, policies):
    first, second = policies
    gates = [server.hold(UPDATE) for server in policies]
    update = asyncio.create_task(pool.update_weights(2, "/w2"))
    await until(lambda: first.asked(UPDATE) == second.asked(UPDATE) == 1, "both load at the same time")
    early = [start(pool) for _ in range(4)]
    await asyncio.sleep(0.05)
    assert first.asked() == second.asked() == 0, "nothing is sent to a server that loads"
    gates[0].set()
    assert await asyncio.gather(*early) == [(2, 2)] * 4
    assert (first.asked(), second.asked()) == (4, 0) and not update.done()
    assert pool.version == 1 and pool.loading == 2, "a group that starts now is meant for the older one"
    gates[1].set()
    await update
    assert pool.version == 2 and pool.loading is None
    tasks = [start(pool) for _ in range(4)]
    assert await asyncio.gather(*tasks) == [(2, 2)] * 4 and second.asked() == 2


async def test_server_that_died_of_an_update_catches_up(pool, policies):
    first, second = policies
    first.hold(UPDATE)
    update = asyncio.create_task(pool.update_weights(2, "/w2"))
    await until(lambda: first.asked(UPDATE) == 1 and second.holds == 2)
    await first.stop()
    await asyncio.wait_for(update, 5)
    assert pool.version == 2 and pool.servers[0].away
    assert await ask(pool) == (2, 2)
    first.gates.clear()
    await first.start()
    await until(lambda: not pool.servers[0].away)
    assert first.holds == 2


async def test_refused_update_names_its_server(pool, policies):
    [_, second] = policies
    second.replies[UPDATE] = (400, "a tensor is missing")
    with pytest.raises(EngineError, match=f"{second.url}{UPDATE} answered HTTP 400: a tensor is missing"):
        await pool.update_weights(2, "/w2")
    assert pool.version == 1
