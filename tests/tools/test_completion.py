"""Completion in shells: the words against the config that Hydra composes, and the scripts in the shells themselves."""

import importlib
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import hydra
import pytest

from prl.config.compose import CONF
from prl.config.suggestions import keys_of
from prl.tools.completion import __main__ as completion


def composed(root, overrides):
    """Every dotted key that Hydra knows after the overrides."""
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return set(keys_of(hydra.compose(root, overrides)))


@pytest.mark.parametrize(
    ("root", "overrides"),
    [
        ("train", []),
        ("train", ["env=[guess,tools]", "algo=opd", "loss=ppo", "optim=muon", "teacher=endpoint", "filters=none"]),
        ("train", ["experiment=dapo", "+algo@envs.math.algo=opd", "+sampling@envs.math.sampling=greedy"]),
        ("train", ["debug=fast", "schedule=cosine", "monitor=[wandb]", "max_steps=3"]),
        ("eval", ["env=maze", "engine=transformers"]),
        ("serve", ["model=hf"]),
        ("tinker", ["engine=default"]),
    ],
)
def test_the_keys_are_those_that_hydra_composes(root, overrides):
    found = set(completion.keys_after(root, overrides))
    if "experiment=dapo" in overrides:
        overrides = [*overrides, "env=math", "model=tiny"]
    known = composed(root, overrides)
    assert found <= known
    values = known - {key.rpartition(".")[0] for key in known}
    inline = ("envs.maze.args.config.", "envs.tools.args.")  # mappings within a line
    assert not {key for key in values - found if "._" not in f".{key}" and not key.startswith(inline)}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("prl", set()),
        ("prl tr", {"train"}),
        ("prl completion z", {"zsh"}),
        ("prl env ", {"check"}),
        ("prl env check kuhn", {"kuhn_poker"}),
        ("prl train --cfg", {"--cfg"}),
        ("prl report --", {"--help", "--metric", "--threshold", "--out"}),
        ("prl watch a --p", {"--port"}),
        ("prl rollouts a --", {"--help", "--step", "--env", "--eval"}),
        ("prl env check math --r", {"--reply"}),
        ("prl completion -", {"--help"}),
        ("prl trian --", {"--help"}),
        ("prl train algo=m", {"algo=max_rl"}),
        ("prl train -m algo=grpo,m", {"algo=grpo,max_rl"}),
        ("prl train env=[math,gu", {"env=[math,guess"}),
        ("prl train +algo@envs.math.algo=opd", {"+algo@envs.math.algo=opd"}),
        ("prl train trainer.opt", {"trainer.optim."}),
        ("prl train optim=sgd trainer.optim.nest", {"trainer.optim.nesterov="}),
        ("prl train dry_run=", {"dry_run=true", "dry_run=false"}),
        ("prl train engine.device=", {"engine.device=auto", "engine.device=cpu", "engine.device=cuda"}),
        ("prl train ++algo.normalize=", {"++algo.normalize=std", "++algo.normalize=each", "++algo.normalize=null"}),
        ("prl train trainer.optim.betas=", set()),
        ("prl serve pol", {"policy="}),
        ("prl serve algo", set()),
        ("prl serve ap", {"api=tinker"}),
        ("prl serve api=tinker max_r", {"max_rank="}),
        ("prl eval ti", {"tiny", "tiny-teacher", "tiny_vl"}),
        ("prl trian ", set()),
        ("prl train run.resume=outputs/", {"run.resume=outputs/a", "run.resume=outputs/my run"}),
        ("prl report ", {"a", "my run", "grid"}),
        ("prl report my\\ r", {"my run"}),
        ("prl report my\\ ", {"my run"}),
        ("prl report 'my r", {"my run"}),
        ("prl chat a", {"a"}),
    ],
)
def test_what_a_line_can_become(tmp_path, monkeypatch, line, found):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "my run", "bad\x1b[2J"):
        (tmp_path / "outputs" / name).mkdir(parents=True)
        (tmp_path / "outputs" / name / "config.yaml").touch()
    (tmp_path / "outputs" / "grid").mkdir()
    (tmp_path / "outputs" / "grid" / "sweep.json").touch()
    (tmp_path / "outputs" / "other").mkdir()
    if line.endswith("outputs/"):
        found = found | {"run.resume=outputs/grid"}
    assert completion.words(line) == found


@pytest.mark.parametrize("command", ["report", "watch", "rollouts"])
def test_the_flags_are_those_of_the_parser(command, capsys):
    with pytest.raises(SystemExit):
        importlib.import_module(f"prl.tools.{command}.__main__").main(["--help"])
    shown = re.findall(r"^  (?:-h, )?(--[a-z]+)", capsys.readouterr().out, re.M)
    assert completion.words(f"prl {command} --") == set(shown)


def test_it_imports_nothing_that_takes_time():
    code = """if True:
        import sys
        from prl.tools.completion.__main__ import words
        assert words("prl train trainer.opt") == {"trainer.optim."}
        print(sorted({name.partition(".")[0] for name in sys.modules}))
    """
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not set(re.findall(r"\w+", printed)) & {"hydra", "omegaconf", "yaml", "pydantic", "torch", "verifiers"}


SHELLS = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}


def typed_in(shell, folder, keys):
    """Type into a shell on a terminal of its own, and return all that it shows."""
    env = os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "TERM": "dumb", "PS1": "$ "}
    child, terminal = pty.fork()
    if not child:
        os.chdir(folder)
        os.execvpe(SHELLS[shell][0], SHELLS[shell], env | {"HOME": str(folder)})
    os.write(terminal, keys.encode())
    shown = b""
    try:
        while chunk := os.read(terminal, 4096):
            shown += chunk
    except OSError:  # it has ended
        pass
    os.close(terminal)
    os.waitpid(child, 0)
    return shown.decode(errors="replace").replace("\r\n", "\n")


@pytest.fixture
def here(tmp_path):
    """A folder with a program `prl` and a run."""
    program = tmp_path / "prl"
    program.write_text(
        f'#!/bin/sh\n[ "$1" = train ] && shift && echo "given<$*>" && exit\nexec {sys.executable} -m prl "$@"\n'
    )
    program.chmod(0o755)
    for name in ("my run", 'x$(touch made)&"q'):
        (tmp_path / "outputs" / name).mkdir(parents=True)
        (tmp_path / "outputs" / name / "config.yaml").touch()
    return tmp_path


START = {
    "bash": 'eval "$(prl completion bash)"\n',
    "zsh": 'autoload -U compinit; compinit -D; eval "$(prl completion zsh)"\n',
    "fish": "prl completion fish | source\n",
}


@pytest.mark.parametrize("shell", [shell for shell in SHELLS if shutil.which(shell)])
def test_a_tab_completes_in_a_shell(shell, here):
    keys = "prl tr\talgo=max\ttrainer.optim.fus\tf\tengine.dev\tcu\trun.resume=outputs/m\trun.fork=outputs/x\t\n"
    shown = typed_in(shell, here, START[shell] + keys + "exit\n")
    given = "algo=max_rl trainer.optim.fused=false engine.device=cuda run.resume=outputs/my run"
    assert f'given<{given} run.fork=outputs/x$(touch made)&"q>' in shown, shown
    assert not (here / "made").exists()


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_each_shell_has_a_script_that_asks_for_the_words(shell):
    done = subprocess.run([sys.executable, "-m", "prl", "completion", shell], capture_output=True, text=True)
    assert done.returncode == 0 and "completion words" in done.stdout
    assert Path(completion.__file__).with_name(f"{shell}.sh").read_text() == done.stdout


def test_a_pipe_that_closes_ends_it_quietly():
    command = [sys.executable, "-m", "prl", "completion", "words", "prl train "]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as done:
        done.stdout.close()
        assert done.stderr.read() == b""


@pytest.mark.parametrize("arguments", [[], ["tcsh"]])
def test_no_shell_is_refused_with_the_usage(arguments):
    done = subprocess.run([sys.executable, "-m", "prl", "completion", *arguments], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "") and "completion bash" in done.stderr
