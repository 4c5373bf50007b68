"""Engines that die in the middle of a run: small servers in processes of their own, which a launcher starts again."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from prl.engines.client import InferencePool
from prl.errors import EngineError
from prl.launch.launcher import ProcessDied
from prl.launch.local import LocalLauncher, free_port
from prl.launch.supervisor import Supervisor
from prl.orchestrator.waiting import Waiting

SERVER = """
import json, os, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

folder, loaded = Path(sys.argv[2]), None

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.reply({}, 200 if self.headers.get("If-Match", str(os.getpid())) == str(os.getpid()) else 412)

    def do_POST(self):
        global loaded
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with (folder / "calls").open("a") as calls:
            calls.write(json.dumps([os.getpid(), self.path, body.get("path") or body.get("cache_salt")]) + chr(10))
        if self.path == "/prl/load_policy":
            while body["path"] == "/slow" and not (folder / "go").exists():
                time.sleep(0.01)
            loaded = body["path"]
            return self.reply({"loaded": loaded, "instance": str(os.getpid())})
        while not (folder / "go").exists():
            time.sleep(0.01)
        self.reply({"choices": [{"index": 0, "token_ids": [7], "logprobs": [-0.5], "finish_reason": "stop"}]})

    def reply(self, found, status=200):
        data = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass

ThreadingHTTPServer.allow_reuse_address = True
server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
(folder / "engine.pid").write_text(str(os.getpid()))
server.serve_forever()
"""


class Small(LocalLauncher):
    """Starts small servers as its engines."""

    def begin(self, folder: Path, name: str = "engine") -> str:
        self.small = {**getattr(self, "small", {}), name: (folder, free_port("127.0.0.1"))}
        self.engines[name] = None, self.small[name][1]
        self.serve(name)
        return f"http://127.0.0.1:{self.small[name][1]}"

    def serve(self, name):
        folder, port = self.small[name]
        self.start(
            name, [sys.executable, "-S", "-c", SERVER, str(port), str(folder)], env={}, log=folder / f"{name}.log"
        )

    def restart_engine(self, name):
        for process in [process for process in self.processes if process.name == name]:
            process.end()
            self.processes.remove(process)
        (self.small[name][0] / "engine.pid").unlink()
        self.serve(name)
        return True


@pytest.fixture
async def run(tmp_path):
    """A supervised engine with its client, which has loaded version 3."""
    with Small() as launcher:
        pool = InferencePool([launcher.begin(tmp_path)], "policy", "t")
        await pool.wait_ready(20)
        await pool.update_weights(3, "/w3")
        supervisor = Supervisor(launcher, said.append, {"engine": 1})
        said.clear()
        supervisor.serve(pool)
        yield supervisor
        await pool.close()


said: list[str] = []


def engine(folder):
    return int((folder / "engine.pid").read_text())


def calls(folder):
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def test_requests_that_a_dead_engine_had_are_answered_by_the_next_one_under_the_same_weights(run, tmp_path):
    async def work():
        asked = [asyncio.create_task(run.pool.generate([1, 2], {})) for _ in range(5)]
        await until(lambda: len(calls(tmp_path)) == 6)
        first = engine(tmp_path)
        os.kill(first, signal.SIGKILL)
        (tmp_path / "go").touch()
        return first, await asyncio.gather(*asked)

    first, answers = await run.guard(work())
    assert [[(c.token_ids, c.start_version) for c in answer] for answer in answers] == [[([7], 3)]] * 5
    again = [call[1:] for call in calls(tmp_path) if call[0] != first]
    assert again == [["/prl/load_policy", "/w3"]] + [["/prl/generate", "v3"]] * 5, "the weights come first"
    assert run.pool.counts == {"engine/restarts": 1, "engine/requests_reissued": 5}
    assert "process 'engine' ended with status 137 (killed by SIGKILL" in said[0] and "answers again" in said[1]


async def test_an_update_that_a_dead_engine_was_at_is_done_by_the_next_one(run, tmp_path):
    async def work():
        update = asyncio.create_task(run.pool.update_weights(4, "/slow"))
        await until(lambda: calls(tmp_path)[-1][2] == "/slow")
        first = engine(tmp_path)
        os.kill(first, signal.SIGKILL)
        (tmp_path / "go").touch()
        await update
        return first

    first = await run.guard(work())
    assert run.pool.version == 4
    assert [call[2] for call in calls(tmp_path) if call[0] != first] == ["/slow"]


async def test_a_second_death_ends_the_run_with_its_cause(run, tmp_path):
    async def work():
        asked = asyncio.create_task(run.pool.generate([1, 2], {}))
        for sent in (2, 4):  # behind the first one stand the weights
            await until(lambda sent=sent: len(calls(tmp_path)) == sent)
            os.kill(engine(tmp_path), signal.SIGKILL)
        await asked

    with pytest.raises(ProcessDied, match=r"^process 'engine' ended with status 137 \(killed by SIGKILL"):
        await run.guard(work())
    assert run.pool.counts["engine/restarts"] == 1


async def test_a_core_that_died_under_an_update_is_the_cause_and_not_the_updates_answer(tmp_path):
    """vLLM answers for seconds after its core has died, before it ends."""
    died = "sleep 2.5; echo 'prl: EngineCore (process 7) was killed by SIGKILL'"
    with LocalLauncher() as launcher:
        launcher.start("engine", ["sh", "-c", died], env={}, log=tmp_path / "engine.log")
        supervisor = Supervisor(launcher, print, {"engine": 0})
        supervisor.pool = SimpleNamespace(ailing=False, servers=[], urls=[])

        async def update():
            raise EngineError('/prl/load_policy answered HTTP 500: {"error": "EngineDeadError: see above"}', 500)

        with pytest.raises(ProcessDied, match=r"EngineCore \(process 7\) was killed by SIGKILL"):
            await supervisor.guard(update())


async def test_an_engine_may_not_be_started_again_before_the_run_has_begun(tmp_path):
    with Small() as launcher:
        launcher.begin(tmp_path)
        supervisor = Supervisor(launcher, said.append, {"engine": 1})
        [process] = launcher.processes
        os.killpg(process.pid, signal.SIGKILL)
        with pytest.raises(ProcessDied, match="'engine' ended with status 137"):
            await supervisor.guard(asyncio.sleep(20))


# --- several engines --------------------------------------------------------------------------------------------------


@pytest.fixture
async def pair(tmp_path):
    """Two supervised engines with their client, which have loaded version 3, and their folders."""
    folders = [tmp_path / "1", tmp_path / "2"]
    for folder in folders:
        folder.mkdir()
    with Small() as launcher:
        names = ("engine", "engine 2")
        pool = InferencePool([launcher.begin(*each) for each in zip(folders, names, strict=True)], "policy", "t")
        await pool.wait_ready(20)
        await pool.update_weights(3, "/w3")
        supervisor = Supervisor(launcher, said.append, dict.fromkeys(names, 1))
        said.clear()
        supervisor.serve(pool)
        yield supervisor, folders
        await pool.close()


async def test_while_one_of_two_is_started_again_the_other_has_its_requests_and_the_updates(pair):
    run, (first, second) = pair

    async def work():
        asked = [asyncio.create_task(run.pool.generate([1, 2], {})) for _ in range(6)]
        await until(lambda: len(calls(first)) == len(calls(second)) == 4)  # with the weights
        dead = engine(first)
        os.kill(dead, signal.SIGKILL)
        await until(lambda: len(calls(second)) == 7)
        (second / "go").touch()
        await asyncio.gather(*asked)
        await run.pool.update_weights(4, "/w4")
        assert run.pool.version == 4
        (first / "go").touch()
        await until(lambda: run.pool.servers[0].open)
        return dead, await asyncio.gather(*(run.pool.generate([1, 2], {}) for _ in range(20)))

    dead, answers = await run.guard(work())
    assert {c.start_version for [c] in answers} == {4}
    again = [call[1:] for call in calls(first) if call[0] != dead]
    loads = [path for route, path in again if route == "/prl/load_policy"]
    assert loads[-1] == "/w4" and again[0][0] == "/prl/load_policy"
    assert run.pool.counts == {"engine/restarts": 1, "engine/requests_reissued": 3}
    assert [run.restarts[name] for name in ("engine", "engine 2")] == [0, 1], "each has its own"


# --- who waits for whom -----------------------------------------------------------------------------------------------


async def test_after_a_while_without_progress_it_is_said_once_who_waits_for_whom(monkeypatch):
    monkeypatch.setattr("prl.launch.supervisor.QUIET_S", 0.3)
    lines, done = [], []
    with LocalLauncher() as launcher:
        supervisor = Supervisor(launcher, lines.append)
        with supervisor.awaiting("the trainer to load the model", ["trainer"]):
            await supervisor.guard(asyncio.sleep(1.5))
        assert len(lines) == 1 and "the start waits for the trainer to load the model" in lines[0]
        lines.clear()
        supervisor.waiting = lambda: Waiting("the orchestrator waits for the trainer", len(done))

        async def work():
            for _ in range(10):
                await asyncio.sleep(0.1)
                done.append("a step")
            assert lines == [], "it goes on"
            await asyncio.sleep(1.5)
            assert len(lines) == 1 and "the orchestrator waits for the trainer" in lines[0]
            done.append("a step")
            await asyncio.sleep(1.5)
            assert len(lines) == 2

        await supervisor.guard(work())
