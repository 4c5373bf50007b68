"""`POST /prl/generate` on a real engine: the replies of vLLM's own route, and what it refuses."""

import json

import aiohttp
import pytest

from prl.engines.protocol import GENERATE

pytestmark = pytest.mark.engine

RAW = "/inference/v1/generate"
PROMPT = list(range(20, 40))
SAMPLINGS = [
    {"temperature": 1.0, "seed": 3, "max_tokens": 12, "n": 4},
    {"temperature": 0.0, "max_tokens": 6},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "seed": 5, "max_tokens": 12, "n": 2},
    {"temperature": 1.0, "seed": 7, "stop_token_ids": [3, 4, 5, 6, 7, 8], "max_tokens": 40, "n": 8},
    {"temperature": 1.0, "seed": 9, "stop": ["1", "2"], "detokenize": True, "max_tokens": 40, "n": 4},
    {"temperature": 1.0, "seed": 11, "repetition_penalty": 1.3, "presence_penalty": 0.5, "max_tokens": 8},
]


@pytest.fixture
async def post(engine, pool):
    """`post(route, body)`: status and decoded reply; the engine holds the base weights."""
    headers = {"Authorization": f"Bearer {engine.token}"}
    async with aiohttp.ClientSession(engine.url, headers=headers) as session:

        async def send(route, body):
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            async with session.post(route, data=data, headers={"Content-Type": "application/json"}) as reply:
                return reply.status, json.loads(await reply.read() or b"null")

        yield send


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_replies_are_those_of_vllms_own_route_bit_by_bit(post, sampling):
    common = {"model": "policy", "token_ids": PROMPT, "cache_salt": "v0"}
    status, ours = await post(GENERATE, common | {"sampling": {"detokenize": False} | sampling})
    assert status == 200
    raw = {"sampling_params": sampling | {"logprobs": 1}, "return_token_ids": True}
    _, theirs = await post(RAW, common | raw)
    assert ours["prompt_token_ids"] == theirs["prompt_token_ids"] == PROMPT
    by_index = sorted(ours["choices"], key=lambda choice: choice["index"])
    assert len(by_index) == sampling.get("n", 1)
    assert by_index == [
        {name: choice[name] for name in ("index", "token_ids", "finish_reason")}
        | {"logprobs": [entry["logprob"] for entry in choice["logprobs"]["content"]]}
        for choice in sorted(theirs["choices"], key=lambda choice: choice["index"])
    ]


REFUSED = [
    (b"{", 400, "no request to sample"),
    (b'{"model": "policy", "token_ids": "ab", "sampling": {}}', 400, "Expected `array`"),
    (b'{"model": "policy", "token_ids": [1.5], "sampling": {}}', 400, "Expected `int`"),
    ({"model": "policy", "token_ids": PROMPT, "sampling": {}, "what": 1}, 400, "unknown field `what`"),
    ({"model": "another", "token_ids": PROMPT, "sampling": {}}, 404, "the model 'another' is not served here"),
    ({"model": "policy", "token_ids": [], "sampling": {}}, 400, "empty"),
    ({"model": "policy", "token_ids": [5] * 5000, "sampling": {}}, 400, "5000"),
    ({"model": "policy", "token_ids": [10**6], "sampling": {"max_tokens": 2}}, 400, "1000000"),
    ({"model": "policy", "token_ids": [-3], "sampling": {"max_tokens": 2}}, 400, "-3"),
    ({"model": "policy", "token_ids": PROMPT, "sampling": {"temprature": 1.0}}, 400, "temprature"),
    ({"model": "policy", "token_ids": PROMPT, "sampling": {"temperature": "hot"}}, 400, "temperature"),
    ({"model": "policy", "token_ids": PROMPT, "sampling": {"top_p": 7}}, 400, "top_p"),
    ({"model": "policy", "token_ids": PROMPT, "sampling": {"n": 0}}, 400, "n must be"),
    ({"model": "policy", "token_ids": PROMPT, "sampling": {"n": "many"}}, 400, "n"),
]


@pytest.mark.parametrize(("body", "status", "reason"), REFUSED)
async def test_what_cannot_be_sampled_is_refused_and_the_engine_lives(post, body, status, reason):
    found, reply = await post(GENERATE, body)
    assert (found, reason in json.dumps(reply)) == (status, True), reply
    assert (await post(GENERATE, {"model": "policy", "token_ids": PROMPT, "sampling": {"max_tokens": 1}}))[0] == 200
