"""`python -m prl.train`: what it prints, what it refuses, and what it leaves behind."""

import os
import signal
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from prl import train
from prl.config.build import plain
from prl.config.compose import compose
from prl.config.suggestions import keys_of
from prl.launch import command
from prl.launch.signals import stopping

HEAVY = {"torch", "vllm", "verifiers", "transformers", "renderers", "aiohttp", "wandb"}


def test_cfg_job_prints_every_option_and_imports_nothing_heavy(tmp_path):
    arguments = [sys.executable, "-X", "importtime", "-m", "prl.train", "--cfg", "job", "--resolve"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 0
    imported = {
        line.rsplit("|", 1)[1].strip().split(".")[0] for line in done.stderr.splitlines() if line.count("|") == 2
    }
    assert {"hydra", "omegaconf", "prl"} <= imported, "the measurement itself"
    assert not imported & HEAVY
    printed = OmegaConf.create(done.stdout)
    assert "${" not in done.stdout
    expected = OmegaConf.create(plain(compose(["run.name=x"])))
    assert set(keys_of(printed)) == set(keys_of(expected))
    assert not list(tmp_path.iterdir())


@pytest.fixture
def refused(tmp_path, monkeypatch, capfd):
    """`refused(*arguments)`: what the command with these arguments, run in this process, says on stderr."""
    handlers = {number: signal.getsignal(number) for number in stopping()}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "_started", False)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["prl.train", *arguments])
        with pytest.raises(SystemExit) as caught:
            command.run(train._job, list(arguments))
        output = capfd.readouterr()
        assert caught.value.code == command.REFUSED and output.out == "" and "Traceback" not in output.err
        return output.err

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("env=nope", "error: there is no env=nope: choose "),
        ("max_stepz=3", "max_stepz: did you mean max_steps?"),
        ("+max_stepz=3", "error: max_stepz: there is no such key"),
        ("max_steps=abc", "error: max_steps=abc: Input should be a valid integer"),
        ("model=hf", "error: model.path has no value: give one, model.path=<value>"),
        ("envs.math.args.max_operan=3", "did you mean envs.math.args.max_operand?"),
        ("orchestrator.batch_size=7", "error: orchestrator.batch_size=7 must be divisible"),
    ],
)
def test_bad_command_line_says_what_is_wrong(refused, tmp_path, override, says):
    assert says in refused(override)
    assert not list(tmp_path.iterdir())


def test_a_module_that_cannot_be_imported_is_named_with_its_error(refused, tmp_path, monkeypatch):
    (tmp_path / "conf" / "algo").mkdir(parents=True)
    (tmp_path / "conf" / "algo" / "mine.yaml").write_text("_target_: my_broken_algo.Best\n")
    (tmp_path / "my_broken_algo.py").write_text("raise RuntimeError('\\x1b]0;at the top\\x07')\n")
    monkeypatch.syspath_prepend(tmp_path)
    output = refused("algo=mine", f"hydra.searchpath=[file://{tmp_path}/conf]", f"run.dir={tmp_path}/a/run")
    assert output.splitlines()[-1].startswith("error: algo._target_='my_broken_algo.Best': ")
    assert r"\x1b]0;at the top\x07" in output, "as a terminal may show it"
    assert not (tmp_path / "a").exists()
