"""A run directory by somebody who means harm: it is read, shown and evaluated, and nothing in it runs or escapes."""

import json
import sys

import pytest
from made_run import make_run
from omegaconf import OmegaConf

from prl.base.errors import ConfigError
from prl.base.text import CONTROL
from prl.config.build import plain
from prl.config.compose import compose
from prl.config.run_yaml import load
from prl.tools.evaluation.arguments import to_overrides
from prl.tools.report.__main__ import main as report
from prl.tools.report.runs import read_run

MARKUP = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
EVIL = f"\x1b]0;x\x07\x1b[2J\x9b31m\u202e{MARKUP}"


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """A run whose every text is hostile, and whose config names a module that leaves a mark where it is imported."""
    (tmp_path / "hostile_code.py").write_text("import pathlib\npathlib.Path('imported').touch()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "sweep" / "run", steps=2, rollouts=8, tokens_at=(1, 2))
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    lines = [line | {f"reward/{EVIL}/mean": 0.5, f"eval/{EVIL}/avg@1": 0.5} for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = {"status": "failed", "error": EVIL, "ended_because": EVIL, "steps": 2}
    (run / "result.json").write_text(json.dumps(result))
    span = {"process": EVIL, "what": EVIL, "start": 1.0, "stop": 2.0, "step": 1}
    (run / "events" / "evil.jsonl").write_text(json.dumps(span) + f"\n{EVIL}\n")
    (run / "provenance.json").write_text(json.dumps({EVIL: EVIL, "command": EVIL, "cwd": str(tmp_path)}))
    for path in (run / "rollouts").glob("*.jsonl"):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for record in records:
            record["task"] = EVIL
            record["outcome"]["reason"] = EVIL
            for message in record["messages"]:
                message["content"] = EVIL
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = OmegaConf.create(plain(compose(["run.name=run"])))
    for key in ("algo", "sampling", "renderer", "trainer.optim", "launcher"):
        OmegaConf.update(config, f"{key}._target_", "hostile_code.Evil", force_add=True)
    config.envs.math.taskset = "hostile_code"
    OmegaConf.update(config, "teacher.name", EVIL, force_add=True)
    OmegaConf.save(config, run / "config.yaml")
    yield run
    assert not (tmp_path / "imported").exists() and "hostile_code" not in sys.modules


def harmless(text):
    """Nothing for a terminal, and no element that the markup in the texts asks for."""
    assert not CONTROL.search(text)
    return "<img src=x" not in text and "<script>alert" not in text


def test_its_page_and_its_summary_are_text(hostile, capsys):
    assert report([str(hostile.parent)]) == 0 and report([str(hostile)]) == 0
    printed = capsys.readouterr()
    assert not CONTROL.search(printed.out + printed.err)
    assert harmless((hostile / "report.html").read_text())
    assert r"\x1b]0;x\x07" in (hostile / "report.html").read_text()
    names = [event["name"] for event in json.loads((hostile / "trace.json").read_text())["traceEvents"]]
    assert not any(map(CONTROL.search, names)) and any("alert" in name for name in names)
    for name in ("summary.html", "summary.md"):
        assert harmless((hostile.parent / name).read_text()), name
    assert not CONTROL.search((hostile.parent / "summary.csv").read_text())


def test_yaml_makes_no_objects(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for tag in ("object/apply:os.system", "module:hostile_code"):
        (tmp_path / "config.yaml").write_text(f"envs: !!python/{tag} [touch imported]\n")
        assert "cannot be read" in read_run(tmp_path).problems[0]
        for use in (lambda: load(tmp_path / "config.yaml"), lambda: to_overrides([str(tmp_path)])):
            with pytest.raises(ConfigError, match="cannot be read"):
                use()
    assert not (tmp_path / "imported").exists() and "hostile_code" not in sys.modules
