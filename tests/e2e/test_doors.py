"""What a real engine lets in and gives away: ports, routes, the token, weights that are not weights."""

import contextlib
import shutil
from pathlib import Path

import aiohttp
import pytest
import torch
from safetensors.torch import load_file, save_file

from prl.base.errors import EngineError
from prl.models import model_path
from prl.rollouts.inputs import ModelInput

pytestmark = pytest.mark.engine

NORM = "model.norm.weight"
UNLISTED = (
    "/prl/generate",
    "/prl/load_policy",
    "/openapi.json",
    "/docs",
    "/metrics",
    "/collective_rpc",
    "/v1/realtime",
    "/no-such-route",
)
"""Routes that the servers' own list leaves out, some of them, and one that there is not."""


def server_of(url: str, sockets) -> int:
    """The parent of the process that listens at `url`."""
    port = int(url.removesuffix("/v1").rpartition(":")[2])
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if b"prl.engines.vllm.server\0--model" in (folder / "cmdline").read_bytes() and port in dict(
                map(reversed, sockets(pid)[0])
            ):
                return pid
    raise AssertionError(f"nobody listens at {url}")


@pytest.fixture(scope="module")
def urls(engine, teacher_url):
    """Of the policy's engine, and of the teacher's."""
    return [engine.url, teacher_url.removesuffix("/v1")]


def test_engine_listens_on_loopback_alone(urls, sockets):
    for url in urls:
        tcp, unix = sockets(server_of(url, sockets))
        assert ("127.0.0.1", int(url.rpartition(":")[2])) in tcp and {host for host, _ in tcp} == {"127.0.0.1"}
        for path in unix:  # to connect takes the right to write
            assert not Path(path).stat().st_mode & 0o022 or not Path(path).parent.stat().st_mode & 0o011, path


async def test_every_route_of_a_server_wants_the_token(urls, engine):
    async with aiohttp.ClientSession() as session:
        for url in urls:
            headers = {"Authorization": f"Bearer {engine.token}"}
            async with session.get(f"{url}/openapi.json", headers=headers) as reply:
                listed = (await reply.json())["paths"]
            assert {"/health", "/inference/v1/generate", "/tokenize"} <= set(listed)
            asked = {(path, method) for path, methods in listed.items() for method in methods}
            asked |= {(path, method) for path in UNLISTED for method in ("get", "post", "put", "delete", "options")}
            for path, method in sorted(asked):
                for given in ({}, {"Authorization": "Bearer x"}, {"Authorization": f"Bearer {engine.token}x"}):
                    async with session.request(method, url + path, headers=given, json={}) as reply:
                        assert reply.status == 401, (url, method, path)
                        assert engine.token not in await reply.text()
            for path in ("/v1/realtime", "/ws"):
                with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
                    await session.ws_connect(url + path)
                assert caught.value.status in (401, 403)


async def test_a_frozen_server_takes_no_weights(urls, engine):
    headers = {"Authorization": f"Bearer {engine.token}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        async with session.post(f"{urls[1]}/prl/load_policy", json={"path": model_path("tiny")}) as reply:
            assert reply.status == 404
        async with session.post(f"{urls[1]}/collective_rpc", json={"method": "reload_weights"}) as reply:
            assert reply.status == 404


def damaged(folder: Path) -> list[Path]:
    """Folders of weights that an engine of `tiny` must not load."""
    whole = load_file(f"{model_path('tiny')}/model.safetensors")
    changes = {
        "missing": {NORM: None},
        "extra": {"model.more": torch.ones(3)},
        "shape": {NORM: torch.ones(127)},
        "truncated": {},
        "flipped": {},
        "none": {},
    }
    for name, change in changes.items():
        state = {key: value for key, value in (whole | change).items() if value is not None}
        shutil.copytree(model_path("tiny"), folder / name)
        save_file(state, folder / name / "model.safetensors", metadata={"format": "pt"})
    path = folder / "truncated" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4096])
    path = folder / "flipped" / "model.safetensors"
    path.write_bytes(b"\xff" * 16 + path.read_bytes()[16:])
    (folder / "none" / "model.safetensors").rename(folder / "none" / "pytorch_model.bin")
    (folder / "pickle").mkdir()
    torch.save(whole, folder / "pickle" / "model.safetensors")
    return [*sorted(path for path in folder.iterdir()), folder / "absent", Path("/etc"), Path("/dev/null")]


async def test_weights_that_are_refused_leave_the_engine_as_it_was(pool, engine, sockets, tmp_path):
    prompt, greedy = list(range(20, 40)), {"temperature": 0.0, "max_tokens": 8}
    server = server_of(engine.url, sockets)
    (before,) = await pool.generate(ModelInput(prompt), greedy)
    for number, folder in enumerate(damaged(tmp_path), 1):
        with pytest.raises(EngineError, match="the weights stay as they are") as caught:
            await pool.update_weights(number, str(folder))
        assert caught.value.status == 400 and "\n" not in str(caught.value), folder
        (after,) = await pool.generate(ModelInput(prompt), greedy)
        assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs), folder
    assert server_of(engine.url, sockets) == server
    await pool.update_weights(99, model_path("tiny"))
    (after,) = await pool.generate(ModelInput(prompt), greedy)
    assert after.token_ids == before.token_ids


def test_the_token_is_in_no_log_of_a_server(engine, teacher_url, server_logs):
    logs = {path.name: path.read_bytes() for path in server_logs.glob("*.log")}
    logs["printed"] = (server_logs / "teacher.printed").read_bytes()  # the engine's prints its own token
    assert {"engine.log", "teacher.log"} <= set(logs)
    assert [name for name, text in logs.items() if engine.token.encode() in text] == []
