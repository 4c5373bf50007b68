"""Submit a run to Slurm: `python -m prl.train launcher=slurm …` outside a job.

All that can be refused is refused here. Then the same command is written into a batch script, with `run.resume=auto`,
so that a job which Slurm starts again goes on from its last checkpoint, and `sbatch` gets the script, once.
"""

import contextlib
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prl.config.schema import TrainConfig
from prl.config.suggestions import override_key
from prl.errors import ConfigError, PrlError
from prl.launch.launcher import Launcher
from prl.launch.slurm import ANSWER_S, FOLDER, SlurmLauncher
from prl.rerun import written
from prl.result import RunResult
from prl.resume import AUTO
from prl.text import in_one_line
from prl.wire.files import write_atomically

if TYPE_CHECKING:
    from prl.launch.builder import PreparedRun

SUBMITTED = "submitted"
KNOBS = ("partition", "account", "nodes", "gpus-per-node", "cpus-per-task", "time", "requeue")
"""Options of sbatch that are knobs of the launcher."""
OWN = ("job-name", "output", "error", "open-mode", "signal", "no-requeue", "ntasks", "ntasks-per-node", "array", "wrap")
"""Options of sbatch that the script depends on."""
MARGIN_S = 60
"""How long before the time limit a run is asked to stop, beyond `checkpoint.grace_s`, seconds: for all that follows."""
LONGEST_S = 65535
"""The longest that Slurm takes there, seconds."""

SCRIPT = """#!/bin/bash
{options}

# Written by prl for the run in {run_dir}
# Once more, from its last checkpoint: sbatch {script}
# SIGUSR1: its time is nearly up. SIGTERM: somebody wants it to stop. Both have a last checkpoint written.
cd -- {cwd} || exit 1
began=$(date +%s)
resume={resume}
trap 'leave=1; kill -TERM "$run" 2>/dev/null' USR1
trap 'kill -TERM "$run" 2>/dev/null' TERM

{command} \\
    run.resume="$resume" &
run=$!
while kill -0 "$run" 2>/dev/null; do wait "$run"; done
wait "$run"
status=$?
{requeue}exit "$status"
"""
REQUEUE = """
if [ -n "$leave" ] && [ "$status" -ne 0 ]; then
    if [ -n "$(find {checkpoints} -name manifest.json -newermt "@$began" 2>/dev/null)" ]; then
        scontrol requeue "$SLURM_JOB_ID"
    else
        echo "not requeued: the time of this job has left no checkpoint" >&2
    fi
fi
"""


def check(launcher: Launcher, *, command: bool) -> None:
    """Raise ConfigError where a run would be handed over that is no `command` of its own, or to nobody."""
    if not launcher.hands_over:
        return
    if not command:
        raise ConfigError(
            "launcher=slurm submits the run of one command. For the jobs of a sweep choose sweep=submitit_slurm, which "
            "submits them; from Python, call main(config) inside a Slurm job"
        )
    if shutil.which("sbatch") is None:
        raise ConfigError("launcher=slurm: there is no sbatch on this machine: start the command on one that has it")


def submit(prepared: "PreparedRun", launcher: SlurmLauncher) -> RunResult:
    """Submit the run, and say where to look. Raises ConfigError, and PrlError where Slurm does not take it."""
    config = prepared.config
    folder = Path(config.run.dir).resolve() / FOLDER
    text = script(config, launcher, sys.argv[1:])
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    write_atomically(folder / "job.sh", text.encode())
    try:
        job, ended = handed_over(folder / "job.sh")
    except BaseException:
        (folder / "job.sh").unlink()
        for each in (folder, folder.parent):  # whatever else is in them stays
            with contextlib.suppress(OSError):
                each.rmdir()
        raise
    for line in (
        f"submitted as job {job}: {folder / 'job.sh'}",
        f"its output: {folder / f'{job}.log'}",
        f"look at it: squeue --job={job}",
        f"stop it with a last checkpoint: scancel --batch --signal=TERM {job}; at once: scancel {job}",
    ):
        print(line, file=sys.stderr, flush=True)
    if status := ended.wait():  # at once, but for launcher.sbatch.wait
        raise PrlError(f"job {job} ended with status {status}: {folder / f'{job}.log'}")
    return RunResult(status=SUBMITTED)


def handed_over(path: Path) -> tuple[str, "subprocess.Popen[str]"]:
    """Give a script to `sbatch`. Returns the job's number, and `sbatch`. Raises PrlError where that refuses it."""
    process = subprocess.Popen(
        ["sbatch", "--parsable", str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    deadline = threading.Timer(ANSWER_S, process.kill)
    deadline.start()
    try:
        said = process.stdout.readline().strip()
    finally:
        deadline.cancel()
    if said:
        return said.partition(";")[0], process  # the cluster's name may follow
    reason = in_one_line(ValueError(process.stderr.read().strip() or f"it said nothing within {ANSWER_S:g} s"))
    process.wait()
    raise PrlError(f"sbatch does not take {path}: {reason}")


# --- the script -------------------------------------------------------------------------------------------------------


def script(config: TrainConfig, launcher: SlurmLauncher, arguments: Sequence[str]) -> str:
    """The batch script of a run that was started with these arguments. Raises ConfigError for an option of sbatch."""
    run_dir = Path(config.run.dir).resolve()
    resume, given = AUTO, config.run.resume or AUTO
    if given != AUTO:  # a checkpoint of the user's choice counts once
        resume = f'$([ "${{SLURM_RESTART_COUNT:-0}}" = 0 ] && echo {word(valued(given))} || echo {AUTO})'
    own = {"run.name": config.run.name, "run.dir": str(run_dir)}
    rest = [argument for argument in arguments if override_key(argument) not in (*own, "run.resume")]
    rest += [f"{key}={valued(value)}" for key, value in own.items()]
    return SCRIPT.format(
        options="\n".join(option_lines(config, launcher, run_dir / FOLDER)),
        run_dir=run_dir,
        script=word(str(run_dir / FOLDER / "job.sh")),
        cwd=word(os.getcwd()),
        resume=resume,
        command=" \\\n    ".join([f"{word(sys.executable)} -m prl.train", *map(word, rest)]),
        requeue=REQUEUE.format(checkpoints=word(str(run_dir / "checkpoints"))) if launcher.requeue else "",
    )


def valued(value: str) -> str:
    """A string in the grammar of Hydra's overrides, in quotes where it needs them."""
    plain = re.fullmatch(r"/[\w./-]+|[A-Za-z][\w.-]*", value, re.ASCII)
    return value if plain and value.lower() not in ("null", "true", "false", "inf", "nan") else written(value)


def word(text: str) -> str:
    """A text as one word of the shell."""
    bare = shlex.quote(text) == text or set(text) & set('"$`\\!')
    return shlex.quote(text) if bare else f'"{text}"'


def option_lines(config: TrainConfig, launcher: SlurmLauncher, folder: Path) -> list[str]:
    """The `#SBATCH` lines. Raises ConfigError for one of `launcher.sbatch` that cannot be given there."""
    notice_s = min(math.ceil(config.checkpoint.grace_s) + MARGIN_S, LONGEST_S)
    options: dict[str, Any] = {
        "job-name": "prl-" + re.sub(r"[^\w.-]", "_", config.run.name),
        "output": str(folder).replace("%", "%%") + "/%j.log",
        "open-mode": "append",
        "export": "ALL",
        "partition": launcher.partition,
        "account": launcher.account,
        "nodes": launcher.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": launcher.cpus_per_task,
        "gpus-per-node": launcher.gpus_per_node or None,
        "time": launcher.time,
        "signal": f"B:USR1@{notice_s}",
        "requeue" if launcher.requeue else "no-requeue": True,
    }
    for name, value in launcher.sbatch.items():
        option, key = str(name).replace("_", "-"), f"launcher.sbatch.{name}"
        if option in KNOBS:
            raise ConfigError(f"{key}: give it as launcher.{option.replace('-', '_')}")
        if option in OWN or not re.fullmatch(r"[a-z][a-z-]+", option):
            why = "prl sets it itself" if option in OWN else "that is no option of sbatch"
            raise ConfigError(f"{key}: {why}")
        if not isinstance(value, str | int | float | None) or not str(value).isprintable():
            raise ConfigError(f"{key}={value!r:.80} must be one value")
        options[option] = value
    return [
        f"#SBATCH --{name}" + ("" if value is True else f"={in_quotes(str(value))}")
        for name, value in options.items()
        if value is not None and value is not False
    ]


def in_quotes(value: str) -> str:
    """A value as `sbatch` reads it in a line of a script."""
    if re.fullmatch(r"[\w./:=+@,%()\[\]-]+", value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
