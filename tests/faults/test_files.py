"""Files of a run that are cut off, or have a bit turned: whoever reads them says so, or leaves the damaged part out.

Checkpoints are protected by hashes: any change of a bit is noticed. The others are text, or msgpack: what breaks their
grammar is noticed, and a digit that became another digit is not (`NOT_HASHED`).
"""

import functools
import os
import re
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from engines import started
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from prl import resume, run_dir
from prl.command import one_line
from prl.compose import compose
from prl.config.model_folder import tokenizer_files
from prl.errors import PrlError
from prl.evaluation.targets import model_of
from prl.models import model_path
from prl.orchestrator.early_stopping import keep_best
from prl.report.examples import read_rollouts
from prl.report.page import _provenance
from prl.report.runs import read_run
from prl.report.shares import read_spans, shares
from prl.report.timeline import trace
from prl.sweep import job
from prl.viewer import __main__ as viewer
from prl.wire.checkpoints import checkpoint_path, steps_of

pytestmark = pytest.mark.engine

KNOBS = (
    *("checkpoint.every=2", "orchestrator.batch_size=32", "buffer=pools"),
    "buffer.easy_threshold=0.06",  # every reply has got a digit right: one group in five
    *("orchestrator.eval.every=2", "orchestrator.eval.num_tasks=8", "trainer.token_export=true"),
    *("+monitor@monitor.tensorboard=tensorboard", "monitor.console.mode=plain"),
    "schedule=constant",
)


@pytest.fixture(scope="module")
def runs(engine, forks, tmp_path_factory):
    """A run that was killed after a checkpoint, and the same one gone on to its end."""
    folder = tmp_path_factory.mktemp("files")
    run, env = folder / "run", {**os.environ, "PRL_TOKEN": engine.token, "OMP_NUM_THREADS": "1"}

    def begin(*overrides):
        arguments = [f"inference.urls=[{engine.url}]", f"run.dir={run}", *KNOBS, *overrides]
        given = {"arguments": arguments, "env": env, "folder": str(folder), "stderr": str(folder / "stderr")}
        return started(forks, given)

    def best(step):
        """What `eval.keep_best` leaves where an evaluation was the best so far, which chance decides here."""
        shutil.rmtree(run / "checkpoints" / "best", ignore_errors=True)
        weights = folder / "weights"
        shutil.rmtree(weights, ignore_errors=True)
        weights.mkdir()
        for name in ("model.safetensors", "config.json", "generation_config.json"):
            shutil.copyfile(checkpoint_path(run, step) / name, weights / name)
        keep_best(run, weights, tokenizer_files(model_path("tiny"), trust_remote_code=False), step, 1.0)

    process, deadline = begin("max_steps=1000"), time.monotonic() + 120
    while len(steps_of(run)) < 2 or not (run / "weights").is_dir():
        assert process.is_alive() and time.monotonic() < deadline, (folder / "stderr").read_text()
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    time.sleep(0.5)  # its trainer may be writing
    step = steps_of(run)[-1]
    best(step)
    shutil.copytree(run, folder / "killed")
    process = begin("run.resume=auto", f"max_steps={step + 2}")
    process.join(120)
    assert process.exitcode == 0, (folder / "stderr").read_text()
    best(step + 2)
    return SimpleNamespace(killed=folder / "killed", finished=run)


# --- who reads what ---------------------------------------------------------------------------------------------------


@functools.cache
def config_of(run):
    return compose([f"run.dir={run}", "run.name=x", "run.resume=auto", *KNOBS, "max_steps=1000"])


def go_on(run):
    """As `run.resume=auto`: find the checkpoint, and cut the rest back to it."""
    point = resume.find(config_of(run))
    resume.take_over(point, config_of(run), {})
    last = (run / "resumes.jsonl").read_bytes().splitlines()[-1]
    assert msgspec.json.decode(last)["step"] == point.step, "a line of its own, whatever is before it"
    return point.step, run_dir.last_metrics(run)


def report(run):
    found, rollouts = read_run(run), read_rollouts(run)
    provenance = _provenance(found)
    print(*found.problems, *rollouts.problems, sep="\n")
    return found.result, found.config, found.metrics.to_csv(), rollouts.rows, rollouts.examples, provenance


def timeline(run):
    found = read_run(run)
    spans = read_spans(run, found.problems, steps=found.result.steps)
    print(*found.problems, sep="\n")
    return trace(spans), shares(spans)


def paged(run, *arguments):
    status = viewer.main([str(run), *arguments])
    assert status in (0, 1)
    return status


MODEL = ("chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json")
MODEL = (*MODEL, "tokenizer_config.json", "manifest.json")
POOLS = ("easy_examples.jsonl", "hard_examples.jsonl")
STATE = ("state/run.msgpack", "state/trainer.json", "state/trainer.safetensors")
CHECKPOINT = [f"checkpoints/step_#/{name}" for name in (*MODEL, *POOLS)]
WHOLE = [*CHECKPOINT, *(f"checkpoints/step_#/{name}" for name in STATE)]
BEST = [f"checkpoints/best/{name}" for name in (*MODEL, "best.json")]
EVENTS = ["events/orchestrator.jsonl", "events/trainer.jsonl"]
READERS = {
    "run.resume=auto": (
        go_on,
        ["config.yaml", "metrics.jsonl", "provenance.json", "resumes.jsonl", *EVENTS, *WHOLE, BEST[-1]],
    ),
    "--config-dir": (lambda run: compose(["run.name=x"], run), ["config.yaml"]),
    "prl report": (
        report,
        [
            *("config.yaml", ".hydra/overrides.yaml", "metrics.jsonl", "result.json", "provenance.json"),
            *("rollouts/step_#.jsonl", "tokens/step_#/rank_#.jsonl"),
        ],
    ),
    "prl timeline": (timeline, EVENTS),
    "prl rollouts": (paged, ["rollouts/step_#.jsonl"]),
    "prl rollouts --eval": (lambda run: paged(run, "--eval"), ["rollouts/eval_math_step_#.jsonl"]),
    "prl eval <run>": (lambda run: model_of(str(run)), ["config.yaml", *BEST]),
    "prl eval <checkpoint>": (
        lambda run: model_of(str(checkpoint_path(run, steps_of(run)[-1]))),
        ["config.yaml", *CHECKPOINT],
    ),
    "a sweep's job": (job.status_of, ["result.json"]),
}
"""Who reads a run directory, and the kinds of files that each reads."""
UNFINISHED = "/.step_"
NOT_READ = {
    ".hydra/hydra.yaml": "for people",
    "report.html": "written again from the others",
    "run.lock": "the kernel's lock counts",
    "run.holder": "for people",
    "logs/orchestrator.log": "for people",
    "logs/trainer.log": "for people",
    "tensorboard/events": "TensorBoard's own, with checksums; a run that goes on begins another file",
    "provenance.diff": "for people; shown as it is",
    "batches/step_#/rank_#.msgpack": "the trainer's, while it runs; kept where orchestrator.keep_batches says so",
    "batches/end.json": "the trainer's, while it runs; removed where a run goes on",
    "weights/step_#/config.json": "the engine's, while it runs; removed where a run goes on",
    "weights/step_#/generation_config.json": "as above",
    "weights/step_#/metrics.json": "as above",
    "weights/step_#/model.safetensors": "as above; the engine checks names, shapes and numbers",
}
FLAGGED_ELSEWHERE = {
    ("prl report", "rollouts/step_#.jsonl"): "a step whose file is empty has no rollouts to show",
    **{("run.resume=auto", name): "they make a picture, whose reader says it" for name in EVENTS},
    ("run.resume=auto", "resumes.jsonl"): "a record for people, which is added to",
    ("run.resume=auto", "checkpoints/best/best.json"): "said; a number in it is not hashed for this reader",
}
"""Where a file that was cut off may go unsaid: what the reader makes of it is right without."""


def kind_of(path, folder):
    name = re.sub(r"\d+", "#", str(path.relative_to(folder)))
    return "tensorboard/events" if name.startswith("tensorboard/events") else name


def kinds_in(folder):
    """The files of a run directory by kind, the last of each, but for what a killed process had not finished.

    Nobody reads that, and a run that goes on removes it (`tests/test_resume.py`).
    """
    whole = [path for path in sorted(folder.rglob("*")) if path.is_file() and UNFINISHED not in str(path)]
    return {kind_of(path, folder): path for path in whole}


def damaged(data, how):
    match how:
        case "empty":
            return b""
        case "half":
            return data[: len(data) // 2]
        case "a byte short":
            return data[:-1]
    place, bit = how
    place = int(place * (len(data) - 1))
    return data[:place] + bytes([data[place] ^ (1 << bit)]) + data[place + 1 :]


CUT, FLIPPED = ("empty", "half", "a byte short"), ((0.33, 1), (0.72, 6), (0.5, 7))


def answer(reader, run, capsys):
    """What a reader returns and says. Anything but a refusal in words fails the test."""
    here, paths = Path.cwd(), list(sys.path)
    capsys.readouterr()
    try:
        found = reader(run)
    except (PrlError, HydraException, OmegaConfBaseException) as error:
        found = type(error).__name__
        print(one_line(error))
        assert "\n" not in one_line(error)
    finally:
        os.chdir(here)
        sys.path[:] = paths
    said = capsys.readouterr()
    return found, said.out + said.err


def state_of(folder):
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_no_kind_of_file_is_forgotten(runs):
    found = set().union(*(kinds_in(folder) for folder in (runs.killed, runs.finished)))
    read = {kind for _, kinds in READERS.values() for kind in kinds}
    assert found - read - set(NOT_READ) == set(), "files of which nobody has said what reads them"
    assert read - found == set(), "and files that no run has"


@pytest.mark.parametrize("name", READERS)
def test_what_is_cut_off_or_turned(runs, tmp_path, capsys, name, outcome):
    reader, kinds = READERS[name]
    counted = Counter()
    source = runs.killed if name == "prl eval <run>" else runs.finished
    run = tmp_path / "run"

    def fresh():
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(source, run, copy_function=os.link)
        return run

    expected = answer(reader, fresh(), capsys)
    assert not re.search("damaged|cannot be read|warning", expected[1])
    for kind in kinds:
        hashed = kind.startswith("checkpoints/")
        for how in (*CUT, *FLIPPED):
            path = fresh() / kinds_in(source)[kind].relative_to(source)
            data = path.read_bytes()
            if not data:  # a pool that no task has come into
                assert path.name in POOLS
                continue
            path.unlink()  # it is a link
            path.write_bytes(damaged(data, how))
            before = state_of(run)
            found, said = answer(reader, run, capsys)
            flat = "".join(said.split())  # the viewer wraps lines
            named = path.name in flat or (path.parent.name in flat and "damaged" in flat)
            same = (found, said) == expected
            where = f"{name}: {kind}, {how}: {said}"
            newline = how == "a byte short" and data.endswith(b"\n")
            if (hashed or how in CUT) and not newline and (name, kind) not in FLAGGED_ELSEWHERE:
                assert named, where
            if reader is not go_on:
                assert state_of(run) == before, f"{where}: it has written"
            counted["named" if named else "the same as without" if same else "not noticed"] += 1
    outcome(
        fault="files cut off (3 ways) and bits turned (3)",
        phase=name,
        happened=", ".join(f"{kind} {number}" for kind, number in counted.items()),
        noticed_s=0.0,
        left="as it was" if reader is not go_on else "cut back to the checkpoint before",
        resumed=name == "run.resume=auto",
    )
