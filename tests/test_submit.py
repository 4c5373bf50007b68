"""The batch script of a run, and what is refused before one is submitted."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from prl import submit
from prl.compose import compose
from prl.config.instantiate import build
from prl.errors import ConfigError, PrlError
from prl.launch.launcher import Launcher
from prl.launch.local import LocalLauncher
from prl.run_dir import other_files, refuse_other_files
from prl.train import main


def made(*overrides, arguments=(), name="x"):
    config = compose([f"run.name={name}", "launcher=slurm", *overrides])
    return submit.script(config, build(config.launcher, Launcher, "launcher"), arguments)


def options_of(text):
    return [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH --")]


def test_the_options_are_the_launchers_knobs():
    assert options_of(made("run.dir='/a b/5%'")) == [
        "job-name=prl-x",
        'output="/a b/5%%/slurm/%j.log"',
        "open-mode=append",
        "export=ALL",
        "nodes=1",
        "ntasks-per-node=1",
        "cpus-per-task=4",
        "signal=B:USR1@120",
        "requeue",
    ]
    text = made(
        "launcher.partition=gpu",
        "launcher.account=lab",
        "launcher.nodes=2",
        "launcher.gpus_per_node=8",
        "launcher.cpus_per_task=16",
        "launcher.time=1-12:00:00",
        "launcher.requeue=false",
        "checkpoint.grace_s=30.5",
        "+launcher.sbatch.qos=high",
        "+launcher.sbatch.mail_user='a \"b\"'",
        "+launcher.sbatch.exclusive=true",
        "+launcher.sbatch.export=NONE",
        "+launcher.sbatch.mem=null",
        "run.dir=/r",
        name="my-run",
    )
    assert options_of(text) == [
        "job-name=prl-my-run",
        "output=/r/slurm/%j.log",
        "open-mode=append",
        "export=NONE",
        "partition=gpu",
        "account=lab",
        "nodes=2",
        "ntasks-per-node=1",
        "cpus-per-task=16",
        "gpus-per-node=8",
        "time=1-12:00:00",
        "signal=B:USR1@91",
        "no-requeue",
        "qos=high",
        'mail-user="a \\"b\\""',
        "exclusive",
    ]
    assert "scontrol" not in text


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("+launcher.sbatch.partition=a", "launcher.sbatch.partition: give it as launcher.partition"),
        ("+launcher.sbatch.gpus_per_node=2", "launcher.sbatch.gpus_per_node: give it as launcher.gpus_per_node"),
        ("+launcher.sbatch.array=1-3", "launcher.sbatch.array: prl sets it itself"),
        ("+launcher.sbatch.Q=1", "launcher.sbatch.Q: that is no option of sbatch"),
        ('+launcher.sbatch.comment="a\nb"', r"launcher.sbatch.comment='a\\nb' must be one value"),
        ("+launcher.sbatch.comment=[a]", "launcher.sbatch.comment=.* must be one value"),
    ],
)
def test_options_of_sbatch_that_are_refused(override, says):
    with pytest.raises(ConfigError, match=says):
        made(override)


HOSTILE = ["my run", "a'b", 'a"b', "$(touch x)", "`touch x`", "true", "1e5", "ä", "a\\b", "!x"]


@pytest.mark.parametrize("name", HOSTILE)
def test_the_job_gets_the_arguments_as_they_were_typed(name, tmp_path, monkeypatch):
    """Whatever they are, and the run's name, directory and resume once."""
    config = compose(["run.name=x", "launcher=slurm"])
    config.run.name, config.run.dir = name, str(tmp_path / name)
    typed = ["launcher=slurm", "run.name=other", "+run.resume=null", "run.dir=/x", "algo.kl='$HOME'", "seed=3"]
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {shlex.quote(str(tmp_path))}/got\n')
    fake.chmod(0o700)
    monkeypatch.setattr(submit.sys, "executable", str(fake))
    text = submit.script(config, build(config.launcher, Launcher, "launcher"), typed)
    subprocess.run(["bash", "-c", text], cwd=tmp_path, check=True, timeout=20)
    got = (tmp_path / "got").read_text().splitlines()
    assert got[:5] == ["-m", "prl.train", "launcher=slurm", "algo.kl='$HOME'", "seed=3"]
    parsed = {each.key_or_group: each.value() for each in OverridesParser.create().parse_overrides(got[5:])}
    assert parsed == {"run.name": name, "run.dir": str(tmp_path / name), "run.resume": "auto"}


@pytest.mark.parametrize(
    ("restarts", "resumed"), [(None, "/r/checkpoints/step_000040"), ("0", "/r/checkpoints/step_000040"), ("2", "auto")]
)
def test_a_checkpoint_of_the_users_choice_counts_when_the_job_starts_first(restarts, resumed, monkeypatch):
    text = made("run.resume=/r/checkpoints/step_000040", "run.dir=/r")
    [line] = [line for line in text.splitlines() if line.startswith("resume=")]
    env = {"PATH": os.environ["PATH"]} | ({} if restarts is None else {"SLURM_RESTART_COUNT": restarts})
    said = subprocess.run(["bash", "-c", f'{line}\necho "$resume"'], env=env, capture_output=True, text=True)
    assert said.stdout == f"{resumed}\n"


class Script:
    """The batch script at work, with a program in the place of the run that saves and stops at SIGTERM."""

    def __init__(self, folder, monkeypatch, *, saves, overrides=()):
        saved = f"{folder}/run/checkpoints/step_000003"
        save = f"mkdir -p {saved}; touch {saved}/manifest.json; " * saves
        run = f"""
            trap 'echo asked >> {folder}/said; {save} exit 130' TERM
            echo started >> {folder}/said
            while :; do sleep 0.05; [ ! -e {folder}/done ] || exit 5; done
        """
        for name, lines in (("python", run), ("scontrol", f'echo "scontrol $@" >> {folder}/said')):
            (folder / name).write_text(f"#!/bin/bash\n{lines}\n")
            (folder / name).chmod(0o700)
        monkeypatch.setattr(submit.sys, "executable", str(folder / "python"))
        self.said = folder / "said"
        text = made(f"run.dir={folder}/run", *overrides)
        env = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
        self.process = subprocess.Popen(["bash", "-c", text], env=env, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 20
        while not self.said.exists():
            assert time.monotonic() < deadline and self.process.poll() is None
            time.sleep(0.02)

    def ended(self):
        _, stderr = self.process.communicate(timeout=20)
        return self.process.returncode, self.said.read_text().splitlines()[1:], stderr.strip()


def test_a_job_whose_time_is_up_saves_and_has_itself_queued_again(tmp_path, monkeypatch):
    script = Script(tmp_path, monkeypatch, saves=True)
    script.process.send_signal(signal.SIGUSR1)
    assert script.ended() == (130, ["asked", "scontrol requeue 7"], "")


def test_not_where_its_time_has_left_no_checkpoint(tmp_path, monkeypatch):
    """Else it would start for ever."""
    before = tmp_path / "run" / "checkpoints" / "step_000001" / "manifest.json"
    before.parent.mkdir(parents=True)
    before.touch()
    os.utime(before, (time.time() - 100,) * 2)
    script = Script(tmp_path, monkeypatch, saves=False)
    script.process.send_signal(signal.SIGUSR1)
    assert script.ended() == (130, ["asked"], "not requeued: the time of this job has left no checkpoint")


def test_nor_where_it_is_to_stop_or_may_not_be_queued_again(tmp_path, monkeypatch):
    script = Script(tmp_path, monkeypatch, saves=True)
    script.process.send_signal(signal.SIGTERM)
    assert script.ended() == (130, ["asked"], "")
    script.said.unlink()
    script = Script(tmp_path, monkeypatch, saves=True, overrides=["launcher.requeue=false"])
    script.process.send_signal(signal.SIGUSR1)
    assert script.ended() == (130, ["asked"], "")


def test_the_job_ends_with_the_status_of_the_run(tmp_path, monkeypatch):
    script = Script(tmp_path, monkeypatch, saves=True)
    (tmp_path / "done").touch()
    assert script.ended() == (5, [], "")


# --- submitting -------------------------------------------------------------------------------------------------------


def test_a_run_that_is_no_command_of_its_own_is_refused(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    config = compose(["run.name=x", "launcher=slurm"])
    with pytest.raises(ConfigError, match="launcher=slurm submits the run of one command.*sweep=submitit_slurm"):
        main(config)
    launcher = build(config.launcher, Launcher, "launcher")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="launcher=slurm: there is no sbatch on this machine"):
        submit.check(launcher, command=True)
    submit.check(LocalLauncher(), command=False)


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    """`sbatch(lines)`: what `sbatch` is, a program of the shell; `submit_run()` submits a run by it."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")

    def make(lines):
        (tmp_path / "bin" / "sbatch").write_text(f"#!/bin/sh\n{lines}\n")
        (tmp_path / "bin" / "sbatch").chmod(0o700)

    return make


def submit_run(tmp_path, *overrides):
    config = compose(["run.name=x", "launcher=slurm", f"run.dir={tmp_path}/out/run", *overrides])
    launcher = build(config.launcher, Launcher, "launcher")
    return submit.submit(SimpleNamespace(config=config, token="t", components=SimpleNamespace(hosted=[])), launcher)


def test_a_submitted_run_says_where_to_look(tmp_path, sbatch, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["prl", "launcher=slurm", "seed=3"])
    sbatch(f"cp $2 {tmp_path}/got; echo '12;cluster'")
    assert submit_run(tmp_path).status == submit.SUBMITTED
    folder = tmp_path / "out" / "run" / "slurm"
    said = capsys.readouterr().err
    assert f"submitted as job 12: {folder}/job.sh\n" in said and f"its output: {folder}/12.log\n" in said
    assert "scancel --batch --signal=TERM 12; at once: scancel 12\n" in said
    text = (tmp_path / "got").read_text()
    assert text == (folder / "job.sh").read_text() and "seed=3 \\\n" in text
    assert folder.stat().st_mode & 0o077 == 0
    assert other_files(folder.parent) == [], "the run may begin there"
    refuse_other_files(folder.parent)


def test_what_slurm_refuses_is_said_and_leaves_nothing(tmp_path, sbatch):
    sbatch("echo 'sbatch: error: invalid partition' >&2; exit 1")
    with pytest.raises(PrlError, match=r"sbatch does not take .*/job.sh: sbatch: error: invalid partition"):
        submit_run(tmp_path)
    assert not (tmp_path / "out" / "run").exists()


def test_an_sbatch_that_says_nothing_is_not_waited_for(tmp_path, sbatch, monkeypatch):
    monkeypatch.setattr(submit, "ANSWER_S", 0.3)
    sbatch("exec sleep 60")
    with pytest.raises(PrlError, match="it said nothing within 0.3 s"):
        submit_run(tmp_path)


def test_one_that_waits_for_the_job_ends_with_its_status(tmp_path, sbatch):
    sbatch("echo 12; sleep 0.2; exit 3")
    with pytest.raises(PrlError, match=r"job 12 ended with status 3: .*/12.log"):
        submit_run(tmp_path, "+launcher.sbatch.wait=true")
    assert Path(tmp_path / "out" / "run" / "slurm" / "job.sh").exists()
