"""What a run refuses before its processes start, a dry run refuses for the same reason; and the reverse."""

import json
import os

import pytest

from prl.config.compose import compose
from prl.config.hardware import assuming
from prl.config.validate import validate
from prl.errors import ConfigError
from prl.launch import specs
from prl.runs.owner import owned
from prl.train import main, prepare

MINE = """
from dataclasses import dataclass
from prl.algorithms.base import Algorithm

def loss(inputs, *, k: int = 1): ...
def credit(group, scale: float = 1.0): ...
async def later(group): ...

class Scorer:
    def __init__(self, k: int): self.k = k

@dataclass(kw_only=True)
class Algo(Algorithm):
    action_loss_type = "rl"
    scorer: Scorer | None = None
    def check_tasks(self, where, tasks):
        if self.scorer and self.scorer.k == 13:
            raise ValueError("unlucky")
"""
ROWS = [{"prompt": f"say {number}", "answer": str(number)} for number in range(8)]
JSONL = ["env=jsonl", "envs.jsonl.args.eval_fraction=0", "envs.jsonl.eval_args=null"]
OWN = ["algo=custom_class", "algo._target_=refused_mine.Algo"]
SFT = ["algo=sft", "algo.sampling.source=demonstrations", "orchestrator.group_size=1"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder with code and data of the user's, a run and a folder of theirs."""
    (tmp_path / "refused_mine.py").write_text(MINE)
    (tmp_path / "broken_mine.py").write_text("import no_such_module_xyz\n")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "late.jsonl").write_text(json.dumps(ROWS[0]) + "\n{}\n")
    for name, file in (("a_run", "config.yaml"), ("theirs", "thesis.txt")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("envs: {}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("PRL_TOKEN", raising=False)
    monkeypatch.setattr("prl.launch.engines.start_early", lambda *_: [])


def refusals(overrides, tmp_path):
    """The words with which a run's own preparation and a dry run refuse a config."""
    words = []
    for dry in ("false", "true"):
        with pytest.raises(ConfigError) as caught:
            config = compose([f"run.dir={tmp_path}/run", *overrides, f"dry_run={dry}"])
            with specs.launcher_of(config) as launcher, assuming(config.machine):
                if config.dry_run:
                    main(config)
                validate(config)
                prepare(config, launcher)
        words.append(str(caught.value))
    return words


TABLE = [
    # tasks
    ([*JSONL, "envs.jsonl.args.path=none.jsonl"], "envs.jsonl.args: 'none.jsonl' is not a file"),
    ([*JSONL, "envs.jsonl.args.path=late.jsonl"], "envs.jsonl.args: late.jsonl, line 2"),
    ([*JSONL, "envs.jsonl.args.path=rows.jsonl", "envs.jsonl.args.grader=no_grader.fn"], "envs.jsonl.args"),
    ([*JSONL, "envs.jsonl.args.path=rows.jsonl", "envs.jsonl.args.grader=broken_mine.fn"], "envs.jsonl.args"),
    ([*JSONL, "envs.jsonl.args.path=rows.jsonl", "envs.jsonl.args.answer_key=no"], "envs.jsonl.args: rows.jsonl, line"),
    (["+envs.math.args.operants=3"], "envs.math.args.operants"),
    (["+envs.math.eval_args.operants=3"], "envs.math.eval_args.operants"),
    (["envs.math.taskset=no_taskset_xyz"], "envs.math.taskset='no_taskset_xyz'"),
    # renderers
    (["renderer=custom", "renderer.import_path=no_such.Renderer"], "renderer.import_path: No module named"),
    (["renderer.name=nope"], "renderer.name: Input tag 'nope'"),
    (["renderer=gpt-oss"], "renderer.name=gpt-oss does not fit"),
    # components
    ([*SFT, *JSONL, "envs.jsonl.args.path=rows.jsonl"], "algo.sampling.source=demonstrations: task"),
    (["algo=custom", "algo.fn._target_=no_such.fn"], "algo.fn._target_='no_such.fn'"),
    (["algo=custom", "algo.fn._target_=refused_mine.later"], "algo.fn._target_='refused_mine.later' is async"),
    (["algo=custom", "algo.fn._target_=refused_mine.credit", "+algo.fn.scale=x"], "algo.fn.scale=x"),
    ([*OWN, "+algo.scorer={_target_: refused_mine.Scorer}"], "algo.scorer"),
    ([*OWN, "+algo.scorer={_target_: refused_mine.Scorer, k: 13}"], "algo: Algo.check_tasks failed: ValueError: unl"),
    (["algo=opd", "teacher=endpoint", "teacher.name=big"], "teacher.base_url has no value"),
    (["loss=custom", "loss._target_=refused_mine.loss", "+loss.kk=3"], "loss: refused_mine.loss(inputs"),
    (["loss=custom", "loss._target_=refused_mine.loss", "+loss.k=x"], "loss.k=x"),
    (["+loss.kl_tua=1"], "loss.kl_tua: this loss has no such option"),
    (["curriculum=pools", "curriculum.easy_fraction=0.5"], "curriculum.easy_fraction"),
    (["curriculum=pools", "curriculum.hash_keys=[no_key]", "curriculum.load_from=a_run"], "curriculum."),
    (["curriculum.load_from=none"], "curriculum.load_from"),
    (["+filters.post_batch.mine={_target_: no_such.Filter}"], "filters.post_batch.mine._target_='no_such.Filter'"),
    (["+filters.post_batch.mine={_target_: refused_mine.Algo}"], "filters.post_batch.mine._target_='refused_mine.A"),
    (["+monitor.mine={_target_: no_such.Monitor}"], "monitor.mine._target_='no_such.Monitor'"),
    (["+trainer.optim.rate=1"], "trainer.optim.rate: AdamW has no such option"),
    (["trainer.optim._target_=torch.optim.SGD", "+trainer.optim.nesterov=true"], "trainer.optim"),
    (["trainer.optim._target_=torch.optim.Muon"], "trainer.optim._target_=torch.optim.Muon: Muon only supports 2D"),
    (["trainer.schedule._target_=no_such.Schedule"], "trainer.schedule._target_='no_such.Schedule'"),
    (["sampling.stop=['']"], "sampling.stop has an empty string"),
    (["sampling.top_p=0.5"], "sampling.top_p=0.5"),
    # engines
    (["engine.urls=[http://127.0.0.1:9]"], "engine.urls names servers that already run: set PRL_TOKEN"),
    # models and checkpoints
    (["model=hf", "model.path=./none"], "model.path='./none': there is no such folder"),
    (["run.resume=none"], "run.resume='none' is neither a run directory nor a checkpoint"),
    (["run.resume=a_run"], "run.resume='a_run' is not of the run in run.dir"),
    (["run.resume=a_run/checkpoints/step_000001"], "run.resume='a_run/checkpoints/step_000001' is not of"),
    # run directories
    (["run.dir=a_run"], "run.dir='a_run' already holds a run"),
    (["run.dir=theirs"], "run.dir='theirs' holds other files (thesis.txt)"),
    (["run.dir=rows.jsonl"], "run.dir='rows.jsonl'"),
    (["run.dir=rows.jsonl/x"], "run.dir='rows.jsonl/x' cannot be made"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "key"), TABLE, ids=lambda value: value[-1] if isinstance(value, list) else "")
def test_a_run_and_a_dry_run_refuse_the_same(tmp_path, overrides, key):
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if "__pycache__" not in path.parts}
    run, dry = refusals(overrides, tmp_path)
    assert run.startswith(key) and dry == run
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if "__pycache__" not in path.parts}
    assert after == before, "nothing is written"


def test_a_directory_that_a_run_owns_is_refused_by_a_dry_run_too(tmp_path):
    with owned(tmp_path / "run"):
        run, dry = refusals([], tmp_path)
    assert run == dry and run.startswith(f"run.dir='{tmp_path}/run' belongs to process {os.getpid()}")
