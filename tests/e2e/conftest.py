"""One real vLLM engine with the tiny policy, shared by the end-to-end tests; each run starts a real trainer."""

import asyncio
import json
import os
import secrets
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from prl.inference.client import InferencePool
from prl.inference.config import InferenceConfig
from prl.launch.engine import start_engine
from prl.launch.processes import Supervisor
from prl.models import model_path

TINY = {"path": model_path("tiny"), "dtype": "float32", "max_model_len": 512, "trust_remote_code": False}


@dataclass
class Engine:
    url: str
    token: str


@pytest.fixture(scope="session")
def engine(tmp_path_factory):
    log = tmp_path_factory.mktemp("engine") / "inference.log"
    token = secrets.token_hex(16)
    # vLLM's own development routes, for the test that leaves the head stale; prl does without them.
    with Supervisor() as processes, pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        url, _ = start_engine(processes, InferenceConfig(), TINY, device="cpu", token=token, seed=0, log=log)

        async def ready():
            pool = InferencePool([url], "policy", token)
            try:
                await pool.wait_ready(180, processes.check)
            finally:
                await pool.close()

        asyncio.run(ready())
        yield Engine(url, token)


@pytest.fixture
async def pool(engine):
    """A client of the shared engine, which holds the base weights."""
    pool = InferencePool([engine.url], "policy", engine.token)
    await pool.update_weights(0, TINY["path"])
    yield pool
    await pool.close()


@dataclass
class Run:
    """A finished `python -m prl.train`."""

    dir: Path
    status: int
    stderr: str
    steps: list[dict] = field(default_factory=list)

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
        arguments = [f"inference.urls=[{engine.url}]", f"run.dir={tmp_path / name}", "monitor.console=plain"]
        env = {**os.environ, "PRL_TOKEN": engine.token, "OMP_NUM_THREADS": "1"}
        return [sys.executable, "-m", "prl.train", *arguments, *overrides], env

    return make


@pytest.fixture
def train(command, tmp_path):
    """Run `prl.train` to its end on the shared engine."""

    def run(*overrides: str, name: str = "run", env: dict[str, str] | None = None, timeout: float = 240) -> Run:
        argv, environment = command(*overrides, name=name)
        done = subprocess.run(
            argv, env=environment | (env or {}), cwd=tmp_path, capture_output=True, text=True, timeout=timeout
        )
        return finished(tmp_path / name, done.returncode, done.stderr)

    return run


def finished(folder: Path, status: int, stderr: str) -> Run:
    metrics = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return Run(folder, status, stderr, lines)
