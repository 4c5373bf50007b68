"""The client pool against replies that a healthy vLLM would not give. The healthy ones are in tests/e2e."""

import asyncio
import contextlib
import socket
import threading

import pytest

from prl.base.errors import EngineError, PrlError
from prl.engines.client import InferencePool
from prl.engines.replies import Scored
from prl.launch.local import free_port
from prl.rollouts.inputs import ModelInput

GENERATE = "/prl/generate"


def choice(ids, index=0, **changes):
    logprobs = [-0.5 * i for i in ids]
    return {"index": index, "token_ids": ids, "logprobs": logprobs, "finish_reason": "stop"} | changes


@pytest.fixture
async def pool(server):
    server.replies["/health"] = {}
    pool = InferencePool([server.url + "/v1/"], "policy", "t0ken")
    yield pool
    await pool.close()


async def hang():
    await asyncio.sleep(30)


# --- a server that is about to end ------------------------------------------------------------------------------------


async def test_what_a_server_gave_up_is_sent_again(server, pool):
    replies = [choice([3], finish_reason="abort"), choice([3, 4])]

    async def reply():
        return {"choices": [replies.pop(0)]}

    server.replies[GENERATE] = reply
    (found,) = await pool.generate(ModelInput([1]), {})
    assert found.token_ids == [3, 4] and pool.counts["engine/requests_reissued"] == 1


async def test_weights_are_resent_to_a_server_shutting_down(server):
    """Until it has ended: then its successor loads them."""
    pool = InferencePool([server.url], "policy", "t0ken", restart_s=30.0)
    replies = [(500, '{"error":"Exception: Server shutting down"}')] * 3 + [{"loaded": "/w"}]

    async def reply():
        return replies.pop(0)

    server.replies["/prl/load_policy"], server.replies["/health"] = reply, {}
    await pool.update_weights(1, "/w")
    assert pool.version == 1
    await pool.close()


async def test_a_server_that_gives_everything_up_is_named(server, pool, monkeypatch):
    monkeypatch.setattr("prl.engines.rotation.DYING_S", 0.3)
    server.replies[GENERATE] = {"choices": [choice([3, 4]), choice([5], 1, finish_reason="abort")]}
    with pytest.raises(EngineError, match=f"{server.url} gave a request up before its end"):
        await pool.generate(ModelInput([1]), {}, n=2)


# --- generate ---------------------------------------------------------------------------------------------------------


async def test_generate(server, pool):
    server.replies[GENERATE] = {"choices": [choice([3, 4], 1), choice([5], 0, finish_reason="length")]}
    first, second = await pool.generate(ModelInput([1, 2]), {"temperature": 0.7, "seed": 3, "priority": 1}, n=2)
    assert (first.token_ids, first.logprobs, first.finish_reason) == ([5], [-2.5], "length")  # by index
    assert (second.token_ids, second.logprobs, second.finish_reason) == ([3, 4], [-1.5, -2.0], "stop")
    (body,) = server.bodies[GENERATE]
    assert body["model"] == "policy" and body["token_ids"] == [1, 2] and body["cache_salt"] == "v0"
    assert body["priority"] == 1
    assert body["sampling"] == {"temperature": 0.7, "seed": 3, "n": 2, "detokenize": False}
    assert server.headers["Authorization"] == "Bearer t0ken"


async def test_stop_strings_make_the_engine_write_text(server, pool):
    """vLLM searches for them in the text, and refuses them without."""
    server.replies[GENERATE] = {"choices": [choice([3])]}
    await pool.generate(ModelInput([1]), {"stop": ["x"]})
    (body,) = server.bodies[GENERATE]
    assert body["sampling"] == {"stop": ["x"], "n": 1, "detokenize": True}


@pytest.mark.parametrize(
    "reply, message",
    [
        ({"choices": [choice([3, 4], logprobs=None)]}, "2 sampled tokens came with 0 logprobs"),
        ({"choices": [choice([3, 4], logprobs=[-0.5])]}, "2 sampled tokens came with 1 logprobs"),
        ({"choices": [choice([3], logprobs=[None])]}, "3 .*logprob None"),
        ({"choices": []}, "asked for 1 completions, got 0"),
        ({"choices": 5}, "cannot be read: TypeError"),
        ({"choices": [choice([])]}, "sent no usable reply: it has no token"),
        ({"choices": [choice([3], finish_reason="error")]}, "broken off after 1 tokens \\('error'\\)"),
        ({"choices": [choice([1.5])]}, r"no list of token ids: \[1.5\]"),
        ({"choices": [choice([-3])]}, "sampled token -3 came with the logprob 1.5"),
        ({"choices": [choice([30_000, 30_001])]}, r"none of its 2 tokens has a logprob \(got -15000.0\)"),
        ({"choices": [choice([3])], "prompt_token_ids": [2]}, "continues another prompt"),
        ((200, "[" * 100_000), "failed: maximum recursion depth"),
        ((500, "the engine is dead"), "HTTP 500: the engine is dead"),
    ],
)
async def test_bad_generations_are_errors_and_not_retried(server, pool, reply, message):
    server.replies[GENERATE] = reply
    with pytest.raises(EngineError, match=message) as raised:
        await pool.generate(ModelInput([1]), {})
    assert server.calls.count(GENERATE) == 1  # a retry would hide a sick engine, and sample with another seed's state
    assert raised.value.status == (reply[0] if isinstance(reply, tuple) and reply[0] != 200 else 0)


# --- prompt_logprobs --------------------------------------------------------------------------------------------------


def scored(*logprobs):
    return {"prompt_logprobs": list(logprobs), "choices": [choice([1])]}


async def test_prompt_logprobs_come_by_the_route_that_samples(server, pool):
    server.replies[GENERATE] = scored(None, -1.25, -2.5)
    assert await pool.prompt_logprobs(ModelInput([5, 7, 8])) == [0.0, -1.25, -2.5]
    (body,) = server.bodies[GENERATE]
    assert body["token_ids"] == [5, 7, 8] and body["cache_salt"] == "v0"
    assert body["sampling"]["max_tokens"] == 1 and body["sampling"]["prompt_logprobs"] == 0


async def test_top_logprobs_come_by_the_same_route(server, pool):
    top = [[], [[7, -1.25], [3, -0.5], [4, -4.0]]]
    server.replies[GENERATE] = scored(None, -1.25) | {"prompt_top": top}
    assert await pool.top_logprobs(ModelInput([5, 7]), 2) == Scored([0.0, -1.25], [[], [3, 7]], [[], [-0.5, -1.25]])
    server.replies[GENERATE] = scored(None, -1.25)
    with pytest.raises(EngineError, match="a prompt of 2 tokens came with 0 rows of top logprobs"):
        await pool.top_logprobs(ModelInput([5, 7]), 2)


@pytest.mark.parametrize("bad", [None, "-1", -9999.0, -10000.0, {"7": -1.0}, float("nan"), float("inf"), -float("inf")])
async def test_missing_or_infinite_logprob_is_an_error(server, pool, bad):
    server.replies[GENERATE] = scored(None, -0.5, bad)
    with pytest.raises(EngineError):
        await pool.prompt_logprobs(ModelInput([5, 6, 7]))
    assert server.calls.count(GENERATE) == 1


# --- update_weights ---------------------------------------------------------------------------------------------------

UPDATE = ["/prl/load_policy"]


async def test_update_weights(server, pool):
    await pool.update_weights(4, "/run/weights/step_000004", timeout_s=7)
    assert server.calls == UPDATE
    assert server.bodies[UPDATE[0]] == [{"path": "/run/weights/step_000004"}]
    assert pool.version == 4


async def test_a_server_that_outlives_its_runs_has_one_at_a_time(server):
    first = InferencePool([server.url], "policy", "t", shared=True)
    with pytest.raises(PrlError, match="engine.urls"):
        InferencePool([f"{server.url}/v1"], "policy", "t", shared=True)
    await first.close()
    await InferencePool([server.url], "policy", "t", shared=True).close()


async def test_a_failed_update_leaves_the_version(server, pool):
    server.replies[UPDATE[0]] = (500, '{"error": "prefixes cached under older weights are still in use"}')
    with pytest.raises(EngineError, match="/prl/load_policy answered HTTP 500: .*older weights"):
        await pool.update_weights(1, "/w")
    assert pool.version == 0


async def test_an_update_that_is_not_confirmed_is_none(server, pool):
    server.replies[UPDATE[0]] = {}
    with pytest.raises(EngineError, match="/prl/load_policy does not say that policy version 3 is loaded"):
        await pool.update_weights(3, "/w")
    assert pool.version == 0


async def test_no_request_is_sent_during_an_update(server, pool):
    loading, sampling = asyncio.Event(), asyncio.Event()

    async def load():
        await loading.wait()
        return {"loaded": "/w"}

    async def sample():
        await sampling.wait()
        return {"choices": [choice([3])]}

    server.replies |= {UPDATE[0]: load, GENERATE: sample}
    before, early = (asyncio.create_task(pool.generate(ModelInput([1]), {})) for _ in range(2))
    while server.calls != [GENERATE, GENERATE]:
        await asyncio.sleep(0.01)
    assert pool.loading is None
    update = asyncio.create_task(pool.update_weights(5, "/w"))
    await asyncio.sleep(0.05)
    after = asyncio.create_task(pool.generate(ModelInput([2]), {}))
    await asyncio.sleep(0.05)
    assert server.calls == [GENERATE, GENERATE, *UPDATE] and pool.version == 0 and pool.loading == 5
    sampling.set()
    for request in (before, early):  # under version 0, or under 5 where this server was quicker than its own reply
        (completion,) = await request
        assert (completion.start_version, completion.end_version) == (0, 5)
    loading.set()
    await update
    (completion,) = await after
    assert (completion.start_version, completion.end_version) == (5, 5)
    assert [body["cache_salt"] for body in server.bodies[GENERATE]] == ["v0", "v0", "v5"]


# --- wait_ready -------------------------------------------------------------------------------------------------------


async def test_wait_ready_names_the_endpoint_that_did_not_answer(server):
    port = free_port("127.0.0.1")
    server.replies["/health"] = {}
    pool = InferencePool([server.url, f"http://127.0.0.1:{port}"], "teacher", "t")
    try:
        message = rf"model 'teacher' at http://127.0.0.1:{port} was not ready after 0.4 s \(.+\)"
        with pytest.raises(TimeoutError, match=message):
            await pool.wait_ready(0.4)
    finally:
        await pool.close()


async def test_wait_ready_with_a_wrong_token_gives_up_at_once(server, pool):
    server.replies["/health"] = (401, "")
    with pytest.raises(EngineError, match=f"{server.url} refused the token.*PRL_TOKEN") as raised:
        await pool.wait_ready(60)
    assert raised.value.status == 401 and server.calls == ["/health"]


# --- spreading --------------------------------------------------------------------------------------------------------


async def test_third_closed_connection_is_an_error():
    """An engine that is busy closes its idle connections one after the other, each as we are about to use it."""

    def serve(closed: int, answered: int) -> None:
        with contextlib.suppress(OSError):  # no more are listened for
            for number in range(closed + answered):
                with listening.accept()[0] as connection:
                    connection.recv(65536)
                    if number >= closed:
                        connection.sendall(
                            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
                        )

    with socket.create_server(("127.0.0.1", 0)) as listening:
        pool = InferencePool([f"http://127.0.0.1:{listening.getsockname()[1]}"], "policy", "t")
        request = ("POST", pool.urls[0], "/prl/load_policy")
        first, second = (threading.Thread(target=serve, args=counts, daemon=True) for counts in ((2, 1), (3, 0)))
        try:
            first.start()
            assert await pool.http.request(*request, {"path": "x"}) == {}
            first.join(10)  # else it may take a connection of the second's
            second.start()
            with pytest.raises(EngineError, match="load_policy failed: Server disconnected"):
                await pool.http.request(*request, {"path": "x"})
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            await pool.close()
