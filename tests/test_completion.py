"""Completion in the shell: what may follow, and a real bash that asks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from prl.completion import BASH, candidates

MODES = ("auto", "live", "plain", "quiet")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("prl t", ["timeline ", "train "]),
        ("prl train model=tiny-", ["model=tiny-teacher "]),
        ("python -m prl.train algo=op", ["algo=opd ", "algo=opsd "]),
        ("prl train +algo@envs.math.algo=max", ["+algo@envs.math.algo=max_rl "]),
        ("python -m prl train env=g", ["env=gsm8k ", "env=guess "]),
        ("prl train trainer.opt", ["trainer.optim."]),
        ("prl train algo=opd algo.teacher.n", ["algo.teacher.name="]),
        ("prl train nonsense=1 max_s", ["max_steps="]),
        ("prl train model.dtype=b", ["model.dtype=bfloat16 "]),
        ("prl train monitor.console.mode=", [f"monitor.console.mode={mode} " for mode in MODES]),
        ("prl train trainer.share_prefixes=t", ["trainer.share_prefixes=true "]),
        ("prl train sampling.top_p=", ["sampling.top_p=1.0 "]),
        ("prl train max_steps=3 --fr", ["--from "]),
        ("prl train --from f", ["first "]),
        ("prl rollouts ", ["first "]),
        ("prl timeline ", ["first "]),
        ("prl replay ", ["first "]),
        ("prl replay first max_s", ["max_steps="]),
        ("prl replay first trainer.share_prefixes=t", ["trainer.share_prefixes=true "]),
        ("prl replay first --t", ["--trust "]),
        ("prl completion ", ["bash "]),
        ("prl nonsense ", ["first "]),
        ("prl env ", ["check "]),
        ("prl env check ma", ["math ", "math_retry "]),
        ("python -m prl.env check gu", ["guess "]),
        ("prl eval ti", ["tiny ", "tiny-teacher "]),
        ("prl eval tiny fi", ["first "]),
        ("prl eval exp", []),
        ("prl eval env=g", ["env=gsm8k ", "env=guess "]),
        ("prl chat t", ["tiny ", "tiny-teacher "]),
        ("prl chat tiny s", ["sampling.", "sampling=", "seed=", "smollm2 "]),
        ("prl chat tiny env", []),
        ("prl chat --f", []),
        ("prl train env=[math,gu", ["env=[math,guess"]),
        ("prl train env=[math,mat", ["env=[math,math_retry"]),
        ("prl train -m algo=grpo,op", ["algo=grpo,opd ", "algo=grpo,opsd "]),
        ("python -m http.server ", []),
        ("python scri", []),
    ],
)  # fmt: skip
def test_what_may_follow(line, found, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs" / "first").mkdir(parents=True)
    (tmp_path / "outputs" / "first" / "config.yaml").touch()
    assert candidates(line) == found


ASK = """
ask() {
    COMP_LINE="$1"; COMP_POINT=${#1}; COMPREPLY=()
    _prl_complete "${1%% *}"
    printf '%s|' "${COMPREPLY[@]}"; echo
}
complete -p prl python
ask "prl train algo=op"; ask "prl train env=[math,gu"
ask "python -m prl.train trainer.sch"; ask "python -m http.server x"
"""


def test_bash_asks_and_gets_the_part_after_its_word_break():
    folder = str(Path(sys.executable).parent)
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    prl = f'prl() {{ {sys.executable} -m prl "$@"; }}\n'  # the console script of this checkout
    done = subprocess.run(["bash", "--norc", "-c", BASH + prl + ASK], env=env, capture_output=True, text=True)
    *registered, groups, listed, keys, foreign = done.stdout.splitlines()
    assert [line.split()[-1] for line in registered] == ["prl", "python"], done.stderr
    assert (groups, listed, keys, foreign) == ("opd |opsd |", "[math,guess|", "trainer.schedule.|", "|")


def test_the_command_prints_the_script():
    done = subprocess.run([sys.executable, "-m", "prl", "completion", "bash"], capture_output=True, text=True)
    assert done.stdout == BASH
