"""Two real vLLM servers, the tiny policy and its teacher, for tests of whole runs; each run starts a real trainer."""

import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path

import pytest

from prl.config.environment import model_environment
from prl.config.schema import ModelConfig
from prl.engines.client import InferencePool
from prl.engines.vllm.engine import VLLMConfig
from prl.launch.launcher import EngineSpec
from prl.launch.local import LocalLauncher
from prl.models import model_path

TINY = ModelConfig(path=model_path("tiny"), dtype="float32", max_model_len=512)


@dataclass
class Engine:
    url: str
    token: str


@pytest.fixture(scope="session")
def engine_launcher():
    with LocalLauncher() as launcher:
        yield launcher


@pytest.fixture(scope="session")
def server_logs(tmp_path_factory):
    return tmp_path_factory.mktemp("servers")


def policy_spec(token: str, log: Path) -> EngineSpec:
    """What a server of the tiny policy is started with."""
    return EngineSpec(
        process="engine",
        served_name="policy",
        model=TINY,
        config=VLLMConfig(),
        device="cpu",
        seed=0,
        token=token,
        log=log,
    )


def serve(launcher: LocalLauncher, logs: Path, name: str, *options: str, token: str = "") -> str:
    """Start `python -m prl.serve` with a server log of that name. Returns what it prints once it serves."""
    printed = logs / f"{name}.printed"
    # torch would keep it among the temporary files of this launcher's processes, and compile all of it each time.
    compiled = {"TORCHINDUCTOR_CACHE_DIR": model_environment(TINY, 1)["TORCHINDUCTOR_CACHE_DIR"]}
    env = {"PRL_TOKEN": token, "OMP_NUM_THREADS": "1", **compiled}
    command = [sys.executable, "-m", "prl.serve", *options, "engine.port=null", f"log={logs}/{name}.log"]
    launcher.start(name, command, env=env, log=printed)
    deadline = time.monotonic() + 240
    while "Ctrl-C ends it." not in (text := printed.read_text()):
        launcher.ensure_alive()
        assert time.monotonic() < deadline, text
        time.sleep(0.1)
    return text


@pytest.fixture(scope="session")
def engine(engine_launcher, server_logs, forks):
    """An engine for runs, with the address and token that it prints. Its tests share a worker (`tests/conftest.py`)."""
    printed = serve(engine_launcher, server_logs, "engine", "policy=true", "model=tiny")
    [token] = re.findall(r"^  export PRL_TOKEN=(\S+)$", printed, re.M)
    [url] = re.findall(r"^  python -m prl\.train model=tiny engine\.urls=\[(http://\S+)\]$", printed, re.M)
    return Engine(url, token)


@pytest.fixture(scope="session")
def teacher_url(engine, engine_launcher, server_logs):
    """Where the teacher is served, with the engine's token."""
    printed = serve(engine_launcher, server_logs, "teacher", "model=tiny-teacher", token=engine.token)
    [url] = re.findall(r"tiny-teacher is served at (http://\S+/v1)\.", printed)
    return url


@pytest.fixture
async def pool(engine):
    """A client of the shared engine, which holds the base weights."""
    pool = InferencePool([engine.url], "policy", engine.token)
    await pool.update_weights(0, TINY.path)
    yield pool
    await pool.close()


@dataclass
class Run:
    """A finished `python -m prl.train`."""

    dir: Path
    status: int
    stderr: str
    steps: list[dict] = field(default_factory=list)

    def tokens(self, step: int) -> list[dict]:
        """What was exported of a step's sequences."""
        paths = (self.dir / "tokens" / f"step_{step:06d}").glob("rank_*.jsonl")
        return [json.loads(line) for path in sorted(paths) for line in path.read_text().splitlines()]

    @property
    def result(self) -> dict:
        return json.loads((self.dir / "result.json").read_text())

    def column(self, key: str) -> list[float]:
        return [line[key] for line in self.steps if line["step"] > 0]

    def rollouts(self, step: int) -> list[dict]:
        path = self.dir / "rollouts" / f"step_{step:06d}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def command(engine, tmp_path):
    """The command line and environment of a run on the shared engine."""

    def make(*overrides: str, name: str = "run") -> tuple[list[str], dict[str, str]]:
        arguments = [f"engine.urls=[{engine.url}]", f"run.dir={tmp_path / name}", "monitor.console.mode=plain"]
        env = {**os.environ, "PRL_TOKEN": engine.token, "OMP_NUM_THREADS": "1"}
        return [sys.executable, "-m", "prl.train", *arguments, *overrides], env

    return make


IMPORTED = ["prl.launch.builder", "transformers.models.auto.tokenization_auto", "prl.tools.report.page"]
AS_A_COMMAND = """
import os, runpy, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
os.environ.clear()
os.environ.update(env)
os.chdir(folder)
for number, path in enumerate((stdin, stdout, stderr)):
    if path:
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC * bool(number)), number)
sys.stdin = open(0)
sys.path[:0] = [folder, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
sys.argv = [module, *arguments]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="session")
def forks():
    """Processes forked from one that has imported what takes seconds: all else of them is a command's own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    forkserver.ensure_running()  # it imports while the engines start
    return context


def started(forks, given: dict):
    """A process that is `python -m prl.train`, with the arguments, environment, folder and stderr in `given`."""
    process = forks.Process(
        target=exec, args=(AS_A_COMMAND, {"module": "prl.train", "stdin": "", "stdout": "", **given})
    )
    process.start()
    return process


@pytest.fixture
def run_command(forks, tmp_path_factory):
    """`run_command(folder, module, *arguments)`: `python -m <module> <arguments>` in a folder, to its end."""

    def run(
        folder: Path, module: str, *arguments: str, typed: str = "", timeout: float = 100.0
    ) -> subprocess.CompletedProcess[str]:
        said = tmp_path_factory.mktemp("said")
        (said / "stdin").write_text(typed)
        given = {
            "module": module,
            "arguments": list(arguments),
            "env": {**os.environ, "OMP_NUM_THREADS": "1"},
            "folder": str(folder),
            **{name: str(said / name) for name in ("stdin", "stdout", "stderr")},
        }
        process = forks.Process(target=exec, args=(AS_A_COMMAND, given))
        process.start()
        process.join(timeout)
        texts = [(said / name).read_text() for name in ("stdout", "stderr")]
        if process.is_alive():
            process.kill()
            pytest.fail(f"{module} {' '.join(arguments)} had not ended after {timeout:g} s:\n{texts[1]}")
        return subprocess.CompletedProcess([module, *arguments], process.exitcode, *texts)

    return run


@pytest.fixture
def begin(command, forks, tmp_path):
    """Begin `python -m prl.train` on the shared engine, in a process that has imported libraries already."""
    begun = []

    def run(*overrides: str, name: str = "run", env: dict[str, str] | None = None):
        (_, _, _, *arguments), environment = command(*overrides, name=name)
        given = {
            "arguments": arguments,
            "env": environment | (env or {}),
            "folder": str(tmp_path),
            "stderr": str(tmp_path / f"{name}.stderr"),
        }
        begun.append(started(forks, given))
        return begun[-1]

    yield run
    for process in begun:
        process.kill()


@pytest.fixture
def train(begin, tmp_path):
    """Run `python -m prl.train` to its end on the shared engine."""

    def run(*overrides: str, name: str = "run", env: dict[str, str] | None = None, timeout: float = 240) -> Run:
        process, stderr = begin(*overrides, name=name, env=env), tmp_path / f"{name}.stderr"
        process.join(timeout)
        if process.is_alive():
            process.kill()
            pytest.fail(f"prl.train {' '.join(overrides)} had not ended after {timeout:g} s:\n{stderr.read_text()}")
        return finished(tmp_path / name, process.exitcode, stderr.read_text())

    return run


def finished(folder: Path, status: int, stderr: str) -> Run:
    metrics = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return Run(folder, status, stderr, lines)


@pytest.fixture
def exchanges():
    """`exchanges(run_dir)`: the prompts and replies of the first step, in the order of their groups."""

    def read(run_dir: Path) -> list[tuple[int | str, ...]]:
        records = map(json.loads, (run_dir / "rollouts" / "step_000001.jsonl").read_text().splitlines())
        return sorted((record["group"], *(each["content"] for each in record["messages"][:2])) for record in records)

    return read
