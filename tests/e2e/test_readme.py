"""The pages of the tree: their commands parse and compose, examples of one's own code train, links lead somewhere."""

import json
import os
import re
import shlex
import sys
import types
from pathlib import Path

import hydra
import pytest
import yaml
from prepared_run import validated

import prl.tools.env_check
import prl.tools.report.__main__
import prl.tools.rollouts.__main__
import prl.tools.watch.__main__
from prl.__main__ import SUBCOMMANDS
from prl.config.compose import CONF, compose, options, to_config
from prl.config.evaluation import EvaluationConfig
from prl.launch import resume
from prl.launch.components import build_components
from prl.serve import TINKER
from prl.tools.evaluation.arguments import to_overrides

ROOT = Path(__file__).parents[2]
FOLDERS = ("prl", "conf", "experiments", ".github", "skills")
PAGES = {
    path: path.read_text()
    for path in (
        ROOT / "README.md",
        ROOT / "AGENTS.md",
        ROOT / "CHANGELOG.md",
        *(p for f in FOLDERS for p in (ROOT / f).rglob("*.md")),
    )
}
BLOCKS = [
    (path, language, text)
    for path, page in PAGES.items()
    for language, text in re.findall(r"^```(\w*)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
]
NAMED = re.compile(r"(?:# @package .*\n)?# (my_[\w/]+\.(?:py|yaml))\n")
FILES = {found.group(1): text for _, _, text in BLOCKS if (found := NAMED.match(text))}
FILES["my.jsonl"] = next(text for _, language, text in BLOCKS if language == "json")
MODULES = {module: name for name, (module, _) in SUBCOMMANDS.items()}
NOT_OURS = ("ray", "source", "xdg-open", "ruff", "pre-commit", "pytest", "pip", "export")


def commands():
    """Every distinct command of the pages, as (program, *arguments): in blocks, and trainings within the text."""
    lines = [line for _, language, text in BLOCKS if language == "bash" for line in text.splitlines()]
    lines += [line for page in PAGES.values() for line in re.findall(r"`((?:python -m prl\.|prl )train[^`…]*)`", page)]
    found = {}
    for line in lines:
        words = shlex.split(line, comments=True)
        while words:
            end = words.index("&&") if "&&" in words else len(words)
            program, *rest = words[:end]
            words = words[end + 1 :]
            if [program, *rest[:1]] == ["python", "-m"]:
                program, rest = MODULES.get(rest[1], rest[1]), rest[2:]
            elif program in ("prl", "python"):
                program, *rest = rest
            found[program, *rest] = None
    return list(found)


def choices(arguments):
    """The overrides that decide whether a command composes; of a sweep, its first job's."""
    found = [argument for argument in arguments if argument not in ("-m", "--cfg", "job", "--resolve")]
    if "-m" in arguments:
        found = [re.sub(r"=([^,\[(\"]+),.*", r"=\1", argument) for argument in found if "=tag(" not in argument]
    trivial = ["run.name=", "max_steps=", "seed=", "sweep=", "hydra.sweeper"]
    if not any(argument.startswith("experiment=") for argument in found):  # which may have another
        trivial.append("algo=grpo")
    return tuple(sorted(argument for argument in found if not argument.startswith(tuple(trivial))))


COMMANDS = commands()
TRAIN = [arguments for program, *arguments in COMMANDS if program == "train"]
OWN = [arguments for arguments in TRAIN if any("my_" in argument for argument in arguments)]
INLINE = [arguments for arguments in OWN if not any(argument.startswith("engine=") for argument in arguments)]
"""All but the example of an engine, which `test_own_engine.py` trains."""


def together(examples):
    """Examples that replace different parts share a run: (overrides) of each run."""
    runs = []
    for arguments in examples:
        parts = {re.match(r"\W?(\w+)", argument)[1] for argument in arguments} - {"hydra"}
        parts |= {"filters"} if "env" in parts else set()  # the example's filter is about replies of the default env
        run = next((run for run in runs if not parts & run[0]), None)
        if run is None:
            runs.append(run := (set(), []))
        run[0].update(parts)
        run[1].extend(argument for argument in arguments if argument not in run[1])
    return [overrides for _, overrides in runs]


OPTIONS = {(f"{group}={name}",) for group, names in options().items() for name in names}
COMPOSED = sorted(  # `tests/conf` composes each option alone
    {
        choices(each)
        for each in TRAIN
        if each not in OWN
        and not {"--help", "--help=all", "--config-dir"} & set(each)
        and not re.search("run.(resume|fork)=", str(each))
    }
    - OPTIONS
)
OTHERS = [(program, *arguments) for program, *arguments in COMMANDS if program != "train"]


def test_the_pages_have_what_this_reads():
    assert len(PAGES) >= 25 and len(FILES) >= 11 and len(OWN) >= 10 and len(COMPOSED) >= 40 and len(OTHERS) >= 20


def test_the_readme_is_one_screen_or_two():
    assert len(PAGES[ROOT / "README.md"].splitlines()) <= 100


def test_an_example_that_stands_twice_is_the_same():
    texts = {(NAMED.match(text).group(1), text) for _, _, text in BLOCKS if NAMED.match(text)}
    assert len(texts) == len({name for name, _ in texts})


@pytest.mark.parametrize("arguments", COMPOSED, ids=" ".join)
def test_a_command_composes(arguments, monkeypatch):
    monkeypatch.setenv("PRL_TEACHER_KEY", "x")
    monkeypatch.setenv("PRL_TOKEN", "x")
    config = compose(["run.name=x", *arguments])
    validated(config)
    build_components(config)


@pytest.mark.parametrize("words", OTHERS, ids=" ".join)
def test_another_command_parses(words, tmp_path, monkeypatch):
    program, *arguments = words
    if program in NOT_OURS:
        return
    if program in ("eval", "chat"):
        if not any(each.startswith("env=") for each in arguments):  # its envs are those of a run, which is not here
            arguments = [each for each in arguments if not each.startswith("envs.")]
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            to_config(EvaluationConfig, hydra.compose("eval", to_overrides(arguments)), arguments)
    elif program == "serve":  # its name follows what Hydra chose when it runs
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            given = [each for each in arguments if "=" in each and each not in (TINKER, "--help=all")]
            assert hydra.compose("tinker" if TINKER in arguments else "serve", given)
    elif program in ("report", "rollouts", "watch"):
        module, last = {
            "report": (prl.tools.report.__main__, "report"),
            "rollouts": (prl.tools.rollouts.__main__, "page"),
            "watch": (prl.tools.watch.__main__, "watch"),
        }[program]
        monkeypatch.setattr(module, last, lambda *args, **how: True)
        assert module.main(arguments) == 0
    elif program == "env":
        write_files(tmp_path)
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(sys, "argv", ["prl env", *arguments])
        prl.tools.env_check.main()
    elif program.startswith("prl."):
        assert (ROOT / (program.replace(".", "/") + ".py")).exists()
    else:
        script = ROOT / program
        of_a_page = script.suffix == ".py" and ROOT / "experiments" in script.parents
        assert script.is_file() and (of_a_page or (script.parent == ROOT / "scripts" and os.access(script, os.X_OK)))


def test_every_way_to_go_on_is_understood(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "outputs" / "my-run"
    (run / "checkpoints" / "step_000040").mkdir(parents=True)
    (run / "config.yaml").write_text("envs: {}")
    ways = [each for arguments in TRAIN for each in [[a.replace("<run>", "outputs/my-run") for a in arguments]]]
    ways = [arguments for arguments in ways if any(each.startswith(("run.resume=", "run.fork=")) for each in arguments)]
    assert len(ways) > 3
    for arguments in ways:
        auto = "run.resume=auto" in arguments
        assert resume.expanded(arguments)[:2] == (arguments[:2] if auto else ["--config-dir", str(run)])


def test_every_subcommand_named_exists():
    named = {name for page in PAGES.values() for name in re.findall(r"`prl ([a-z]\w*)", page)}
    assert named <= set(SUBCOMMANDS) and set(SUBCOMMANDS) <= named


@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if b[1] in ("python", "yaml", "json")], ids=lambda b: b[0].parent.name
)
def test_a_block_is_what_it_says(block, monkeypatch):
    """Code has what it imports; what is no example of a file is executed."""
    _, language, text = block
    if language == "python":
        module = types.ModuleType("a_block")
        monkeypatch.setitem(sys.modules, "a_block", module)
        exec(compile(text, "a_block", "exec"), vars(module))
    for line in text.splitlines() if language == "json" else ():
        assert json.loads(line)
    if language == "yaml":
        assert yaml.safe_load(text)


def test_every_link_leads_to_a_file():
    for path, page in PAGES.items():
        for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", page, flags=re.DOTALL)):
            if link.startswith(("http://", "https://")):
                continue
            name, _, anchor = link.partition("#")
            target = (path.parent / name).resolve() if name else path
            assert target.exists(), f"{path.relative_to(ROOT)}: {link}"
            if anchor:
                assert anchor in anchors(PAGES[target]), f"{path.relative_to(ROOT)}: {link}"


def anchors(page):
    """What GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def write_files(folder):
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", together(INLINE), ids=" ".join)
def test_the_examples_train(inline, tmp_path, monkeypatch, arguments):
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    run = inline(*arguments, "max_steps=2", "orchestrator.batch_size=64", "orchestrator.eval.num_tasks=2")
    assert run.status == 0, run.stderr
    assert all(line["tokens/rl"] > 0 for line in run.steps[1:])
