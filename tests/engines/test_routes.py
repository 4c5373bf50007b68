"""prl's routes, against an engine that only takes notes."""

import asyncio
import itertools
import json
import math
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from vllm.logprobs import FlatLogprobs

from prl.engines.protocol import GENERATE, LOAD, measured
from prl.engines.vllm.routes import PolicyRoutes, generated
from prl.engines.vllm.server import TokenAuth
from prl.models import model_path

WEIGHTS = model_path("tiny")
ASKED = {"model": "policy", "token_ids": [3], "sampling": {}}
PHASES = ["start", f"update {{'path': '{WEIGHTS}'}}", "finish"]
WHOLE = ["pause keep", *PHASES, "reset running", "resume"]


class Engine:
    """Notes what it is asked to do."""

    def __init__(self):
        self.calls = []
        self.cleared = True
        self.errored = False
        self.dead_error = RuntimeError("the engine died")
        self.stuck = False
        self.failure = self.unreachable = None
        self.engine_core = self
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(model="m", hf_config=None, is_multimodal_model=False), lora_config=None
        )

    async def pause_scheduler_async(self, mode, clear_cache):
        assert not clear_cache
        self.calls.append(f"pause {mode}")

    async def resume_generation(self):
        self.calls.append("resume")

    async def init_weight_transfer_engine(self, request):
        self.calls.append(f"init {request.init_info}")
        if self.unreachable:
            raise self.unreachable

    async def start_weight_update(self):
        self.calls.append("start")

    async def update_weights(self, request):
        await asyncio.sleep(3600 if self.stuck else 0)
        self.calls.append(f"update {request.update_info}")
        if self.failure:
            raise self.failure

    async def finish_weight_update(self):
        self.calls.append("finish")

    async def reset_prefix_cache(self, reset_running_requests):
        assert reset_running_requests
        self.calls.append("reset running")
        return self.cleared


@pytest.fixture
async def engine():
    return Engine()


async def app_of(engine):
    app = FastAPI()
    app.state.engine_client = engine
    routes = PolicyRoutes()
    routes.attach_router(app)
    app.add_middleware(TokenAuth)
    app.add_exception_handler(ValueError, lambda request, error: PlainTextResponse(str(error), status_code=418))
    await routes.init_state(engine, app.state, SimpleNamespace(served_model_name=["policy"], model="m"))
    return app


@pytest.fixture
async def client(engine, monkeypatch):
    monkeypatch.setenv("PRL_TOKEN", "t")
    headers = {"Authorization": "Bearer t"}
    transport = httpx.ASGITransport(await app_of(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine", headers=headers) as client:
        yield client


@pytest.fixture
async def post(client):
    return lambda body: client.post(LOAD, **({"content": body} if isinstance(body, bytes) else {"json": body}))


# --- sampling ---------------------------------------------------------------------------------------------------------


async def test_a_request_whose_client_goes_away_is_cancelled(engine, monkeypatch):
    """vLLM's `generate` aborts its sequences then."""
    monkeypatch.setenv("PRL_TOKEN", "t")
    messages = [{"type": "http.request", "body": json.dumps(ASKED).encode(), "more_body": False}]
    begun, cancelled, sent = asyncio.Event(), asyncio.Event(), []

    async def sample(engine, asked, prompt, params, adapter):
        begun.set()
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()

    async def receive():
        if messages:
            return messages.pop()
        await begun.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    monkeypatch.setattr("prl.engines.vllm.routes.sample", sample)
    monkeypatch.setattr("prl.engines.vllm.routes.params_of", lambda asked: None)
    monkeypatch.setattr("prl.engines.vllm.routes.prompt_of", lambda asked, pictures: None)
    headers = [(b"authorization", b"Bearer t")]
    scope = {"type": "http", "method": "POST", "path": GENERATE, "headers": headers, "query_string": b""}
    app = await app_of(engine)
    await asyncio.wait_for(app(scope, receive, send), 5)
    await asyncio.wait_for(cancelled.wait(), 5)
    assert sent[0]["status"] == 499


def test_logprobs_are_numbers_of_json():
    assert [measured(value) for value in (-1.5, -math.inf, -1e5, math.inf, math.nan)] == [
        -1.5,
        -9999.0,
        -9999.0,
        None,
        None,
    ]


def test_prompt_logprobs_are_of_their_own_ids():
    """vLLM lists a token that is its own place's likeliest twice."""
    flat = FlatLogprobs()
    flat.append(None)
    for ids, logprobs in (([7, 9, 7], [-1.25, -0.1, -1.25]), ([4, 8, 5], [-math.inf, -2.5, -3.5]), ([6], [-0.5])):
        flat.append_fast(ids, logprobs, itertools.repeat(1), itertools.repeat(None))
    reply = generated(SimpleNamespace(outputs=[], prompt_logprobs=flat), [5, 7, 8, 7])
    assert reply.prompt_logprobs == [None, -1.25, -2.5, None]
    assert reply.prompt_top == [[], [(7, -1.25), (9, -0.1)], [(4, -9999.0), (8, -2.5), (5, -3.5)], [(6, -0.5)]]


# --- new weights ------------------------------------------------------------------------------------------------------


async def test_pause_load_forget_resume(engine, post):
    reply = await post({"path": WEIGHTS})
    body = reply.json()
    assert reply.status_code == 200 and body["loaded"] == WEIGHTS and engine.calls == WHOLE
    assert body["seconds"] >= 0


async def test_what_a_sender_has_goes_through_all_four_phases(engine, post):
    reply = await post({"init": {"master_port": 7}, "update": {"names": ["a"]}})
    assert reply.status_code == 200
    own = ["init {'master_port': 7}", "pause keep", "start", "update {'names': ['a']}", "finish"]
    assert engine.calls == [*own, *WHOLE[-2:]]


async def test_a_sender_that_is_not_there_does_not_pause_the_engine(engine, post):
    engine.unreachable = RuntimeError("nobody listens there")
    reply = await post({"init": {}, "update": {}})
    assert reply.status_code == 500 and "nobody listens there" in reply.json()["error"]
    assert engine.calls == ["init {}"]


async def test_two_updates_do_not_mix(engine, post):
    await asyncio.gather(post({"path": WEIGHTS}), post({"path": WEIGHTS}))
    assert engine.calls == WHOLE * 2


async def test_failed_load_leaves_the_engine_paused(engine, post):
    """Nothing is sampled from a mixture of weights."""
    engine.failure = FileNotFoundError("no such folder")
    reply = await post({"path": WEIGHTS})
    assert reply.status_code == 500 and "no such folder" in reply.json()["error"]
    assert engine.calls == WHOLE[:3]
    engine.failure = None
    assert (await post({"path": WEIGHTS})).status_code == 200
    assert engine.calls[3:] == WHOLE


async def test_a_cache_that_was_not_cleared_is_an_error(engine, post):
    engine.cleared = False
    reply = await post({"path": WEIGHTS})
    assert reply.status_code == 500 and "older weights" in reply.json()["error"]
    assert engine.calls == WHOLE[:-1], "it stays paused"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"path": 3},
        {"init": {}},
        {"update": {}},
        {"path": "x", "init": {}, "update": {}},
        [],
        "x",
        None,
        b"",
        b"{",
        b"\xff",
        {"path": "a\0b"},
    ],
)
async def test_a_body_without_a_path_touches_nothing(engine, post, body):
    assert (await post(body)).status_code in (400, 422)
    assert engine.calls == []


async def test_an_engine_that_dies_during_an_update_leaves_no_request_unanswered(engine, post, monkeypatch):
    """The server waits for its requests before it ends: an unanswered one would keep it, and the run, forever."""
    monkeypatch.setattr("prl.engines.vllm.alive.ALIVE_S", 0.01)
    engine.stuck = True
    asking = asyncio.create_task(post({"path": WEIGHTS}))
    await asyncio.sleep(0.1)
    assert not asking.done(), "it may take its time while the engine lives"
    engine.errored = True
    reply = await asyncio.wait_for(asking, 5)
    assert reply.status_code == 500 and "the engine died" in reply.json()["error"]


def emptied(folder):
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    return folder


def gone(folder):
    return folder / "gone"


@pytest.mark.parametrize("damage", [emptied, gone])
async def test_a_folder_without_weights_is_refused_before_anything_is_touched(engine, post, tmp_path, damage):
    folder = damage(tmp_path)
    reply = await post({"path": str(folder)})
    assert reply.status_code == 400 and str(folder) in reply.json()["error"] and engine.calls == []
    assert "\n" not in reply.json()["error"] and reply.json()["error"].endswith("the weights stay as they are")


async def test_a_frozen_server_has_no_such_route(engine, monkeypatch):
    monkeypatch.setenv("PRL_FROZEN", "1")
    app = FastAPI()
    PolicyRoutes().attach_router(app)
    assert "/prl/load_policy" not in {route.path for route in app.routes}
