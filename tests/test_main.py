"""The `prl` command: which module a subcommand starts, and what it imports before that."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
from importlib.metadata import version

import hydra
import pytest
from omegaconf import OmegaConf

from prl import __main__ as command
from prl.config.compose import CONF, options
from prl.config.suggestions import keys_of


@pytest.fixture
def prl(monkeypatch):
    """`prl(*arguments)`: the command with these arguments on its command line."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["prl", *arguments])
        monkeypatch.setattr(sys, "path", [*sys.path])
        command.main()

    return run


@pytest.fixture
def started(monkeypatch):
    """The modules that were started, each with its arguments."""
    found = []
    monkeypatch.setattr(command.runpy, "run_module", lambda module, **how: found.append((module, sys.argv, how)))
    return found


@pytest.mark.parametrize("name", command.SUBCOMMANDS)
def test_a_subcommand_starts_its_module(prl, started, name):
    prl(name, "seed=1", "--help")
    module, *_ = command.SUBCOMMANDS[name]
    assert importlib.util.find_spec(module)
    assert started == [(module, [f"prl {name}", "seed=1", "--help"], {"run_name": "__main__", "alter_sys": True})]


def test_the_console_script_finds_modules_of_the_working_directory(prl, monkeypatch, tmp_path):
    """An installer writes one whose `sys.path` begins with the folder of scripts."""
    seen = []
    monkeypatch.setattr(command.runpy, "run_module", lambda module, **how: seen.append(sys.path[0]))
    monkeypatch.chdir(tmp_path)
    prl("env", "check", "math")
    assert seen == [str(tmp_path)]


@pytest.mark.parametrize("arguments", [[], ["trian"]])
def test_another_word_is_refused_with_the_usage(prl, started, capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        prl(*arguments)
    assert caught.value.code == 2 and not started and "\n  train " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("trian", "'trian': did you mean train?"),
        ("serv", "'serv': did you mean serve?"),
        ("rollout", "'rollout': did you mean rollouts?"),
        ("xyz", "'xyz'"),
    ],
)
def test_a_misspelt_subcommand_is_guessed(prl, capsys, typed, says):
    with pytest.raises(SystemExit):
        prl(typed)
    assert capsys.readouterr().err.splitlines()[0] == f"prl: no subcommand {says}"


def test_help_is_the_usage_and_the_version_the_packages(prl, started, capsys):
    prl("--help")
    assert capsys.readouterr().out == command.USAGE + "\n"
    prl("--version")
    assert capsys.readouterr().out.strip() == version("prl") and not started


def test_nothing_but_the_package_is_imported_for_the_usage():
    code = """if True:
        import sys
        from prl.__main__ import main
        sys.argv = ["prl", "--help"]
        main()
        print([name for name in sys.modules if name.partition(".")[0] in ("prl", "hydra", "omegaconf", "torch")])
    """
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines()[-1] == "['prl', 'prl.__main__']"


def test_ctrl_c_during_imports_stops_the_command(tmp_path):
    (tmp_path / "hydra.py").write_text("raise KeyboardInterrupt")
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-m", "prl", "train"], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped\n")
    code = "import prl, hydra"  # in a program of somebody else's it is theirs
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGINT and "KeyboardInterrupt" in done.stderr


@pytest.mark.parametrize("arguments", [["train", "dry_run=true"], ["report", "x"], ["doctor"]])
def test_a_folder_that_is_gone_is_a_line(tmp_path, arguments):
    (tmp_path / "gone").mkdir()
    script = 'cd "$1"; rmdir "$1"; shift; exec "$@"'
    command = ["sh", "-c", script, "sh", str(tmp_path / "gone"), sys.executable, "-P", "-m", "prl", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("error: the current folder") and done.stderr.count("\n") == 1


OF_HYDRA = {"train": "train", "eval": "eval", "chat": "eval", "serve": "serve"}


@pytest.fixture(scope="module")
def helps():
    """What the commands print for `--help`."""
    return {name: printed(name, "--help") for name in OF_HYDRA}


def printed(*arguments):
    code = f"""if True:
        import atexit, sys
        from prl.__main__ import main
        sys.argv = ["prl", *{arguments!r}]
        heavy = {{"torch", "vllm", "transformers", "verifiers"}}
        atexit.register(lambda: print(sorted(heavy & set(sys.modules))))
        main()
    """
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("name", OF_HYDRA)
def test_help_fits_a_screen_and_names_options_that_there_are(helps, name):
    *lines, last, imported = helps[name].splitlines()
    assert (last, imported) == ("all options: --help=all", "[]"), "nothing heavy is imported"
    assert len(lines) < 40 and max(map(len, lines)) <= 80
    options = re.findall(r"^  ([\w.]+)=(\S*)  ", helps[name], re.M)
    assert len(options) == 10
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        config = hydra.compose(OF_HYDRA[name], [])
        shown = [f"{key}={default}" for key, default in options if "…" not in default]
        again = hydra.compose(OF_HYDRA[name], shown)
        assert OmegaConf.to_container(again) == OmegaConf.to_container(config), "defaults as they are"
        assert {key for key, default in options if "…" in default} <= set(keys_of(config))


@pytest.mark.parametrize("name", OF_HYDRA)
def test_the_examples_of_help_compose(helps, name, monkeypatch):
    examples = re.findall(rf"^  (?:.*[|] )?(?:\w+=\S+ )?prl {name} (.*?)(?:   .*)?$", helps[name], re.M)
    assert len(examples) >= 3
    for example in examples:
        overrides = [each.replace("0,1,2", "0").replace("grpo,max_rl", "grpo") for each in example.split()]
        overrides = [each for each in overrides if "=" in each and "run.resume" not in each and "run.fork" not in each]
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            assert hydra.compose(OF_HYDRA[name], overrides)


def test_all_options_are_behind_help_all():
    shown = printed("train", "--help=all")
    assert all(f"    {group}: " in shown for group in options()) and "--cfg job --resolve" in shown
