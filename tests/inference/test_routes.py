"""The route that loads a policy, against an engine that only takes notes."""

import asyncio
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI

from prl.inference.routes import PolicyRoutes
from prl.models import model_path

WEIGHTS = model_path("tiny")
WHOLE = ["pause keep", f"load {WEIGHTS}", "reset running", "resume"]


class Engine:
    """Notes what it is asked to do."""

    def __init__(self):
        self.calls = []
        self.cleared = True
        self.errored = False
        self.stuck = False
        self.failure = None
        self.engine_core = SimpleNamespace(pause_scheduler_async=self.pause, resume_scheduler_async=self.resume)

    async def pause(self, mode, clear_cache):
        self.calls.append(f"pause {mode}")

    async def resume(self):
        self.calls.append("resume")

    async def collective_rpc(self, method, kwargs):
        assert method == "load_policy"
        self.calls.append(f"load {kwargs['path']}")
        await asyncio.sleep(3600 if self.stuck else 0)
        if self.failure:
            raise self.failure

    async def reset_prefix_cache(self, reset_running_requests):
        assert reset_running_requests
        self.calls.append("reset running")
        return self.cleared


@pytest.fixture
async def engine():
    return Engine()


@pytest.fixture
async def post(engine):
    app = FastAPI()
    app.state.engine_client = engine
    routes = PolicyRoutes()
    routes.attach_router(app)
    await routes.init_state(engine, app.state, None)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as client:
        yield lambda body: client.post("/prl/load_policy", json=body)


async def test_pause_load_forget_resume(engine, post):
    reply = await post({"path": WEIGHTS})
    assert (reply.status_code, reply.json()) == (200, {"loaded": WEIGHTS})
    assert engine.calls == WHOLE


async def test_two_updates_do_not_mix(engine, post):
    await asyncio.gather(post({"path": WEIGHTS}), post({"path": WEIGHTS}))
    assert engine.calls == WHOLE * 2


async def test_a_failed_load_is_said_and_the_engine_resumed(engine, post):
    engine.failure = FileNotFoundError("no such folder")
    reply = await post({"path": WEIGHTS})
    assert reply.status_code == 500 and reply.json() == {"error": "FileNotFoundError: no such folder"}
    assert engine.calls == ["pause keep", f"load {WEIGHTS}", "resume"]


async def test_a_cache_that_was_not_cleared_is_an_error(engine, post):
    engine.cleared = False
    reply = await post({"path": WEIGHTS})
    assert reply.status_code == 500 and "older weights" in reply.json()["error"]
    assert engine.calls == WHOLE


@pytest.mark.parametrize("body", [{}, {"path": 3}])
async def test_a_body_without_a_path_touches_nothing(engine, post, body):
    assert (await post(body)).status_code == 400
    assert engine.calls == []


async def test_an_engine_that_dies_during_an_update_leaves_no_request_unanswered(engine, post, monkeypatch):
    """The server waits for its requests before it ends: an unanswered one would keep it, and the run, forever."""
    monkeypatch.setattr("prl.inference.routes.ALIVE_S", 0.01)
    engine.stuck = True
    asking = asyncio.create_task(post({"path": WEIGHTS}))
    await asyncio.sleep(0.1)
    assert not asking.done(), "it may take its time while the engine lives"
    engine.errored = True
    reply = await asyncio.wait_for(asking, 5)
    assert reply.status_code == 500 and "the engine died" in reply.json()["error"]


async def test_a_folder_without_weights_is_refused_before_anything_is_touched(engine, post, tmp_path):
    reply = await post({"path": str(tmp_path)})
    assert reply.status_code == 400 and "*.safetensors" in reply.json()["error"] and engine.calls == []


async def test_a_frozen_server_has_no_such_route(engine, monkeypatch):
    monkeypatch.setenv("PRL_FROZEN", "1")
    app = FastAPI()
    PolicyRoutes().attach_router(app)
    assert "/prl/load_policy" not in {route.path for route in app.routes}
