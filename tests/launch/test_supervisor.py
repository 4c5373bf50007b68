"""Engines that die in the middle of a run: small servers in processes of their own, which a launcher starts again."""

import asyncio
import functools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from patience import patient

from prl.errors import EngineError, PrlError
from prl.inference.client import InferencePool
from prl.launch.launcher import ProcessDied
from prl.launch.local import LocalLauncher, free_port
from prl.launch.supervisor import Supervisor
from prl.orchestrator.waiting import Waiting, busy_engines
from prl.owner import identity
from prl.reaper import stat
from prl.train import tend
from prl.wire.files import FileTransport

SERVER = """
import json, os, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

folder, loaded = Path(sys.argv[2]), None

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.reply({})

    def do_POST(self):
        global loaded
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with (folder / "calls").open("a") as calls:
            calls.write(json.dumps([os.getpid(), self.path, body.get("path") or body.get("cache_salt")]) + chr(10))
        if self.path == "/prl/load_policy":
            while body["path"] == "/slow" and not (folder / "go").exists():
                time.sleep(0.01)
            loaded = body["path"]
            return self.reply({"loaded": loaded})
        while not (folder / "go").exists():
            time.sleep(0.01)
        self.reply({"choices": [{"index": 0, "token_ids": [7], "logprobs": [-0.5], "finish_reason": "stop"}]})

    def reply(self, found):
        data = json.dumps(found).encode()
        self.send_response(200)
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

    def begin(self, folder: Path, name: str = "inference") -> str:
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
        self.drop_engine(name)
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
        supervisor = Supervisor(launcher, said.append, {"inference": 1})
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


async def test_an_env_whose_graders_cannot_be_forked_any_more_ends_the_run(tmp_path):
    causes = [None, None, "process 7, which the graders of env 'mine' are forked from, was killed by SIGTERM"]
    env = SimpleNamespace(cause_of_end=lambda: causes.pop(0), workers=None)
    with Small() as launcher, pytest.raises(ProcessDied, match="graders of env 'mine'"):
        await Supervisor(launcher, said.append, environments=[env]).guard(asyncio.sleep(30))
    assert not causes


async def test_graders_whose_process_is_stopped_are_named_and_end_the_run(tmp_path):
    with subprocess.Popen(["sleep", "60"]) as template:  # noqa: ASYNC220
        env = SimpleNamespace(name="math", cause_of_end=lambda: None, workers=SimpleNamespace(template=template.pid))
        os.kill(template.pid, signal.SIGSTOP)
        try:
            with Small(stopped_timeout_s=2.0) as launcher, pytest.raises(ProcessDied) as ended:
                supervisor = Supervisor(launcher, said.append, environments=[env])
                supervisor.waiting = lambda: Waiting("the orchestrator waits for graders", (), None, 60.0)
                await supervisor.guard(asyncio.sleep(30))
        finally:
            template.kill()
    assert re.match(
        rf"process 'graders of env math' was stopped for \d s \(.*process {template.pid}, state T", str(ended.value)
    )


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
    assert "process 'inference' ended with status 137 (killed by SIGKILL" in said[0] and "answers again" in said[1]


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

    with pytest.raises(ProcessDied, match=r"^process 'inference' ended with status 137 \(killed by SIGKILL"):
        await run.guard(work())
    assert run.pool.counts["engine/restarts"] == 1


async def test_a_core_that_died_under_an_update_is_the_cause_and_not_the_updates_answer(tmp_path):
    """vLLM answers for seconds after its core has died, before it ends."""
    died = "sleep 2.5; echo 'prl: EngineCore (process 7) was killed by SIGKILL'"
    with LocalLauncher() as launcher:
        launcher.start("inference", ["sh", "-c", died], env={}, log=tmp_path / "inference.log")
        supervisor = Supervisor(launcher, print)
        supervisor.pool = SimpleNamespace(ailing=False, servers=[], urls=[])

        async def update():
            raise EngineError('/prl/load_policy answered HTTP 500: {"error": "EngineDeadError: see above"}', 500)

        with pytest.raises(ProcessDied, match=r"EngineCore \(process 7\) was killed by SIGKILL"):
            await supervisor.guard(update())


async def test_a_failed_request_of_an_engine_that_lives_is_an_error_at_once(servers):
    [server, _] = servers
    server.replies |= {"/health": {}, "/prl/generate": (500, "no")}
    pool = InferencePool([server.url], "policy", "t")
    pool.servers[0].restartable = True
    try:
        with pytest.raises(Exception, match="HTTP 500: no"):
            await asyncio.wait_for(pool.generate([1], {}), patient(2))
        assert server.calls.count("/prl/generate") == 1
    finally:
        await pool.close()


async def test_an_engine_may_not_be_started_again_before_the_run_has_begun(tmp_path):
    with Small() as launcher:
        launcher.begin(tmp_path)
        supervisor = Supervisor(launcher, said.append, {"inference": 1})
        [process] = launcher.processes
        os.killpg(process.pid, signal.SIGKILL)
        with pytest.raises(ProcessDied, match="'inference' ended with status 137"):
            await supervisor.guard(asyncio.sleep(20))


# --- several engines --------------------------------------------------------------------------------------------------


@pytest.fixture
async def pair(tmp_path):
    """Two supervised engines with their client, which have loaded version 3, and their folders."""
    folders = [tmp_path / "1", tmp_path / "2"]
    for folder in folders:
        folder.mkdir()
    with Small() as launcher:
        names = ("inference", "inference 2")
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
    assert [run.restarts[name] for name in ("inference", "inference 2")] == [0, 1], "each has its own"
    assert [server.restartable for server in run.pool.servers] == [False, True]


async def test_a_run_may_finish_while_one_of_two_is_started_again(pair):
    run, (first, _) = pair

    async def work():
        os.kill(engine(first), signal.SIGKILL)
        await until(lambda: run._reviving)
        return "trained"

    assert await run.guard(work()) == "trained"
    run.finishing(20)
    assert await run.guard(asyncio.sleep(0.3, "finished")) == "finished"


async def test_both_of_two_are_started_again_at_the_same_time(pair):
    run, folders = pair

    async def work():
        asked = [asyncio.create_task(run.pool.generate([1, 2], {})) for _ in range(6)]
        await until(lambda: all(len(calls(folder)) == 4 for folder in folders))
        for folder in folders:
            os.kill(engine(folder), signal.SIGKILL)
            (folder / "go").touch()
        return await asyncio.gather(*asked)

    answers = await run.guard(work())
    assert [(c.token_ids, c.start_version) for [c] in answers] == [([7], 3)] * 6
    assert run.pool.counts["engine/restarts"] == 2
    assert any("process 'inference 2' ended with status 137" in line for line in said)


async def test_a_run_goes_on_with_one_of_two_when_the_other_dies_more_often_than_it_may(pair, caplog):
    """It is killed while it is started again: its requests, and all updates, are for the other alone."""
    run, (first, second) = pair

    async def work():
        asked = [asyncio.create_task(run.pool.generate([1, 2], {})) for _ in range(6)]
        await until(lambda: len(calls(first)) == len(calls(second)) == 4)  # with the weights
        os.kill(engine(first), signal.SIGKILL)
        await until(lambda: any("It is started again" in line for line in said) and (first / "engine.pid").exists())
        os.kill(dead := engine(first), signal.SIGKILL)
        await until(lambda: run.pool.servers[0].gone)
        (second / "go").touch()
        answers = await asyncio.gather(*asked)
        await asyncio.wait_for(run.pool.update_weights(4, "/w4"), patient(5))
        return dead, answers + await asyncio.gather(*(run.pool.generate([1, 2], {}) for _ in range(20)))

    dead, answers = await run.guard(work())
    assert [c.start_version for [c] in answers] == [3] * 6 + [4] * 20
    assert [call for call in calls(first) if call[0] == dead] == [], "nothing was asked of it again"
    assert run.pool.version == 4 and run.pool.counts["engine/restarts"] == 1
    assert run.restarts == {"inference 2": 1} and not run._reviving
    [warning] = [record.getMessage() for record in caplog.records if "goes on without it" in record.getMessage()]
    assert warning.startswith("process 'inference' ended with status 137 (killed by SIGKILL")
    assert "It was being started again: process 'inference' ended" in warning and warning.endswith(", with inference 2")
    assert [each.name for each in run.launcher.conditions()] == ["inference 2"]


async def test_a_run_goes_on_without_an_engine_that_cannot_load_the_weights_when_it_is_started_again(
    pair, monkeypatch, caplog
):
    run, (first, _) = pair

    async def fail(url, timeout_s):
        raise EngineError(f"{url} lost its connection")

    monkeypatch.setattr(run.pool, "revive", fail)

    async def work():
        os.kill(engine(first), signal.SIGKILL)
        await until(lambda: run.pool.servers[0].gone)

    await run.guard(work())
    assert "process 'inference' was started again: http://" in caplog.text and "with inference 2" in caplog.text
    assert [each.name for each in run.launcher.conditions()] == ["inference 2"]


async def test_the_last_log_lines_of_an_engine_that_the_run_gives_up_are_said(pair, caplog):
    run, (first, _) = pair
    run.restarts["inference"] = 0
    (first / "inference.log").write_text("out of memory\n")

    async def work():
        os.kill(engine(first), signal.SIGKILL)
        await until(lambda: run.pool.servers[0].gone)

    await run.guard(work())
    assert "out of memory" in caplog.text and "The run goes on without it, with inference 2" in caplog.text


@pytest.mark.parametrize("restarts", [1, 0])
async def test_the_requests_of_a_stopped_engine_go_to_another_although_the_run_goes_on(pair, monkeypatch, restarts):
    monkeypatch.setattr("prl.launch.supervisor.STOPPED_LOOK_S", 0.2)
    run, (first, second) = pair
    run.launcher.stopped_timeout_s, run.restarts["inference"] = 0.6, restarts
    run.waiting = lambda: Waiting("it goes on", (), object(), 60.0)
    (second / "go").touch()

    async def work():
        asked = [asyncio.create_task(run.pool.generate([1, 2], {})) for _ in range(6)]
        await until(lambda: len(calls(first)) == 4)
        os.kill(stopped := engine(first), signal.SIGSTOP)
        await until(lambda: not stat(stopped))
        (first / "go").touch()  # for the one in its place, which may be there before they are sent again
        answers = await asyncio.wait_for(asyncio.gather(*asked), patient(20))
        await until(lambda: run.pool.servers[0].gone or run.pool.counts["engine/restarts"])
        return answers

    assert [(c.token_ids, c.start_version) for [c] in await run.guard(work())] == [([7], 3)] * 6
    if not restarts:  # else the small server in its place may answer what the client's connection sends once more
        assert run.pool.counts["engine/requests_reissued"] == 3 and len(calls(second)) == 1 + 6
    assert run.pool.counts["engine/restarts"] == restarts and run.pool.servers[0].gone is not bool(restarts)


async def test_an_engine_that_is_stopped_for_a_moment_or_has_no_other_is_left_alone(pair, monkeypatch):
    monkeypatch.setattr("prl.launch.supervisor.STOPPED_LOOK_S", 0.1)
    run, (first, _) = pair
    run.launcher.stopped_timeout_s = 0.8
    run.waiting = lambda: Waiting("it goes on", (), object(), 60.0)

    async def moments():
        for _ in range(3):
            os.kill(engine(first), signal.SIGSTOP)
            await asyncio.sleep(0.5)
            os.kill(engine(first), signal.SIGCONT)
            await asyncio.sleep(0.5)
        del run.restarts["inference 2"]
        os.kill(engine(first), signal.SIGSTOP)
        await asyncio.sleep(1.5)

    await run.guard(moments())
    assert run.pool.counts["engine/restarts"] == 0 and not run.pool.servers[0].gone


async def test_the_last_engine_of_several_ends_the_run_when_it_dies(pair):
    run, folders = pair
    run.restarts |= dict.fromkeys(run.restarts, 0)

    async def work():
        asked = asyncio.create_task(run.pool.generate([1, 2], {}))
        for folder, server in zip(folders, run.pool.servers, strict=True):
            os.kill(engine(folder), signal.SIGKILL)
            await until(lambda server=server: server.gone)
        await asked

    with pytest.raises(ProcessDied, match=r"^process 'inference 2' ended with status 137 \(killed by SIGKILL"):
        await run.guard(work())


async def test_an_engine_that_cannot_be_started_again_costs_the_run_its_requests_alone(pair, monkeypatch, caplog):
    run, (first, second) = pair
    (second / "go").touch()

    def refuse(name):
        assert run.launcher.drop_engine(name)  # as the launcher does before it looks for its port
        raise PrlError("cannot listen on 127.0.0.1: Address already in use")

    monkeypatch.setattr(run.launcher, "restart_engine", refuse)

    async def work():
        os.kill(engine(first), signal.SIGKILL)
        await until(lambda: run.pool.servers[0].gone)
        return await run.pool.generate([1, 2], {})

    [answer] = await run.guard(work())
    assert answer.token_ids == [7] and "It cannot be started again: cannot listen on" in caplog.text


@pytest.mark.parametrize(("teachers", "lives"), [(2, True), (1, False)])
async def test_a_teacher_that_dies_for_good_ends_the_run_unless_there_is_another(run, tmp_path, teachers, lives):
    names = ["teacher", "teacher 2"][:teachers]
    for name in names:
        (tmp_path / name).mkdir()
        run.launcher.begin(tmp_path / name, name)
    pids = [tmp_path / name / "engine.pid" for name in names]
    await until(lambda: all(pid.exists() and pid.read_text() for pid in pids))
    run.restarts |= dict.fromkeys(names, 0)

    async def work():
        os.kill(engine(tmp_path / "teacher"), signal.SIGKILL)
        await until(lambda: "teacher" not in run.restarts)

    if lives:
        return await run.guard(work())
    with pytest.raises(ProcessDied, match="^process 'teacher' ended with status 137"):
        await run.guard(work())


async def test_an_idle_engine_is_not_taken_for_one_that_hangs(pair):
    """The run waits for the second alone: that the first sleeps is no sign of anything."""
    run, (first, _) = pair
    run.waiting = lambda: Waiting("it waits", busy_engines(run.pool), None, 0.5)
    (first / "go").touch()

    async def work():
        (run.pool.servers[0]).failed()  # avoided
        await run.pool.generate([1, 2], {})

    with pytest.raises(ProcessDied, match=r"process 'inference 2' has slept for \d s while it waits"):
        run.restarts = {}
        await run.guard(work())


# --- the end of a run -------------------------------------------------------------------------------------------------


async def test_a_run_directory_that_is_moved_while_the_last_checkpoint_is_written_is_said(tmp_path):
    (folder := tmp_path / "run").mkdir()
    said.clear()
    with Small() as launcher:
        supervisor = Supervisor(launcher, said.append)
        supervisor.check = functools.partial(tend, FileTransport(folder), folder, identity(folder))
        launcher.start("trainer", ["sleep", "60"], env={}, log=tmp_path / "trainer.log").may_finish = True
        await supervisor.last_checkpoint(lambda: folder.rename(tmp_path / "elsewhere"), 10)
    assert "was removed or moved" in said[-1]
