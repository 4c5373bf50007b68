"""prl's routes, against an engine that only takes notes."""

import asyncio
import json
import shutil
from types import SimpleNamespace

import httpx
import pytest
import torch
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from prl.inference import _vllm_internals
from prl.inference.protocol import GENERATE, INTERRUPTED, RECEIVE
from prl.inference.routes import PolicyRoutes
from prl.models import model_path

WEIGHTS = model_path("tiny")
WHOLE = ["pause keep", f"load {WEIGHTS}", "take over", "reset running", "resume"]


class Engine:
    """Notes what it is asked to do."""

    def __init__(self):
        self.calls = []
        self.cleared = True
        self.errored = False
        self.prepares = False
        self.model_executor = None  # of workers in other processes
        self.stuck = False
        self.failure = None
        self.joined, self.received = [None, None], [None, None]
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(world_size=2, data_parallel_size=3),
            model_config=SimpleNamespace(
                model=WEIGHTS, revision=None, hf_config=AutoConfig.from_pretrained(WEIGHTS), trust_remote_code=False
            ),
        )
        self.engine_core = self

    async def call_utility_async(self, method, *args):
        await asyncio.sleep(3600 if self.stuck else 0)
        try:
            if method == _vllm_internals.PREPARE:
                begun = _vllm_internals.prepare_core(self, *args)
                return None if begun is None else begun.result(5)
            assert method == _vllm_internals.UPDATE
            return _vllm_internals.update_core(self, *args).result(0)
        except Exception as error:  # as vLLM hands it on
            raise Exception(f"Call to {method} method failed: {error}") from None

    def pause_scheduler(self, mode, clear_cache):
        self.calls.append(f"pause {mode}")

    def resume_scheduler(self):
        self.calls.append("resume")

    def collective_rpc(self, method, kwargs=None):
        if method == "prepares":
            return [self.prepares]
        if method == "take_over":
            self.calls.append("take over")
            return [None]
        if method == "join_transfer":
            self.calls.append(f"join {kwargs['meeting']['store']} after {kwargs['meeting']['rank_offset']}")
            return asyncio.sleep(0, self.joined)  # the server asks for this one
        if method == "receive_policy":
            self.calls.append(f"receive {len(kwargs['update']['tensors'])} tensors")
        else:
            assert method == "load_policy"
            self.calls.append(f"load {kwargs['path']}")
        if self.failure:
            raise self.failure
        return self.received

    def reset_prefix_cache(self, reset_running_requests):
        assert reset_running_requests
        self.calls.append("reset running")
        return self.cleared


@pytest.fixture
async def engine():
    return Engine()


class Broken:
    """Middleware of vLLM's that nothing gets past."""

    def __init__(self, app):
        pass

    async def __call__(self, scope, receive, send):
        await PlainTextResponse("broken", status_code=502)(scope, receive, send)


@pytest.fixture
async def client(engine, monkeypatch):
    monkeypatch.setenv("PRL_TOKEN", "t")
    app = FastAPI()
    app.state.engine_client = engine
    routes = PolicyRoutes()
    routes.attach_router(app)
    app.add_exception_handler(ValueError, lambda request, error: PlainTextResponse(str(error), status_code=418))
    app.add_middleware(Broken)
    await routes.init_state(engine, app.state, SimpleNamespace(served_model_name=["policy"], model="m"))
    headers = {"Authorization": "Bearer t"}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine", headers=headers) as client:
        yield client


@pytest.fixture
async def post(client):
    return lambda body: client.post(
        "/prl/load_policy", **({"content": body} if isinstance(body, bytes) else {"json": body})
    )


async def test_a_run_whose_server_another_has_taken_over_loads_nothing_more(client, engine):
    async def load(run, *, begins=False, path=WEIGHTS):
        headers = {"X-Prl-Run": run} | ({"X-Prl-Begins": "1"} if begins else {})
        return (await client.post("/prl/load_policy", json={"path": path}, headers=headers)).status_code

    assert [await load("one", begins=True), await load("one")] == [200, 200]
    assert await load("two", begins=True, path="/nowhere") == 400, "which has taken nothing over"
    assert [await load("one"), await load("two", begins=True), await load("two")] == [200, 200, 200]
    before = list(engine.calls)
    reply = await client.post("/prl/load_policy", json={"path": WEIGHTS}, headers={"X-Prl-Run": "one"})
    assert reply.status_code == 409 and "another run has begun to train with this server" in reply.json()["error"]
    assert engine.calls == before
    assert await load("two") == 200


async def test_posts_to_our_routes_pass_the_token_check_and_nothing_of_vllms(client, engine, monkeypatch):
    for path in (GENERATE, "/prl/load_policy", RECEIVE):
        assert (await client.post(path, content=b"{")).status_code == 400, "answered by the route"
        assert (await client.get(path)).status_code == 502
    assert (await client.post("/health")).status_code == 502
    for path in (GENERATE, "/prl/load_policy", RECEIVE, "/health", "/nowhere"):
        for token in ("", "Bearer x", "t"):
            reply = await client.post(path, json={"path": WEIGHTS}, headers={"Authorization": token})
            assert reply.status_code == 401
    assert engine.calls == []


async def test_what_sampling_raises_is_answered_by_vllms_handlers(client, monkeypatch):
    async def refuse(groups, asked):
        raise ValueError(f"{asked.token_ids} is too odd")

    monkeypatch.setattr("prl.inference._vllm_sampling.sample", refuse)
    reply = await client.post(GENERATE, json={"model": "policy", "token_ids": [3], "sampling": {}})
    assert (reply.status_code, reply.text) == (418, "[3] is too odd")


async def test_pause_load_forget_resume(engine, post):
    reply = await post({"path": WEIGHTS})
    body = reply.json()
    assert reply.status_code == 200 and body["loaded"] == WEIGHTS and engine.calls == WHOLE
    assert list(body["seconds"]) == ["check", "pause", "load", "take over", "clear"] and all(
        s >= 0 for s in body["seconds"].values()
    )


async def test_large_weights_are_loaded_before_the_pause_where_workers_can(engine, post, client, monkeypatch):
    engine.prepares = True
    assert (await post({"path": WEIGHTS})).status_code == 200 and engine.calls == WHOLE, "these are small"
    monkeypatch.setattr(_vllm_internals, "LARGE", 1)
    assert (await post({"path": WEIGHTS})).status_code == 200 and engine.calls == WHOLE * 2, "workers of their own"
    from vllm.v1.executor.uniproc_executor import UniProcExecutor  # seconds, which other tests need not wait for

    engine.model_executor = object.__new__(UniProcExecutor)
    engine.received = [None]
    engine.calls.clear()
    reply = await post({"path": WEIGHTS})
    assert reply.status_code == 200
    assert engine.calls == [f"load {WEIGHTS}", "pause keep", "take over", "reset running", "resume"]
    assert list(reply.json()["seconds"]) == ["check", "beside", "pause", "load", "take over", "clear"]
    engine.calls.clear()
    engine.failure = FileNotFoundError("no such folder")
    assert (await post({"path": WEIGHTS})).status_code == 500 and engine.calls == [f"load {WEIGHTS}"], "not paused"
    engine.failure, engine.received = None, ["a peer is gone"]
    reply = await client.post(RECEIVE, json=incoming())
    assert reply.status_code == INTERRUPTED and reply.json()["error"] == "a peer is gone"
    assert engine.calls[-1].startswith("receive"), "nothing was taken over"


async def test_two_updates_do_not_mix(engine, post):
    await asyncio.gather(post({"path": WEIGHTS}), post({"path": WEIGHTS}))
    assert engine.calls == WHOLE * 2


async def test_after_a_failed_load_the_engine_stays_paused_until_one_has_succeeded(engine, post):
    """Nothing is sampled from a mixture of weights."""
    engine.failure = FileNotFoundError("no such folder")
    reply = await post({"path": WEIGHTS})
    assert reply.status_code == 500 and "no such folder" in reply.json()["error"]
    assert engine.calls == ["pause keep", f"load {WEIGHTS}"]
    engine.failure = None
    assert (await post({"path": WEIGHTS})).status_code == 200
    assert engine.calls[2:] == WHOLE


async def test_a_cache_that_was_not_cleared_is_an_error(engine, post):
    engine.cleared = False
    reply = await post({"path": WEIGHTS})
    assert reply.status_code == 500 and "older weights" in reply.json()["error"]
    assert engine.calls == WHOLE[:-1], "it stays paused"


@pytest.mark.parametrize("body", [{}, {"path": 3}, [], "x", None, b"", b"{", b"\xff", {"path": "a\0b"}])
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


def changed(folder, **tensors):
    """Tiny's weights in `folder`, with these changed; None takes one away."""
    state = load_file(f"{WEIGHTS}/model.safetensors") | tensors
    save_file({name: value for name, value in state.items() if value is not None}, folder / "model.safetensors")


NORM = "model.norm.weight"
ONES = torch.ones(128)


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({NORM: None}, f"{NORM} is missing"),
        ({"model.more": ONES}, "model.more is not of this model"),
        ({NORM: torch.ones(127)}, f"{NORM} is [127] float, and the server's model has [128] float"),
        ({NORM: torch.ones(128, dtype=torch.int64)}, f"{NORM} is [128] I64, and the server's model has [128] float"),
        ({NORM: torch.full((128,), float("nan"))}, f"128 of 128 numbers of {NORM} are NaN or infinite"),
        ({NORM: torch.cat([ONES[:127], torch.tensor([float("-inf")])])}, f"1 of 128 numbers of {NORM} are NaN"),
    ],
)
async def test_weights_that_do_not_fit_are_refused_before_anything_is_touched(engine, post, tmp_path, tensors, says):
    changed(tmp_path, **tensors)
    reply = await post({"path": str(tmp_path)})
    assert reply.status_code == 400 and says in reply.json()["error"] and engine.calls == []
    assert reply.json()["error"].endswith("the weights stay as they are") and "\n" not in reply.json()["error"]


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {NORM: ONES.double()},  # another number format
        {NORM: ONES * 3e38},  # finite, and their sum is not
        {"lm_head.weight": torch.ones(512, 128)},  # tied: it may be there
    ],
)
async def test_weights_that_fit_are_loaded(engine, post, tmp_path, tensors):
    changed(tmp_path, **tensors)
    reply = await post({"path": str(tmp_path)})
    assert reply.status_code == 200 and reply.json()["loaded"] == str(tmp_path)


def truncated(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def flipped(folder):
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[9] ^= 0xFF
    path.write_bytes(bytes(data))


def pickled(folder):
    torch.save({"w": torch.ones(1)}, folder / "model.safetensors")


def elsewhere(folder):
    (folder / "sub").mkdir()
    shutil.copy(folder / "model.safetensors", folder / "sub" / "x.safetensors")
    weight_map = {"w": "../model.safetensors"}
    (folder / "sub" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder / "sub"


def unindexed(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": 3}')


def emptied(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")


def gone(folder):
    return folder / "gone"


@pytest.mark.parametrize("damage", [truncated, flipped, pickled, elsewhere, unindexed, emptied, gone])
async def test_files_that_cannot_be_read_are_refused_before_anything_is_touched(engine, post, tmp_path, damage):
    changed(tmp_path)
    folder = damage(tmp_path) or tmp_path
    reply = await post({"path": str(folder)})
    assert reply.status_code == 400 and str(folder) in reply.json()["error"] and engine.calls == []
    assert "\n" not in reply.json()["error"] and reply.json()["error"].endswith("the weights stay as they are")


async def test_a_name_that_is_nowhere_is_refused(engine, post, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("tiny", "nobody/nothing", "../x", "a/b/c", ""):
        reply = await post({"path": name})
        assert reply.status_code == 400 and engine.calls == [], name


async def test_names_as_transformers_writes_them_pass_too(engine, post, tmp_path, monkeypatch):
    """Where the files at start name tensors otherwise, as those of an older version do."""
    older = tmp_path / "older"
    older.mkdir()
    state = load_file(f"{WEIGHTS}/model.safetensors")
    save_file({name.replace("model.", "transformer."): value for name, value in state.items()}, older / "a.safetensors")
    engine.vllm_config.model_config.model = str(older)
    app = FastAPI()
    app.state.engine_client = engine
    await PolicyRoutes().init_state(engine, app.state, SimpleNamespace(served_model_name=["policy"], model="m"))
    assert app.state.served_model.check(WEIGHTS) == WEIGHTS
    assert app.state.served_model.check(str(older)) == str(older)


async def test_a_frozen_server_has_no_such_route(engine, monkeypatch):
    monkeypatch.setenv("PRL_FROZEN", "1")
    app = FastAPI()
    PolicyRoutes().attach_router(app)
    assert "/prl/load_policy" not in {route.path for route in app.routes}


# --- weights that the trainer sends -----------------------------------------------------------------------------------


def incoming(**changed):
    """What asks for tiny's weights; `changed` are shapes by name, None takes a tensor away."""
    state = {name: list(tensor.shape) for name, tensor in load_file(f"{WEIGHTS}/model.safetensors").items()} | changed
    tensors = [[name, "bfloat16", shape] for name, shape in state.items() if shape is not None]
    return {
        "version": 7,
        "meeting": {"store": "/s/peers-1", "world_size": 5, "rank_offset": 3, "timeout_s": 60.0},
        "update": {"tensors": tensors, "bucket_bytes": 100, "timeout_s": 60.0},
    }


@pytest.fixture
async def receive(client):
    return lambda body: client.post(RECEIVE, json=body)


async def test_an_engine_meets_the_others_before_it_pauses_and_receives_while_it_is_paused(engine, receive):
    reply = await receive(incoming())
    body = reply.json()
    assert reply.status_code == 200 and body["loaded"] == 7
    assert list(body["seconds"]) == ["check", "pause", "load", "take over", "clear"]
    count = len(incoming()["update"]["tensors"])
    joined = "join /s/peers-1 after 3"
    assert engine.calls == [joined, "pause keep", f"receive {count} tensors", "take over", "reset running", "resume"]


async def test_a_server_says_how_many_workers_it_has(engine, receive, monkeypatch):
    monkeypatch.setenv("PRL_INSTANCE", "start 1")
    reply = await receive({})
    assert reply.json() == {"workers": 6, "instance": "start 1"} and engine.calls == []


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({NORM: None}, f"what the trainer sends: {NORM} is missing"),
        ({"model.more": [3]}, "model.more is not of this model"),
        ({NORM: [127]}, f"{NORM} is [127] float, and the server's model has [128] float"),
    ],
)
async def test_weights_of_another_model_are_refused_before_anything_is_touched(engine, receive, changed, says):
    reply = await receive(incoming(**changed))
    assert reply.status_code == 400 and says in reply.json()["error"] and engine.calls == []
    assert reply.json()["error"].endswith("the weights stay as they are")


@pytest.mark.parametrize(
    "body",
    [
        {"meeting": {}},
        {"more": 1},
        incoming() | {"version": "x"},
        incoming() | {"update": {"tensors": [["w", "int8", [1]]], "bucket_bytes": 1, "timeout_s": 1.0}},
    ],
)
async def test_a_request_for_other_than_weights_touches_nothing(engine, receive, body):
    assert (await receive(body)).status_code == 400 and engine.calls == []


async def test_weights_that_do_not_come_leave_the_engine_as_it_is_or_paused(engine, receive):
    engine.joined = [None, "peer 0 of 5 has not come"]
    reply = await receive(incoming())
    assert (reply.status_code, reply.json()) == (INTERRUPTED, {"error": "peer 0 of 5 has not come"})
    assert len(engine.calls) == 1, "it samples on"
    engine.joined, engine.received = [None, None], ["cut off", None]
    reply = await receive(incoming())
    assert (reply.status_code, reply.json()) == (INTERRUPTED, {"error": "cut off"})
    assert "resume" not in engine.calls
    engine.received = [None, None]
    assert (await receive(incoming())).status_code == 200 and engine.calls[-1] == "resume"


async def test_a_receiving_engine_that_dies_is_an_error_of_its_own(engine, receive, monkeypatch):
    monkeypatch.setattr("prl.inference.routes.ALIVE_S", 0.01)
    engine.stuck = True
    asking = asyncio.create_task(receive(incoming()))
    await asyncio.sleep(0.1)
    assert not asking.done()
    engine.errored = True
    reply = await asyncio.wait_for(asking, 5)
    assert reply.status_code == 500 and "the engine died" in reply.json()["error"]
