"""sft from sources that give no token ids: a vLLM behind a gateway that passes chat messages alone, and a file."""

import asyncio
import json
import threading

import aiohttp
import pytest
from aiohttp import web

OUT = web.AppKey("out", aiohttp.ClientSession)
PASSED = ("/v1/models", "/v1/chat/completions")
BRIEF = ("trainer.token_export=true", "orchestrator.eval.every=null", "orchestrator.group_size=1")


@pytest.fixture
def gateway(teacher_url):
    """The URL of a server that passes two routes on to the shared teacher, and refuses all others."""

    async def forward(request):
        if request.path not in PASSED:
            return web.Response(status=404, text="no such route")
        url, body = teacher_url.removesuffix("/v1") + request.path, await request.read()
        headers = {"Authorization": request.headers["Authorization"], "Content-Type": "application/json"}
        async with request.app[OUT].request(request.method, url, data=body or None, headers=headers) as reply:
            return web.Response(status=reply.status, body=await reply.read(), content_type="application/json")

    ready, found = threading.Event(), {}

    async def serve():
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", forward)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as app[OUT]:
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            found.update(port=runner.addresses[0][1], loop=asyncio.get_running_loop(), stop=asyncio.Event())
            ready.set()
            await found["stop"].wait()
            await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(10)
    yield f"http://127.0.0.1:{found['port']}/v1"
    found["loop"].call_soon_threadsafe(found["stop"].set)
    thread.join(10)


def trained_texts(run, tokenizer, step=1):
    """What the tokens say that feed `ce`, of each sequence."""
    return [
        tokenizer.decode([t for t, fate in zip(line["token_ids"], line["fate"], strict=True) if fate == "ce"])
        for line in run.tokens(step)
    ]


@pytest.mark.engine
def test_sft_from_a_chat_endpoint_trains_on_its_text_in_the_policys_template(train, gateway, tokenizer):
    run = train(
        "algo=sft",
        "max_steps=8",
        "teacher=endpoint",
        "teacher.name=tiny-teacher",
        "teacher.api_key_var=PRL_TOKEN",
        f"teacher.base_url={gateway}",
        *BRIEF,
    )
    assert run.status == 0, run.stderr
    assert "samples from 'tiny-teacher' by chat messages" in (run.dir / "logs" / "orchestrator.log").read_text()
    assert min(run.column("reward/all/mean")) > 0.8, "the teacher's"
    assert run.column("nll")[-1] < run.column("nll")[0] - 0.1
    texts = trained_texts(run, tokenizer)
    replies = {record["messages"][-1]["content"] for record in run.rollouts(1)}
    assert len(texts) > 100
    for text in texts:
        assert text.startswith("<think>\n\n</think>\n\n") and text.endswith("<|im_end|>")
        assert text.rpartition("\n")[2].removesuffix("<|im_end|>") in replies


@pytest.mark.slow
def test_sft_on_demonstrations_of_a_file_asks_no_model(inline, tokenizer, tmp_path):
    path = tmp_path / "sums.jsonl"
    pairs = [(a, b) for a in range(20) for b in range(20)]
    rows = [{"q": f"{a}+{b}=", "a": a + b, "how": f"{a + b}"} for a, b in pairs]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    env = ["path=" + str(path), "prompt_key=q", "answer_key=a", "demonstration_key=how", "grader=numeric"]
    run = inline(
        "algo=sft",
        "algo.sampling.source=demonstrations",
        "env=jsonl",
        *(f"envs.jsonl.args.{setting}" for setting in env),
        "max_steps=8",
        *BRIEF,
    )
    assert run.status == 0, run.stderr
    assert set(run.column("reward/all/mean")) == {1.0}
    assert run.column("nll")[-1] < run.column("nll")[0] - 0.1
    answers = {f"<think>\n\n</think>\n\n{row['a']}<|im_end|>" for row in rows}
    texts = trained_texts(run, tokenizer)
    assert len(texts) > 100 and set(texts) <= answers
    assert {record["start_version"] for record in run.rollouts(8)} == {None}
    assert not list((run.dir / "logs").glob("teacher*"))
