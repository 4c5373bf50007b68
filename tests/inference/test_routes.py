"""prl's routes, against an engine that only takes notes."""

import asyncio
import contextlib
import json
import shutil
import socket
import time
from types import SimpleNamespace

import httpx
import pytest
import torch
import uvicorn
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from prl.errors import TakenOver
from prl.inference import _vllm_internals, lasting
from prl.inference.client import InferencePool
from prl.inference.protocol import GENERATE
from prl.inference.routes import PolicyRoutes
from prl.launch.local import free_port
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

    def collective_rpc(self, method, args=()):
        if method == "prepares":
            return [self.prepares]
        if method == "take_over":
            self.calls.append("take over")
            return [None]
        assert method == "load_policy"
        self.calls.append(f"load {args[0]}")
        if self.failure:
            raise self.failure
        return [None]

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


async def app_of(engine):
    app = FastAPI()
    app.state.engine_client = engine
    routes = PolicyRoutes()
    routes.attach_router(app)
    app.add_exception_handler(ValueError, lambda request, error: PlainTextResponse(str(error), status_code=418))
    await routes.init_state(engine, app.state, SimpleNamespace(served_model_name=["policy"], model="m"))
    return app


@pytest.fixture
async def client(engine, monkeypatch):
    monkeypatch.setenv("PRL_TOKEN", "t")
    app = await app_of(engine)
    app.add_middleware(Broken)
    headers = {"Authorization": "Bearer t"}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine", headers=headers) as client:
        yield client


@pytest.fixture
async def post(client):
    return lambda body: client.post(
        "/prl/load_policy", **({"content": body} if isinstance(body, bytes) else {"json": body})
    )


ONE, TWO, THREE = (f"{began:019d}-a" for began in (1, 2, 30))
"""Names of runs in the order in which they began."""
SAMPLE = {"model": "policy", "token_ids": [3], "sampling": {}}
REFUSED = "another run has begun with this server since"


@pytest.fixture
async def of_run(client):
    """`of_run(name, route)`: the status of a run's request, and what is wrong."""

    async def ask(run, path, body=None):
        headers = {} if run is None else {"X-Prl-Run": run}
        reply = await client.request("GET" if body is None else "POST", path, json=body, headers=headers)
        return reply.status_code, reply.json()["error"] if reply.status_code in (400, 409) else reply.text

    return ask


@pytest.fixture
async def load(of_run):
    """`load(run, path)`: the status of a load."""

    async def ask(run, path=WEIGHTS):
        return (await of_run(run, "/prl/load_policy", {"path": path}))[0]

    return ask


@pytest.fixture
def sampling(monkeypatch):
    """Set until a test clears it: samples are drawn at once."""
    drawn = asyncio.Event()
    drawn.set()

    async def sample(groups, asked):
        await drawn.wait()
        choice = {"index": 0, "token_ids": [5], "logprobs": [-0.5], "finish_reason": "stop"}
        return json.dumps({"model": "policy", "prompt_token_ids": asked.token_ids, "choices": [choice]}).encode()

    monkeypatch.setattr("prl.inference._vllm_sampling.sample", sample)
    return drawn


async def test_the_run_that_began_last_has_a_server_whoever_comes_last(client, engine, load, of_run):
    async def whose():
        return (await client.get("/prl/run", headers={"X-Prl-Run": ONE})).json()

    assert [await load(TWO), await load(TWO)] == [200, 200]
    assert await load(THREE, "/nowhere") == 400, "which has taken nothing over"
    before = list(engine.calls)
    status, error = await of_run(ONE, "/prl/load_policy", {"path": WEIGHTS})
    assert status == 409 and REFUSED in error
    assert engine.calls == before and await load(TWO) == 200
    assert [await load(THREE), await load(TWO), await load(THREE)] == [200, 409, 200]
    assert await load(THREE[:-1] + "b") == 200 and await load(THREE) == 409, "of two that began at once, either"


async def test_an_earlier_run_that_waited_for_a_later_ones_weights_loads_none(engine, load, monkeypatch):
    go, load_all = asyncio.Event(), _vllm_internals.update

    async def slow(*args):
        await go.wait()
        return await load_all(*args)

    monkeypatch.setattr(_vllm_internals, "update", slow)
    later = asyncio.create_task(load(TWO))
    await asyncio.sleep(0.1)
    earlier = asyncio.create_task(load(ONE))
    await asyncio.sleep(0.1)
    go.set()
    assert (await later, await earlier) == (200, 409) and engine.calls == WHOLE


async def test_weights_of_no_run_are_loaded_where_no_run_has_begun(load, of_run):
    assert await load(None) == 200
    assert await load(ONE) == 200, "who then has the server"
    status, error = await of_run(None, "/prl/load_policy", {"path": WEIGHTS})
    assert status == 409 and REFUSED in error
    for name in ("mine", "2026-11-25", ONE[1:], f"{ONE}/"):
        status, error = await of_run(name, "/prl/load_policy", {"path": WEIGHTS})
        assert status == 400 and "X-Prl-Run must be 19 digits" in error, name
    for name in ("9" * 19 + "-x", f"{time.time_ns() + 2 * 24 * 3600 * 10**9:019d}-x"):
        status, error = await of_run(name, "/prl/load_policy", {"path": WEIGHTS})
        assert status == 400 and "begins more than a day from now by this server's clock" in error, name
    assert await load(TWO) == 200, "a name that sorts after all others would keep the server for ever"


async def test_whatever_a_run_asks_of_a_server_that_another_has_is_refused(load, of_run, sampling):
    assert await load(ONE) == 200 and (await of_run(ONE, GENERATE, SAMPLE))[0] == 200
    assert await load(TWO) == 200
    for path, body in ((GENERATE, SAMPLE), ("/inference/v1/generate", {}), ("/health", None)):
        status, error = await of_run(ONE, path, body)
        assert status == 409 and REFUSED in error, path
        assert (await of_run(TWO, path, body))[0] == (await of_run(None, path, body))[0] != 409
    assert (await of_run(TWO, GENERATE, SAMPLE))[0] == 200


async def test_what_was_sampled_of_two_policies_is_refused(load, of_run, sampling):
    assert await load(ONE) == 200
    sampling.clear()
    asked = [asyncio.create_task(of_run(run, GENERATE, SAMPLE)) for run in (ONE, TWO, None)]
    await asyncio.sleep(0.1)
    assert await load(TWO) == 200
    sampling.set()
    (status, error), later, nobody = await asyncio.gather(*asked)
    assert status == 409 and REFUSED in error
    assert later[0] == nobody[0] == 200 and json.loads(later[1])["choices"][0]["token_ids"] == [5]


@contextlib.asynccontextmanager
async def listening(port):
    """A server with prl's routes, its engine as yet without weights of a run."""
    server = uvicorn.Server(uvicorn.Config(await app_of(Engine()), port=port, log_level="warning"))
    serving = asyncio.create_task(server.serve([listen(port)]))
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await serving


def listen(port):
    taken = socket.socket()
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    taken.bind(("127.0.0.1", port))
    return taken


@pytest.fixture
async def begin(monkeypatch):
    """`begin(*urls)`: a client of a run's."""
    monkeypatch.setenv("PRL_TOKEN", "t")
    monkeypatch.setenv("PRL_INSTANCE", "first")
    monkeypatch.setattr(lasting, "LOOK_S", 0.02)
    pools = []

    def make(*urls):
        pools.append(InferencePool(list(urls), "policy", "t"))
        return pools[-1]

    yield make
    for pool in pools:
        await pool.close()


async def ask(pool):
    """Whether a run goes on."""
    try:
        [found] = await pool.generate([3], {})
    except TakenOver as error:
        assert REFUSED in str(error)
        return False
    return found.token_ids == [5]


async def test_of_two_runs_that_take_each_others_servers_the_later_one_goes_on(begin, sampling, monkeypatch):
    """Each has loaded its weights into one server when it comes to the other's."""
    async with listening(free_port("127.0.0.1")) as one, listening(free_port("127.0.0.1")) as two:
        earlier, later = begin(one, two), begin(two, one)
        load, held = InferencePool._load, asyncio.Event()

        async def one_by_one(self, server):
            if server is self.servers[1]:
                await held.wait()
            await load(self, server)

        monkeypatch.setattr(InferencePool, "_load", one_by_one)
        updates = []
        for pool in (earlier, later):
            updates.append(asyncio.create_task(pool.update_weights(1, WEIGHTS)))
            while pool.servers[0].version == 0:
                await asyncio.sleep(0.01)
        held.set()
        refused, loaded = await asyncio.gather(*updates, return_exceptions=True)
        assert isinstance(refused, TakenOver) and REFUSED in str(refused) and loaded is None
        assert [[await ask(pool) for _ in range(4)] for pool in (earlier, later)] == [[False] * 4, [True] * 4]


async def test_a_server_that_was_started_anew_is_the_later_runs_whoever_is_the_first_to_notice(
    begin, sampling, monkeypatch
):
    port = free_port("127.0.0.1")
    async with listening(port) as url:
        earlier, later = begin(url), begin(url)
        await earlier.update_weights(1, WEIGHTS)
        await later.update_weights(1, WEIGHTS)
    monkeypatch.setenv("PRL_INSTANCE", "second")
    async with listening(port):
        assert await ask(earlier), "nobody has the server, and it gets this one's weights"
        assert [await ask(later), await ask(earlier), await ask(later)] == [True, False, True]


async def test_posts_to_our_routes_pass_the_token_check_and_nothing_of_vllms(client, engine, monkeypatch):
    for path in (GENERATE, "/prl/load_policy"):
        assert (await client.post(path, content=b"{")).status_code == 400, "answered by the route"
        assert (await client.get(path)).status_code == 502
    assert (await client.post("/health")).status_code == 502
    for path in (GENERATE, "/prl/load_policy", "/health", "/nowhere"):
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


async def test_large_weights_are_loaded_before_the_pause_where_workers_can(engine, post, monkeypatch):
    engine.prepares = True
    assert (await post({"path": WEIGHTS})).status_code == 200 and engine.calls == WHOLE, "these are small"
    monkeypatch.setattr(_vllm_internals, "LARGE", 1)
    assert (await post({"path": WEIGHTS})).status_code == 200 and engine.calls == WHOLE * 2, "workers of their own"
    from vllm.v1.executor.uniproc_executor import UniProcExecutor  # seconds, which other tests need not wait for

    engine.model_executor = object.__new__(UniProcExecutor)
    engine.calls.clear()
    reply = await post({"path": WEIGHTS})
    assert reply.status_code == 200
    assert engine.calls == [f"load {WEIGHTS}", "pause keep", "take over", "reset running", "resume"]
    assert list(reply.json()["seconds"]) == ["check", "beside", "pause", "load", "take over", "clear"]
    engine.calls.clear()
    engine.failure = FileNotFoundError("no such folder")
    assert (await post({"path": WEIGHTS})).status_code == 500 and engine.calls == [f"load {WEIGHTS}"], "not paused"


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
