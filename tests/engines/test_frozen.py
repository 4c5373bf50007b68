"""The client of a frozen model: what it asks of an OpenAI-compatible endpoint, and what it makes of a bad answer."""

import asyncio
import contextlib
import functools
import itertools
import time

import pytest
from aiohttp import web
from patience import patient

from prl.base.errors import DeadlinePassed, EngineError, PrlError
from prl.config.model_reference import FrozenModelConfig
from prl.engines.frozen import FrozenPool
from prl.engines.replies import Scored
from prl.rollouts.inputs import ModelInput

COMPLETIONS = "/v1/completions"
GENERATE = "/prl/generate"
CHAT = "/v1/chat/completions"
MODELS = "/v1/models"
SERVED = {"object": "list", "data": [{"id": "teacher", "object": "model"}]}
PLAIN_TEXT = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


def choice(ids, index=0, **changes):
    """As a server sends it: with text, and without logprobs."""
    return {"index": index, "text": "?", "token_ids": ids, "logprobs": None, "finish_reason": "stop"} | changes


@pytest.fixture
async def connect(server):
    """`connect(**changes)`: a pool of the model that `server` serves."""
    server.replies |= {COMPLETIONS: {"choices": [choice([3])]}, MODELS: SERVED}
    pools = []

    def make(token=None, **changes):
        reference = FrozenModelConfig(**{"name": "teacher", "base_url": f"{server.url}/v1"} | changes)
        pools.append(FrozenPool(reference, token))
        return pools[-1]

    yield make
    for pool in pools:
        await pool.close()


@pytest.fixture
async def pool(connect):
    return connect()


async def until(condition, timeout_s=5.0):
    async with asyncio.timeout(patient(timeout_s)):
        while not condition():
            await asyncio.sleep(0.01)


async def hang():
    await asyncio.sleep(30)


# --- generate ---------------------------------------------------------------------------------------------------------


async def test_a_request_is_token_ids_and_plain_sampling_and_nothing_else(server, pool):
    """Equal, not merely containing: no logprobs, no cache salt, no text."""
    server.replies[COMPLETIONS] = {"choices": [choice([3]), choice([4], 1)]}
    sampling = {"temperature": 0.7, "seed": 3, "max_tokens": 5, "stop_token_ids": [9]}
    await pool.generate(ModelInput([1, 2]), sampling, n=2)
    (body,) = server.bodies[COMPLETIONS]
    assert body == {"model": "teacher", "prompt": [1, 2], "n": 2, "return_token_ids": True} | PLAIN_TEXT | sampling
    assert server.calls == [COMPLETIONS]


@pytest.mark.parametrize(("tail", "listed"), [("", False), ("/v1", True), ("/v1/", False)])
async def test_url_may_end_in_v1_or_be_a_list(server, connect, tail, listed):
    url = server.url + tail
    pool = connect(base_url=[url] if listed else url)
    await pool.generate(ModelInput([1]), {})
    await pool.wait_ready(1)
    assert pool.urls == [server.url] and server.calls == [COMPLETIONS, MODELS]


async def test_no_key_is_sent_unless_its_variable_is_named(server, connect, monkeypatch):
    monkeypatch.setenv("PRL_TOKEN", "the-runs-own")  # not anybody else's business
    monkeypatch.setenv("LARGE_MODEL_KEY", "s3cret")
    await connect().generate(ModelInput([1]), {})
    assert "Authorization" not in server.headers
    await connect("the-runs-own", api_key_var="LARGE_MODEL_KEY").generate(ModelInput([1]), {})
    assert server.headers["Authorization"] == "Bearer the-runs-own", "one that is passed, as for a hosted model"
    pool = connect(api_key_var="LARGE_MODEL_KEY")
    await pool.generate(ModelInput([1]), {})
    assert server.headers["Authorization"] == "Bearer s3cret"
    server.headers = None
    await pool.wait_ready(1)
    assert server.headers["Authorization"] == "Bearer s3cret"


@pytest.mark.parametrize(
    "reply, message",
    [
        ({"choices": [choice([3])]}, "asked for 2 completions, got 1"),
        ({"id": "x"}, "cannot be read: KeyError"),
        ({"choices": [choice([3]), choice(None, 1)]}, "'teacher' returns no token ids.*return_token_ids"),
        ((500, "the engine is dead"), "HTTP 500: the engine is dead"),
    ],
)
async def test_bad_generations_are_errors_and_not_retried(server, pool, reply, message):
    server.replies[COMPLETIONS] = reply
    with pytest.raises(EngineError, match=message):
        await pool.generate(ModelInput([1]), {}, n=2)
    assert server.calls == [COMPLETIONS]


# --- servers of strangers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [302, 307])
async def test_a_redirect_is_not_followed_and_the_key_goes_nowhere_else(servers, connect, status):
    away = web.Response(status=status, headers={"Location": f"{servers[1].url}{COMPLETIONS}"})
    pool = connect("the key")
    servers[0].replies[COMPLETIONS] = away
    with pytest.raises(EngineError, match=f"HTTP {status}: it leads to {servers[1].url}.* not followed"):
        await pool.generate(ModelInput([1]), {})
    assert servers[0].calls == [COMPLETIONS] and servers[1].calls == []


@pytest.mark.parametrize("status, wait_s", [(429, "0.2"), (503, "0.2"), (429, None)])
async def test_a_server_that_asks_for_time_gets_it(server, pool, status, wait_s):
    asked = []

    async def busy_twice():
        asked.append(time.monotonic())
        headers = {} if wait_s is None else {"Retry-After": wait_s}
        good = {"choices": [choice([3])]}
        return good if len(asked) > 2 else web.Response(status=status, text="slower", headers=headers)

    server.replies[COMPLETIONS] = busy_twice
    (completion,) = await pool.generate(ModelInput([1]), {})
    assert completion.token_ids == [3] and len(asked) == 3
    assert min(later - earlier for earlier, later in itertools.pairwise(asked)) >= float(wait_s or 0.05)


# --- prompt_logprobs --------------------------------------------------------------------------------------------------


def rows(*entries):
    return {"choices": [choice([1], prompt_logprobs=list(entries))]}


def row(**logprobs):
    return {name[1:]: {"logprob": value, "rank": 1} for name, value in logprobs.items()}


async def test_prompt_logprobs_look_each_token_up_by_its_id(server, pool):
    server.replies[COMPLETIONS] = rows(None, row(_9=-0.1, _7=-1.25), row(_8=-2.5, _4=-0.2))
    assert await pool.prompt_logprobs(ModelInput([5, 7, 8])) == [0.0, -1.25, -2.5]
    (body,) = server.bodies[COMPLETIONS]
    assert body == {"model": "teacher", "prompt": [5, 7, 8], "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}


async def test_prls_own_server_is_asked_by_the_route_that_makes_no_text(server, pool):
    top = [[], [[7, -9.0], [9, -0.5], [3, -1.5]]]
    server.replies[GENERATE] = {"choices": [choice([1])], "prompt_logprobs": [None, -9.0], "prompt_top": top}
    await asyncio.gather(*(pool.top_logprobs(ModelInput([5, 7]), 2) for _ in range(3)))
    server.bodies[GENERATE].clear()
    server.calls.clear()
    assert await pool.top_logprobs(ModelInput([5, 7]), 2) == Scored([0.0, -9.0], [[], [9, 3]], [[], [-0.5, -1.5]])
    (body,) = server.bodies[GENERATE]
    assert (body["model"], body["token_ids"], server.calls) == ("teacher", [5, 7], [GENERATE])
    assert body["sampling"] == {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 2, "detokenize": False}


@pytest.mark.parametrize(
    "reply", [(302, ""), (400, "?"), (401, "?"), (404, "?"), (405, "?"), (503, "?"), {}, [], "<p>"]
)
async def test_a_server_without_that_route_is_asked_for_it_once(server, pool, reply):
    """Gateways say of an unknown path whatever they like."""
    server.replies |= {GENERATE: reply, COMPLETIONS: rows(None, row(_7=-1.25))}
    for _ in range(2):
        assert await pool.prompt_logprobs(ModelInput([5, 7])) == [0.0, -1.25]
    assert server.calls == [GENERATE, COMPLETIONS, COMPLETIONS] and not pool.ailing


async def test_what_the_route_refuses_is_not_asked_again_by_another(server, pool):
    server.replies[GENERATE] = {"choices": [choice([1])], "prompt_logprobs": [None, -9.0]}
    await pool.prompt_logprobs(ModelInput([5, 7]))
    server.replies[GENERATE] = (400, "too long")
    with pytest.raises(EngineError, match="too long"):
        await pool.prompt_logprobs(ModelInput([5, 7]))
    assert COMPLETIONS not in server.calls


@pytest.mark.parametrize("bad", [row(_9=-0.1), row(_7=None), row(_7="-1"), row(_7=-9999.0), {"7": -1.0}, None])
async def test_a_missing_prompt_logprob_is_an_error(server, pool, bad):
    server.replies[COMPLETIONS] = rows(None, row(_6=-0.5), bad)
    with pytest.raises(EngineError, match="no logprob for token 7 at position 2"):
        await pool.prompt_logprobs(ModelInput([5, 6, 7]))
    assert server.calls.count(COMPLETIONS) == 1


async def test_logprob_above_0_is_an_error(server, pool):
    server.replies[COMPLETIONS] = rows(None, row(_7=1e-4))
    assert await pool.prompt_logprobs(ModelInput([5, 7])) == [0.0, 1e-4]  # rounding
    server.replies[COMPLETIONS] = rows(None, row(_7=3.0))
    with pytest.raises(EngineError, match=r"token 7 at position 1 came with the logprob 3\.0"):
        await pool.prompt_logprobs(ModelInput([5, 7]))


async def test_top_logprobs_are_the_most_likely(server, pool):
    """vLLM adds the prompt's own token, where it is not among them."""
    server.replies[COMPLETIONS] = rows(None, row(_7=-9.0, _3=-1.5, _9=-0.5, _4=-2.0), row(_9=-3.0, _8=-0.1))
    scored = await pool.top_logprobs(ModelInput([5, 7, 8]), 2)
    assert scored == Scored([0.0, -9.0, -0.1], [[], [9, 3], [8, 9]], [[], [-0.5, -1.5], [-0.1, -3.0]])
    assert server.bodies[COMPLETIONS][0]["prompt_logprobs"] == 2


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (row(_7=-1.0), "1 top logprobs at position 1, not 2"),
        (row(_7=-1.0, _8=None), "cannot be read"),
        (row(_7=-1.0, _8=float("nan")), "JSON is malformed"),
        ({"7": {"logprob": -1.0}, "-8": {"logprob": -2.0}}, "of no distribution"),
        (row(_7=-1.0, _8=-9999.0), "of no distribution"),
        (row(_7=-1.0, _8=1000.0), "of no distribution"),
        (row(_7=-0.1, _8=-0.2), "of no distribution"),
        (row(_7=-1.0, _x=-2.0), "cannot be read"),
    ],
)
async def test_too_few_or_false_top_logprobs_are_an_error(server, pool, bad, message):
    server.replies[COMPLETIONS] = rows(None, bad)
    with pytest.raises(EngineError, match=message):
        await pool.top_logprobs(ModelInput([5, 7]), 2)


@pytest.mark.parametrize("reply", [rows(None), rows(None, None, None), {"choices": [choice([1])]}])
async def test_prompt_logprobs_with_the_wrong_number_of_rows(server, pool, reply):
    server.replies[COMPLETIONS] = reply
    with pytest.raises(EngineError, match="a prompt of 2 tokens came with [013] logprobs"):
        await pool.prompt_logprobs(ModelInput([5, 7]))


@pytest.mark.parametrize(
    "reply",
    [
        {"choices": [None]},
        [],
        {"choices": []},
        {"choices": [choice([1], prompt_logprobs=3)]},
        {"choices": [choice([1], prompt_logprobs=[None, 3])]},
        {"choices": [choice([1]), choice([1])]},
    ],
    ids=str,
)
async def test_a_reply_of_another_shape_is_an_error_of_the_server(server, pool, reply):
    server.replies[COMPLETIONS] = reply
    with pytest.raises(EngineError):
        await pool.prompt_logprobs(ModelInput([5, 7]))
    if not isinstance(reply, dict) or reply.get("choices") != [choice([1])] * 2:
        with pytest.raises(EngineError):
            await pool.generate(ModelInput([5, 7]), {}, n=2)


async def test_an_endpoint_that_looks_well_and_answers_nothing_has_its_deadline(server, connect):
    """A dead engine behind a live front end."""
    pool = connect(timeout_s=0.4)
    server.replies[COMPLETIONS] = (500, "dead")
    deadline = asyncio.get_running_loop().time() + patient(5)
    with pytest.raises(DeadlinePassed, match=f"{server.url} has failed for 0.4 s: .*500"):
        while asyncio.get_running_loop().time() < deadline:
            with contextlib.suppress(EngineError):
                await pool.prompt_logprobs(ModelInput([5, 7]))
            await asyncio.sleep(0.02)


async def test_an_answer_ends_what_counts_as_one_failure(server, connect):
    pool = connect(timeout_s=patient(0.4))
    for _ in range(3):
        server.replies[COMPLETIONS] = (500, "busy")
        with pytest.raises(EngineError):
            await pool.prompt_logprobs(ModelInput([5, 7]))
        server.replies[COMPLETIONS] = rows(None, row(_7=-1.0))
        await asyncio.sleep(patient(0.25))
        assert await pool.prompt_logprobs(ModelInput([5, 7])) == [0.0, -1.0] and pool.up


# --- wait_ready -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        ({"data": [{"id": "small"}, {"id": "medium"}]}, "serves 'small', 'medium', not 'teacher'"),
        ({"data": []}, "serves nothing, not 'teacher'"),
    ],
)
async def test_another_models_endpoint_is_told_at_once_with_what_it_serves(server, pool, reply, says):
    server.replies[MODELS] = reply
    with pytest.raises(PrlError, match=f"{server.url} {says}"):
        await asyncio.wait_for(pool.wait_ready(60), 5)
    assert server.calls == [MODELS]


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("variable", [None, "LARGE_MODEL_KEY"])
async def test_a_refused_key_is_told_at_once_with_its_setting(server, connect, monkeypatch, status, variable):
    monkeypatch.setenv("LARGE_MODEL_KEY", "s3cret")
    server.replies[MODELS] = (status, "")
    with pytest.raises(EngineError, match=rf"{server.url} refused the key.*api_key_var={variable}") as raised:
        await asyncio.wait_for(connect(api_key_var=variable).wait_ready(60), 5)
    assert raised.value.status == status and server.calls == [MODELS] and "s3cret" not in str(raised.value)


async def test_wait_ready_names_the_silent_endpoint(server, pool):
    server.replies[MODELS] = (503, "out of memory")
    message = rf"model 'teacher' at {server.url} was not ready after 0.2 s \(.*HTTP 503: out of memory\)"
    with pytest.raises(DeadlinePassed, match=message):
        await pool.wait_ready(0.2)


# --- going away -------------------------------------------------------------------------------------------------------


def asking(pool, what):
    return pool.generate(ModelInput([1]), {}) if what == "generate" else pool.prompt_logprobs(ModelInput([5, 7]))


async def fails(pool, what="generate"):
    with pytest.raises(EngineError):
        await asyncio.wait_for(asking(pool, what), 5)


@pytest.mark.parametrize(("what", "status"), [("generate", 500), ("prompt_logprobs", 503)])
async def test_server_error_takes_the_model_away_until_found(server, pool, what, status):
    server.replies |= {COMPLETIONS: (status, ""), MODELS: (status, "")}
    await fails(pool, what)
    assert not pool.up, "at once"
    await until(lambda: server.calls.count(MODELS) > 1)
    assert not pool.up
    server.replies[MODELS] = SERVED
    await until(lambda: pool.up)
    calls = len(server.calls)
    await asyncio.sleep(0.25)
    assert pool.up and len(server.calls) == calls, "nobody looks for what was found"


@pytest.mark.parametrize("reply", [(400, "too long"), (404, "no such model"), {"choices": []}])
async def test_request_error_does_not_take_the_model_away(server, pool, reply):
    server.replies[COMPLETIONS] = reply
    await fails(pool)
    await asyncio.sleep(0.05)
    assert pool.up and server.calls == [COMPLETIONS], "nobody looks for it"


async def test_a_model_that_stays_away_is_named_from_its_deadline_on(server, connect):
    server.replies |= {COMPLETIONS: (503, ""), MODELS: (503, "gone for good")}
    pool = connect(timeout_s=0.3)
    await fails(pool)
    with pytest.raises(DeadlinePassed, match=rf"'teacher' at {server.url} was away for 0.3 s \(.*gone for good"):
        await until(lambda: pool.up)
    for _ in range(2):  # whoever looks next hears it too
        with pytest.raises(DeadlinePassed, match=server.url):
            pool.up  # noqa: B018


async def test_another_server_of_the_same_model_goes_on(servers, connect):
    for server in servers:
        server.replies |= {COMPLETIONS: rows(None, row(_7=-1.0)), MODELS: SERVED}
    pool = connect(base_url=[server.url for server in servers])
    servers[0].replies |= {COMPLETIONS: (500, "dead"), MODELS: (500, "dead")}
    await fails(pool, "prompt_logprobs")
    assert pool.up
    for _ in range(5):
        assert await pool.prompt_logprobs(ModelInput([5, 7])) == [0.0, -1.0]


async def test_a_model_that_was_found_too_late_may_be_away_again(server, connect):
    """Whoever waits is told that it was away for too long; an answer ends that, and the next absence is a new one."""
    pool = connect(timeout_s=0.5)
    ask = functools.partial(pool.chat, {}, lambda reply: reply, waits=True)
    server.replies |= {CHAT: (503, ""), MODELS: (503, "gone")}
    with pytest.raises((EngineError, DeadlinePassed)):
        await ask()
    await asyncio.sleep(0.6)
    with pytest.raises(DeadlinePassed, match=r"was away for 0\.5 s"):
        await ask()
    server.replies |= {CHAT: {"is": "back"}, MODELS: SERVED}
    assert await ask() == {"is": "back"}
    server.replies |= {CHAT: (503, ""), MODELS: (503, "")}
    asking = asyncio.create_task(ask())
    await asyncio.sleep(0.15)
    server.replies |= {CHAT: {"is": "back"}, MODELS: SERVED}
    assert await asking == {"is": "back"}
