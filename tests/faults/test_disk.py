"""Disks that are full, read-only or gone while a run writes: it ends soon, says which file and why, and goes on later.

A small disk is a tmpfs: mounting it takes root, or `unshare --map-root-user --mount`, which `scripts/chaos` uses.
"""

import contextlib
import os
import re
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from prl.report.runs import read_run
from prl.wire.checkpoints import checkpoint_path, steps_of, verify

pytestmark = pytest.mark.engine

KNOBS = ("checkpoint.every=3", "orchestrator.batch_size=32", "orchestrator.eval.every=null", "max_steps=1000")
ROOT = Path(__file__).parents[2]
MB = 2**20


def mount(*arguments):
    done = subprocess.run(["mount", *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stderr.strip()} (as root, or under unshare --map-root-user --mount)"


@pytest.fixture
def mounted():
    """`mounted(folder, *options)`: mount there, until the test ends."""
    folders = []

    def at(folder, *options):
        folder.mkdir(exist_ok=True)
        mount(*options, folder)
        folders.append(folder)

    yield at
    for folder in reversed(folders):
        subprocess.run(["umount", "--lazy", folder], check=True)


class Disk:
    """A small disk at `folder`."""

    def __init__(self, folder):
        self.folder, self.filler = folder, folder / "filler"

    def fill(self, *, leave):
        """Leave `leave` bytes, whatever others write meanwhile."""
        with self.filler.open("ab") as file, contextlib.suppress(OSError):
            file.write(bytes(max(0, shutil.disk_usage(self.folder).free - leave)))

    def clear(self):
        self.filler.unlink()


@pytest.fixture
def disk(mounted, tmp_path):
    """The disk of the run directory, 100 MB."""
    mounted(tmp_path / "run", "-t", "tmpfs", "-o", "size=100m", "none")
    return Disk(tmp_path / "run")


def wait_for_step(process, folder, step, timeout=120):
    deadline, metrics = time.monotonic() + timeout, folder / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") > step):
        said = folder.with_name(f"{folder.name}.stderr")
        assert process.is_alive(), said.read_text()
        assert time.monotonic() < deadline, f"no step {step} within {timeout} s"
        time.sleep(0.01)


def ended(process, tmp_path, within=60):
    """Seconds until the process has ended by itself, and what it said: one line of an error, which is returned."""
    began = time.monotonic()
    process.join(within)
    seconds, stderr = time.monotonic() - began, (tmp_path / "run.stderr").read_text()
    assert not process.is_alive(), stderr
    assert "Traceback" not in stderr, stderr
    [error] = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert stderr.rstrip().endswith(error), "and nothing after it"
    assert process.exitcode == 1
    return seconds, error


def whole(folder):
    """Check that what is left is whole: each checkpoint, each line. Returns the step of the last checkpoint."""
    assert not list((folder / "checkpoints").glob("*.writing")) and not list(folder.rglob("*.safetensors.tmp"))
    hidden = [path for path in folder.rglob(".*") if path.name != ".hydra" and not path.match("checkpoints/.step_*")]
    assert not hidden, hidden
    for step in steps_of(folder):
        assert verify(checkpoint_path(folder, step)) == step
    assert read_run(folder).problems == []
    return steps_of(folder)[-1]


def goes_on(train, folder, step):
    """Go on from the checkpoint of `step` for two steps more."""
    run = train("run.resume=auto", *KNOBS, f"max_steps={step + 2}")
    assert run.status == 0, run.stderr
    assert f"going on after step {step}:" in run.stderr
    assert [line["step"] for line in run.steps] == list(range(step + 3))
    assert whole(folder) == step + 2


FULL = {
    "rollouts": (0, ""),
    "weights": (1 * MB, "weights/step_"),
    "checkpoint": (8 * MB, "checkpoints/step_"),
}


@pytest.mark.parametrize("phase", [pytest.param(phase, marks=pytest.mark.chaos) for phase in FULL])
def test_a_full_disk(disk, begin, train, tmp_path, phase, outcome):
    leave, path = FULL[phase]
    # Without steps ahead one process alone writes at a time.
    process = begin(*KNOBS, *["orchestrator.max_async_level=0"] * bool(path))
    wait_for_step(process, disk.folder, 4)
    disk.fill(leave=leave)
    seconds, error = ended(process, tmp_path)
    assert re.search(rf"{disk.folder}/{path}\S* cannot be written: No space left on device: make room there", error)
    disk.clear()
    step = whole(disk.folder)
    goes_on(train, disk.folder, step)
    outcome(
        fault="full disk",
        phase=phase,
        happened=error.replace(str(tmp_path), "…"),
        noticed_s=seconds,
        left=f"checkpoint of step {step}",
        resumed=True,
    )
    assert seconds < 30


def test_a_file_size_limit(begin, train, tmp_path, outcome):
    """Weights are smaller than the limit, the optimiser's state is larger: the first checkpoint cannot be written."""
    process, folder = begin(*KNOBS), tmp_path / "run"
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (5 * MB, 5 * MB))
    wait_for_step(process, folder, 1)
    seconds, error = ended(process, tmp_path)
    assert re.search(r"checkpoints/step_000003 cannot be written: File too large \(ulimit -f\)", error)
    assert not steps_of(folder) and not list((folder / "checkpoints").iterdir())
    assert read_run(folder).problems == [] and "File too large" in read_run(folder).result.error
    outcome(
        fault="file-size limit",
        phase="checkpoint",
        happened=error.replace(str(tmp_path), "…"),
        noticed_s=seconds,
        left="no checkpoint",
        resumed="not tried",
    )


@pytest.mark.chaos
def test_a_directory_for_temporary_files_that_is_full(mounted, begin, tmp_path, outcome):
    mounted(tmp_path / "tmp", "-t", "tmpfs", "-o", "size=1m", "none")
    Disk(tmp_path / "tmp").fill(leave=0)
    process = begin(*KNOBS, "max_steps=3", env={"TMPDIR": str(tmp_path / "tmp")})
    process.join(120)
    assert process.exitcode == 0, (tmp_path / "run.stderr").read_text()
    assert whole(tmp_path / "run") == 3
    outcome(
        fault="full TMPDIR",
        phase="whole run, engine elsewhere",
        happened="completed",
        noticed_s=None,
        left="",
        resumed="not needed",
    )


@pytest.mark.chaos
def test_a_run_directory_that_becomes_read_only(mounted, begin, train, tmp_path, outcome):
    process, folder = begin(*KNOBS), tmp_path / "run"
    wait_for_step(process, folder, 4)
    mounted(folder, "--bind", folder)
    mount("-o", "remount,bind,ro", folder)
    seconds, error = ended(process, tmp_path)
    assert re.search(rf"{folder}\S* cannot be written: Read-only file system", error)
    mount("-o", "remount,bind,rw", folder)
    step = whole(folder)
    goes_on(train, folder, step)
    outcome(
        fault="read-only run directory",
        phase="training",
        happened=error.replace(str(tmp_path), "…"),
        noticed_s=seconds,
        left=f"checkpoint of step {step}",
        resumed=True,
    )


@pytest.mark.chaos
@pytest.mark.parametrize("fault", ["removed", "moved", "replaced"])
def test_a_run_directory_that_is_gone(begin, tmp_path, fault, outcome):
    process, folder = begin(*KNOBS), tmp_path / "run"
    wait_for_step(process, folder, 4)
    os.kill(process.pid, signal.SIGSTOP)  # else it writes what is being removed
    folder.rename(tmp_path / "elsewhere")
    if fault == "removed":
        shutil.rmtree(tmp_path / "elsewhere")
    elif fault == "replaced":
        folder.mkdir()
        (folder / "run.lock").touch()
        (folder / "config.yaml").touch()
    os.kill(process.pid, signal.SIGCONT)
    seconds, error = ended(process, tmp_path)
    assert f"run.dir='{folder}' was removed or moved while the run wrote into it" in error
    if fault == "replaced":
        assert not (folder / "result.json").exists()
    else:
        assert not folder.exists(), sorted(folder.rglob("*"))
    outcome(
        fault=f"run directory {fault}",
        phase="training",
        happened=error.replace(str(tmp_path), "…"),
        noticed_s=seconds,
        left="nothing new" if fault != "removed" else "nothing",
        resumed="moved: where it is now" if fault == "moved" else "not possible",
    )


@pytest.mark.chaos
def test_a_read_only_checkout(mounted, command, tmp_path, outcome):
    checkout = tmp_path / "checkout"
    mounted(checkout, "--bind", ROOT)
    mount("-o", "remount,bind,ro", checkout)

    def started(*overrides):
        argv, env = command(*KNOBS, "max_steps=2", *overrides)
        given = [argument for argument in argv if not (overrides and argument.startswith("run.dir="))] + list(overrides)
        env |= {"PYTHONPATH": str(checkout)}
        return subprocess.run(given, cwd=checkout, env=env, capture_output=True, text=True, timeout=240)

    done = started()
    assert done.returncode == 0, done.stderr
    inside = started("run.dir=outputs/x")
    assert inside.returncode == 2 and "Traceback" not in inside.stderr
    assert re.fullmatch(
        r"error: run.dir=\S+ cannot be written to: \S+ is read-only for this user", inside.stderr.strip()
    )
    outcome(
        fault="read-only checkout",
        phase="whole run, run.dir elsewhere; inside it",
        happened=f"completed; {inside.stderr.strip()}".replace(str(tmp_path), "…"),
        noticed_s=None,
        left="nothing inside it",
        resumed="not needed",
    )
