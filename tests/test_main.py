"""The `prl` command: which module a subcommand starts, and what it imports before that."""

import subprocess
import sys

import pytest

from prl import __main__ as command


@pytest.fixture
def prl(monkeypatch):
    """`prl(*arguments)`: the command with these arguments on its command line."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["prl", *arguments])
        command.main()

    return run


@pytest.fixture
def started(monkeypatch):
    """The modules that were started, each with its arguments."""
    found = []
    monkeypatch.setattr(command.runpy, "run_module", lambda module, **how: found.append((module, sys.argv, how)))
    return found


@pytest.mark.parametrize(
    "name, module",
    [("train", "prl.train"), ("serve", "prl.serve"), ("view", "prl.viewer"), ("report", "prl.report")],
)
def test_a_subcommand_starts_its_module(prl, started, name, module):
    prl(name, "seed=1", "--help")
    assert started == [(module, [f"prl {name}", "seed=1", "--help"], {"run_name": "__main__", "alter_sys": True})]


@pytest.mark.parametrize("arguments, says", [([], "no subcommand given"), (["trian"], "no subcommand 'trian'")])
def test_another_word_is_refused_with_the_usage(prl, started, capsys, arguments, says):
    with pytest.raises(SystemExit) as caught:
        prl(*arguments)
    assert caught.value.code == 2 and not started
    said = capsys.readouterr().err
    assert says in said and all(f"\n  {name} " in said for name in command.SUBCOMMANDS)


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_is_the_usage(prl, started, capsys, option):
    prl(option)
    assert capsys.readouterr().out == command.USAGE + "\n" and not started


def test_nothing_but_the_package_is_imported_for_the_usage():
    code = """if True:
        import sys
        from prl.__main__ import main
        sys.argv = ["prl", "--help"]
        main()
        print([name for name in sys.modules if name.partition(".")[0] in ("prl", "hydra", "omegaconf", "torch")])
    """
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.splitlines()[-1] == "['prl', 'prl.__main__']"


def test_it_is_the_same_as_the_module():
    arguments = ["--cfg", "job", "max_steps=7", "run.name=x"]
    said = [
        subprocess.run([sys.executable, "-m", *module, *arguments], capture_output=True, text=True, check=True).stdout
        for module in (["prl", "train"], ["prl.train"])
    ]
    assert said[0] == said[1] and "max_steps: 7" in said[0]
