"""A run in one directory that is broken again and again, and goes on each time."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import yaml
from run_processes import command_line, family, left_in, running, scratch_of, wait_until
from safetensors import safe_open

SUPPORT = Path(__file__).parent
PHASED = (
    f"hydra.searchpath=[file://{SUPPORT / 'phased_conf'}]",
    "env=phased",
    "trainer.schedule._target_=phases.Steady",
    "+filters.post_batch.packing={_target_: phased_env.Packing}",
    "orchestrator.batch_size=32",
    "orchestrator.eval.every=null",
    "checkpoint.every=5",
    "monitor.console.mode=plain",
    "max_steps=100000",
    "run.resume=auto",
)
"""Overrides of a run whose phases can be seen from outside."""
NOTICED = re.compile(r"process '|stopping|error:|no progress|is started again")
MODULES = {
    "trainer": "-m prl.trainer",
    "engine": "--served-model-name policy",
    "teacher": "--served-model-name teacher",
}
"""Words in the command line of each kind of process."""
STEP = re.compile(r"^\d\S*  step (\d+)/", re.M)
SETTLED_S = 2.0
"""Steps that were under way when something broke come this long after it, seconds."""
HANGS_S = 240.0


@dataclass
class Broken:
    """What came of a fault."""

    happened: str
    noticed_s: float | None
    ended: bool
    said: str
    """What the terminal said from the fault on."""


class PhasedRun:
    """One run directory, and the command that goes on in it as often as it ended."""

    def __init__(self, folder: Path, *overrides: str, env: dict[str, str]):
        self.folder, self.dir, self.phases = folder, folder / "run", folder / "phases"
        self.phases.mkdir(parents=True)
        self.argv = [sys.executable, "-m", "prl.train", f"run.dir={self.dir}", *PHASED, *overrides]
        path = os.pathsep.join(filter(None, (str(SUPPORT), os.environ.get("PYTHONPATH"))))
        self.env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PRL_PHASES": str(self.phases), **env}
        self.process: subprocess.Popen[bytes] | None = None
        self.family: dict[int, str] = {}
        self.scratch: Path | None = None
        self.began = 0

    # --- looking ---------------------------------------------------------------------------------------------------

    @property
    def said(self) -> str:
        """What the terminal has said since the run was begun last."""
        return (self.folder / f"stderr.{self.began}").read_text()

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def look(self) -> dict[int, str]:
        """The processes that run now; all that ever ran are in `family`."""
        found = family(self.process.pid)
        self.family |= found
        supervisor = next((pid for pid, line in found.items() if "children.py" in line), None)
        if self.scratch is None and supervisor is not None:
            self.scratch = scratch_of(supervisor)
        return found

    def victim(self, name: str) -> int | None:
        """The process that `name` means, if it runs now."""
        found = self.look()
        if name == "launcher":
            return self.process.pid
        what, _, part = name.rpartition(", ") if ", " in name else (name, "", "")
        rank = what.rpartition(" ")[2] if " rank " in what else None
        module = MODULES[what.partition(" ")[0]]
        for shim, line in found.items():
            if "children.py" in line and module in line and rank in (None, environment_of(shim).get("RANK")):
                below = {pid: command_line(pid) for pid in family(shim)}
                of_part = {
                    "shim": [shim],
                    "core": [pid for pid, line in below.items() if "EngineCore" in line or "spawn_main" in line],
                    "": [pid for pid, line in below.items() if module in line],
                }[part]
                return min(of_part, default=None)
        return None

    def steps_said(self) -> list[int]:
        return [int(step) for step in STEP.findall(self.said)]

    # --- driving ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin the run, or go on with it."""
        self.began += 1
        self.family, self.scratch = {}, None
        with (self.folder / f"stderr.{self.began}").open("wb") as output:
            self.process = subprocess.Popen(
                self.argv, env=self.env, cwd=self.folder, stderr=output, stdout=output, start_new_session=True
            )

    def trains(self, steps: int = 2, timeout_s: float = HANGS_S) -> None:
        """Have the run train, and wait for so many more steps."""
        if not self.alive:
            self.begin()
        before = len(self.steps_said())

        def further() -> bool:
            assert self.alive, f"it has ended:\n{self.said}"
            return len(self.steps_said()) >= before + steps

        wait_until(further, timeout_s, lambda: f"{steps} more steps\n{self.said[-2000:]}")
        self.look()

    def reach(self, phase: str, victim: str) -> int:
        """Wait until the run is in a phase, and return the victim's process."""
        if phase == "start":
            if self.alive:
                self.kill()
            self.begin()
            wait_until(lambda: self.victim(victim) is not None, HANGS_S, f"{victim} is there")
            time.sleep(0.5)
            return self.victim(victim)
        if not self.alive or not self.steps_said():
            self.trains()
        wait_until(lambda: any((self.dir / "checkpoints").glob("step_*")), HANGS_S, "a checkpoint to go on from")
        pid = self.victim(victim)
        assert pid is not None, f"no {victim} among {self.family}"
        if phase == "updating":
            seen = set((self.dir / "weights").iterdir())
            wait_until(lambda: set((self.dir / "weights").glob("step_*")) - seen, HANGS_S, "new weights", 0.001)
        elif phase != "generating":
            reached, wanted = self.phases / "reached", self.phases / "wanted"
            reached.unlink(missing_ok=True)
            wanted.write_text(phase)
            try:
                wait_until(reached.exists, HANGS_S, lambda: f"{phase}\n{self.said[-2000:]}", 0.005)
            finally:
                wanted.unlink()
        return pid

    def break_it(self, victim: str, number: signal.Signals, phase: str) -> Broken:
        """Send a signal to a process in a phase, and see what comes of it."""
        pid = self.reach(phase, victim)
        offset, started, noticed, late = len(self.said), time.monotonic(), None, None
        os.kill(pid, number)
        while True:
            passed, new = time.monotonic() - started, self.said[offset:]
            if noticed is None and NOTICED.search(new):
                noticed = passed
            if not self.alive:
                break
            steps = len(STEP.findall(new))
            late = steps if late is None and passed > SETTLED_S else late
            if late is not None and steps >= late + 3:
                break
            if passed > HANGS_S:
                return Broken(f"hangs for {HANGS_S:g} s", noticed, False, new)
            self.look()
            time.sleep(0.05)
        if victim == "launcher" and number == signal.SIGKILL:
            wait_until(lambda: not self.left(), 20, "the others end")
            noticed = time.monotonic() - started
        return Broken(self._happened(self.said[offset:]), noticed, not self.alive, self.said[offset:])

    def _happened(self, new: str) -> str:
        if self.alive:
            again = "is started again" in new
            return f"{'started again, ' * again}went on"
        errors = [line for line in new.splitlines() if re.match(r"error: |stopped|prl: ", line)]
        line = re.sub(r"; its log: .*|, process \d+| \(/.*", "", errors[0]) if errors else ""
        return f"ended with {self.process.returncode}{': ' * bool(line)}{line[:160]}"

    def left(self, patience_s: float = 0.0) -> list[str]:
        """What is left of the run's processes and of its temporary files, after at most `patience_s`."""
        deadline = time.monotonic() + patience_s
        while True:
            found = [f"process {pid} ({line[:80]})" for pid, line in self.family.items() if running(pid)]
            found += left_in(self.scratch) if self.scratch is not None else []
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.05)

    def kill(self) -> None:
        """Kill all that runs, and wait until it is gone."""
        self.look()
        for pid in (self.process.pid, *self.family):
            if running(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)
        wait_until(lambda: not any(map(running, self.family)), 10, "all processes are gone")

    # --- the directory ----------------------------------------------------------------------------------------------

    def recorded(self) -> list[dict[str, float]]:
        """The lines of the metrics file; a last one that is not finished is left out."""
        text = (self.dir / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def rollouts_twice(self) -> list[tuple[int, int]]:
        """The rollouts that are recorded more than once."""
        seen, twice = set(), []
        for path in sorted((self.dir / "rollouts").glob("step_*.jsonl")):
            for record in map(json.loads, path.read_text().splitlines()):
                key = record["group"], record["rollout"]
                twice += [key] * (key in seen)
                seen.add(key)
        return twice


def environment_of(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    except OSError:
        return {}
    return dict(line.split("=", 1) for line in lines if "=" in line)


def half_written(run_dir: Path) -> list[str]:
    """The files of a run directory that cannot be read, with the reason. Names with a dot in front are unfinished."""
    return [f"{path.relative_to(run_dir)}: {error}" for path, error in unreadable(run_dir)]


def unreadable(run_dir: Path) -> Iterator[tuple[Path, Exception]]:
    for path in sorted(run_dir.rglob("*")):
        parts = path.relative_to(run_dir).parts
        if not path.is_file() or any(part.startswith(".") for part in parts) or path.name == "run.lock":
            continue
        try:
            read(path)
        except FileNotFoundError:
            continue  # a run that goes on has removed it
        except Exception as error:
            yield path, error


def read(path: Path) -> None:
    """Read a file as what its name says that it is."""
    match path.suffix:
        case ".json":
            json.loads(path.read_bytes())
        case ".jsonl":
            for line in path.read_bytes().splitlines():
                json.loads(line)
        case ".msgpack":
            msgspec.msgpack.decode(path.read_bytes())
        case ".yaml":
            yaml.safe_load(path.read_text())
        case ".safetensors":
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118
                    file.get_tensor(name)
        case _:
            path.read_bytes().decode()
