"""Runs of mutated configs that were accepted: whether each trains two steps, or ends with the reason in one line."""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from config_fuzz import Case, Finding
from prl.config.schema import ModelConfig
from prl.engines.vllm.engine import VLLMConfig
from prl.launch.launcher import EngineSpec
from prl.launch.local import LocalLauncher
from prl.models import model_path

SHORT = ("max_steps=2", "orchestrator.batch_size=16", "orchestrator.eval.every=null", "monitor.console.mode=plain")
STEPS = 2
HANGS_S = 300.0
"""[s] A run that has neither trained nor ended by then hangs: on one core of two an engine alone starts in a minute."""
OF_THE_ENGINE = ("engine", "model", "launcher")
"""Keys that an engine is started with: these cases start one of their own."""
NOT_ALONE = ("teacher=endpoint", "env=jsonl", "model=hf", "sweep=")
"""Bases that do not run as they are: a server, a file or another command is missing."""
WORKED = ("trained", "refused", "failed in one line")


class Engine:
    """An engine of the tiny policy, started when it is first asked for."""

    def __init__(self, folder: Path, launcher: LocalLauncher):
        self.folder, self.launcher, self.token = folder, launcher, secrets.token_hex(16)
        self.found = ""

    @property
    def url(self) -> str:
        self.found = self.found or self.launcher.start_engine(
            EngineSpec(
                process="engine",
                served_name="policy",
                model=ModelConfig(path=model_path("tiny"), dtype="float32", max_model_len=512),
                config=VLLMConfig(),
                device="cpu",
                seed=0,
                token=self.token,
                log=self.folder / "engine.log",
            )
        )
        return self.found


@contextlib.contextmanager
def shared_engine() -> Iterator[Engine]:
    with tempfile.TemporaryDirectory(prefix="prl-fuzz-") as folder, LocalLauncher() as launcher:
        yield Engine(Path(folder), launcher)


def can_start(case: Case) -> bool:
    """Whether the case's base runs where nothing but this machine is there."""
    return not case.base[0].startswith(NOT_ALONE)


def started(case: Case, engine: Engine) -> Finding:
    """Run `prl train <base> <override>` until it has trained two steps, or has ended."""
    arguments, env = [*SHORT, *case.base, "run.dir=run"], {**os.environ, "OMP_NUM_THREADS": "1"}
    if not case.key.startswith(OF_THE_ENGINE):
        arguments.append(f"engine.urls=[{engine.url}]")
        env["PRL_TOKEN"] = engine.token
    with tempfile.TemporaryDirectory(prefix="prl-fuzz-") as top:
        folder = Path(top, "a", "b", "c")  # a run directory `../../x` is still within
        folder.mkdir(parents=True)
        command = [sys.executable, "-m", "prl.train", *arguments, case.override]
        with (folder / "said").open("w") as said:
            process = subprocess.Popen(command, cwd=folder, env=env, stdout=said, stderr=said, start_new_session=True)
        deadline = time.monotonic() + HANGS_S
        try:
            while process.poll() is None:
                if trained(Path(top)):
                    process.send_signal(signal.SIGTERM)
                    process.wait(120)
                    break
                if time.monotonic() > deadline:
                    return Finding(case, "hangs", last_lines(folder / "said"))
                time.sleep(0.2)
        except subprocess.TimeoutExpired:
            return Finding(case, "hangs", f"it does not stop: {last_lines(folder / 'said')}")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return judged(case, process.returncode, (folder / "said").read_text(errors="replace"), trained(Path(top)))


def trained(folder: Path) -> bool:
    """Whether some metrics file below `folder` has the steps."""
    return any(
        json.loads(line)["step"] >= STEPS
        for path in folder.rglob("metrics.jsonl")
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    )


def judged(case: Case, status: int, said: str, enough: bool) -> Finding:
    """What became of a run that has ended."""
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    if "Traceback" in said:
        return Finding(case, "traceback", said[said.index("Traceback") :][-600:])
    if status == 0 or (enough and status == 143):
        return Finding(case, "trained", "")
    if len(errors) == 1 and status in (1, 2):
        return Finding(case, "refused" if status == 2 else "failed in one line", errors[0])
    return Finding(case, "failed without a line", f"status {status}: {said[-600:]}")


def last_lines(path: Path) -> str:
    return path.read_text(errors="replace")[-600:]
