"""What a user gets: a wheel with all that the code reads, scripts that start, no paths of a developer's machine."""

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted(path for path in [*(ROOT / "scripts").iterdir(), ROOT / ".ci" / "run"] if path.is_file())

# A path that starts at one of these top folders. Built from parts, so that this line does not match itself; what may
# not stand before it leaves out URLs, relative paths and `$VARIABLE/...`.
MACHINE_PATH = re.compile(r"(?<![\w.~)}\]*-])/(?:" + "|".join(["work", "root", "opt"]) + ")/")


def files_of_checkout() -> list[Path]:
    """Tracked files, and untracked ones that are about to be: everything git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for name in answer.split("\0") if name and (path := ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "--quiet", "-w", str(folder)]
    if importlib.util.find_spec("hatchling"):  # part of the `test` extra; without it pip fetches it
        command.append("--no-build-isolation")
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_wheel_carries_what_the_code_reads(wheel):
    names = set(wheel.namelist())
    assert {"prl/conf/train.yaml", "prl/models/tiny/model.safetensors"} <= names
    for folder, prefix in ((ROOT / "conf", "prl/conf"), (ROOT / "prl", "prl")):
        files = (path for path in folder.rglob("*") if path.is_file() and path.name[0] != ".")
        files = (path.relative_to(folder).as_posix() for path in files if path.parent.name != "__pycache__")
        missing = {f"{prefix}/{name}" for name in files} - names
        assert not missing, f"ignored by git, or left out by hatchling: {sorted(missing)}"


def test_wheel_carries_nothing_else(wheel):
    ours = re.compile(r"(prl|prl-[\d.]+\.dist-info)/(?!.*__pycache__)")
    assert [name for name in wheel.namelist() if not ours.match(name)] == []


def test_wheel_announces_the_vllm_plugin(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    text = wheel.read(name).decode()
    assert "[vllm.general_plugins]\nprl = prl.inference.plugin:register" in text
    assert "prl/inference/plugin.py" in wheel.namelist()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_is_executable_and_parses(script):
    assert os.access(script, os.X_OK), f"chmod +x {script.relative_to(ROOT)}"
    shebang = script.read_text().splitlines()[0]
    if shebang == "#!/usr/bin/env bash":
        checked = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stderr
    else:
        assert shebang in ("#!/usr/bin/env python", "#!/usr/bin/env python3"), "neither of the kinds of script we have"
        ast.parse(script.read_text(), str(script))


@pytest.mark.parametrize(
    "wrong, says",
    [({"PRL_ENGINE": "tpu"}, "choose cpu or gpu"), ({"PRL_PYTHON": "no-such-python"}, "not a Python 3.11 to 3.13")],
)
def test_setup_names_a_wrong_choice_and_makes_nothing(tmp_path, wrong, says):
    (tmp_path / "scripts").mkdir()  # a checkout of its own: the real .venv stays out of it
    for name in ("scripts/setup", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    command = [str(tmp_path / "scripts" / "setup")]
    answer = subprocess.run(command, cwd="/", env={**os.environ, **wrong}, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 1 and says in answer.stderr
    assert not (tmp_path / ".venv").exists()


def test_no_path_of_a_developers_machine():
    found = []
    for path in files_of_checkout():
        content = path.read_bytes()
        if b"\0" in content:
            continue
        for number, line in enumerate(content.decode(errors="replace").splitlines(), 1):
            if MACHINE_PATH.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("top", ["work", "root", "opt"])
def test_the_path_check_itself(top):
    for before in ("", "cd ", "'", "file://", "a=", "PATH=/bin:"):
        assert MACHINE_PATH.search(f"{before}/{top}/x"), before
    for before in ("..", "https://example.org", "$HOME", "${HOME}", "~", "framework"):
        assert not MACHINE_PATH.search(f"{before}/{top}/x"), before
    assert not MACHINE_PATH.search(f"/{top}s/x")
