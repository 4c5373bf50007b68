"""What a job for Slurm is refused for, and its script."""

import shlex
import subprocess
from dataclasses import replace

import pytest

from prl.base.errors import ConfigError
from prl.config.compose import compose
from prl.launch.slurm import SlurmLauncher
from prl.train import main


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    """An `sbatch` that records its arguments and its script, and answers with a job's number and its cluster."""
    program = tmp_path / "sbatch"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/flags\ncat > {tmp_path}/script\necho "7;prl"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"args": {"time": 10}}, "launcher.args.time: the launcher sets that option of sbatch itself"),
        ({"time_min": 1}, "launcher.time_min=1: checkpoint.grace_s and the end take 90 s"),
    ],
)
def test_a_job_is_refused_before_it_is_submitted(sbatch, tmp_path, options, message):
    launcher, config = SlurmLauncher(**options), compose([f"run.dir={tmp_path / 'x'}"])
    with pytest.raises(ConfigError, match=message):
        launcher.submit(config.run, config.checkpoint.grace_s, ["seed=1"])
    assert not (sbatch / "flags").exists()


def test_a_job_goes_on_by_itself_alone(sbatch, tmp_path):
    run = replace(compose([f"run.dir={tmp_path / 'x'}"]).run, resume="/tmp/x")
    with pytest.raises(ConfigError, match="launcher=slurm goes on with run.resume=auto"):
        SlurmLauncher().submit(run, 60.0, ["run.resume=/tmp/x"])
    assert not (sbatch / "flags").exists()


def test_a_job_of_a_sweep_submits_nothing(sbatch, tmp_path):
    with pytest.raises(ConfigError, match="for jobs of a sweep choose sweep=slurm"):
        main(compose([f"run.dir={tmp_path / 'x'}", "launcher=slurm"]))
    assert not (sbatch / "flags").exists()


def test_a_machine_without_slurm_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no sbatch here"):
        SlurmLauncher().submit(compose([f"run.dir={tmp_path / 'x'}"]).run, 60.0, ["seed=1"])


def test_what_sbatch_refuses_is_passed_on(sbatch, tmp_path):
    (sbatch / "sbatch").write_text("#!/bin/sh\ncat > /dev/null\necho 'sbatch: error: invalid partition' >&2\nexit 1\n")
    with pytest.raises(ConfigError, match="invalid partition"):
        SlurmLauncher().submit(compose([f"run.dir={tmp_path / 'x'}"]).run, 60.0, ["seed=1"])


def test_a_job_runs_the_typed_command_with_ray(sbatch, tmp_path, capsys):
    folder = tmp_path / "a b%" / "x"
    typed = ["launcher=slurm", "launcher.nodes=2", "+launcher.args.account=me", "seed=3", "loss=aipo", "run.name=x"]
    launcher = SlurmLauncher(nodes=2, args={"account": "me", "exclusive": True}, setup=["module load cuda"])
    launcher.submit(compose([f"run.dir='{folder}'", "run.name=x"]).run, 60.0, typed)
    flags = (sbatch / "flags").read_text().splitlines()
    wanted = {"--nodes=2", "--account=me", "--exclusive", "--requeue", "--signal=B:USR1@90", "--job-name=x"}
    assert wanted <= set(flags) and not any(flag.startswith(("--time", "--partition")) for flag in flags)
    assert f"--output={str(folder).replace('%', '%%')}.slurm-%j.log" in flags
    script = (sbatch / "script").read_text()
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert script.index("module load cuda") < script.index("symmetric-run")
    (line,) = [line for line in script.splitlines() if " -m prl.train " in line]
    arguments = shlex.split(line.rstrip(")").partition(" -m prl.train ")[2])
    own = ["launcher=ray", "launcher.wait_s=300", f"run.dir='{folder}'", "run.name='x'", "run.resume='auto'"]
    assert arguments == ["seed=3", "loss=aipo", *own]
    assert f"job 7, log: {folder}.slurm-7.log\nrun directory: {folder}\n" == capsys.readouterr().err
