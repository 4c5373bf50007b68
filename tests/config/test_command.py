"""`python -m prl.train`: what it prints, what it refuses, and what it leaves behind."""

import json
import os
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from prl.config.build import plain
from prl.config.compose import compose
from prl.config.suggestions import keys_of

HEAVY = {"torch", "vllm", "verifiers", "transformers", "renderers", "aiohttp", "wandb"}


def train(folder, *arguments, python=()):
    return subprocess.run(
        [sys.executable, *python, "-m", "prl.train", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture
def run_train(run_command):
    """`run_train(folder, *arguments)`: `train` in a process that has imported libraries already."""
    return lambda folder, *arguments: run_command(folder, "prl.train", *arguments)


def test_cfg_job_prints_every_knob_and_imports_nothing_heavy(tmp_path):
    done = train(tmp_path, "--cfg", "job", "--resolve", python=("-X", "importtime"))
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


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["env=nope"], 2, ["error: there is no env=nope: choose ", "math", "reverse_text"]),
        (["max_stepz=3"], 2, ["max_stepz: did you mean max_steps?"]),
        (["trainer.optim.learning_rate=1"], 2, ["trainer.optim.learning_rate"]),
        (["+max_stepz=3"], 2, ["error: max_stepz: there is no such key", "did you mean max_steps?"]),
        (["max_steps=abc"], 2, ["max_steps", "abc", "Integer"]),
        (["model=hf"], 2, ["error: model.path has no value", "model.path=<value>"]),
        (["teacher.client.base_url=x"], 2, ["teacher.client.base_url"]),
        (
            ["teacher.base_url=http://x/v1"],
            2,
            ["error: teacher.base_url=http://x/v1: teacher=local", "teacher=endpoint"],
        ),
        (
            ["env=guess", "envs.guess.args.max_sise=30"],
            2,
            ["did you mean envs.guess.args.max_size"],
        ),
        (["algo=opd", "teacher=endpoint"], 2, ["error: teacher.name has no value", "teacher.base_url=http"]),
        (["orchestrator.batch_size=7"], 2, ["error: orchestrator.batch_size=7 must be divisible"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_bad_command_line_says_what_is_wrong_and_leaves_nothing_behind(tmp_path, run_train, arguments, code, says):
    done = run_train(tmp_path, *arguments, f"run.dir={tmp_path}/a/run")
    assert done.returncode == code, done.stderr
    assert all(text in done.stderr for text in says), done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""
    assert not list(tmp_path.iterdir())


def test_a_module_that_cannot_be_imported_is_named_with_its_error(run_train, tmp_path):
    (tmp_path / "conf" / "algo").mkdir(parents=True)
    (tmp_path / "conf" / "algo" / "mine.yaml").write_text("_target_: my_algo.Best\n")
    (tmp_path / "my_algo.py").write_text("raise RuntimeError('\\x1b]0;at the top\\x07')\n")
    done = run_train(tmp_path, "algo=mine", f"hydra.searchpath=[file://{tmp_path}/conf]", f"run.dir={tmp_path}/a/run")
    assert done.returncode == 2 and done.stderr.startswith("error: algo._target_='my_algo.Best': ")
    assert r"\x1b]0;at the top\x07" in done.stderr, "as a terminal may show it"
    assert not (tmp_path / "a").exists()


def test_a_default_run_that_is_refused_leaves_no_run_directory(tmp_path):
    assert train(tmp_path, "max_steps=0").returncode == 2
    assert not list(tmp_path.glob("outputs/*"))


def test_a_sweep_runs_every_job_even_where_one_is_refused(run_train, tmp_path):
    done = run_train(tmp_path, "-m", "max_steps=0,-1", "orchestrator.group_size=8")
    assert done.returncode != 0
    assert "refused: max_steps=0: " in done.stderr and "refused: max_steps=-1: " in done.stderr
    (sweep,) = (tmp_path / "outputs").iterdir()
    assert sweep.name.startswith("sweep-max_steps-")
    results = [json.loads((sweep / f"max_steps={steps}" / "result.json").read_text()) for steps in (0, -1)]
    assert [result["status"] for result in results] == ["refused", "refused"]
    assert "max_steps=-1" in done.stderr.split("sweep: ")[1] and "Traceback" not in done.stderr
