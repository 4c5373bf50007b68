"""The README's commands compose, and its examples of one's own code train."""

import re
import shlex
from pathlib import Path

import pytest

from prl.compose import compose
from prl.config.validate import validate
from prl.launch.components import build_components

README = (Path(__file__).parents[2] / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
FILES = {
    found.group(1): text
    for language, text in BLOCKS
    if language in ("python", "yaml") and (found := re.match(r"(?:# @package .*\n)?# (my_[\w/]+\.(?:py|yaml))\n", text))
}
COMMANDS = [
    shlex.split(line, comments=True)[3:]
    for language, text in BLOCKS
    if language == "bash"
    for line in text.splitlines()
    if line.startswith("python -m prl.train")
]
OWN = [arguments for arguments in COMMANDS if any("my_" in argument for argument in arguments)]
PRLS = [arguments for arguments in COMMANDS if arguments not in OWN and "--cfg" not in arguments]


def test_the_readme_has_what_this_reads():
    assert len(FILES) >= 7 and len(OWN) >= 6 and len(PRLS) >= 15


@pytest.mark.parametrize("arguments", PRLS, ids=" ".join)
def test_a_command_composes(arguments, monkeypatch):
    monkeypatch.setenv("PRL_TEACHER_KEY", "x")
    choices = [argument for argument in arguments if argument != "-m"]
    if "-m" in arguments:  # a sweep: its first job
        choices = [re.sub(r"=([^,\[]+),.*", r"=\1", argument) for argument in choices]
    config = compose([*choices, *([] if "run.name" in " ".join(choices) else ["run.name=x"])])
    validate(config)
    build_components(config)


@pytest.mark.engine
@pytest.mark.parametrize("arguments", OWN, ids=" ".join)
def test_an_example_trains(train, tmp_path, arguments):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    run = train(*arguments, "max_steps=2", "orchestrator.batch_size=64", "orchestrator.eval.num_tasks=2")
    assert run.status == 0, run.stderr
    assert all(line["tokens/rl"] > 0 for line in run.steps[1:])
