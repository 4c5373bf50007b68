"""What a run, and a dry run, refuses before its processes start: one row for each kind."""

import json
import os
import shutil

import pytest
from prepared_run import planned, validated

from prl.base.errors import ConfigError
from prl.config.compose import compose
from prl.launch import run
from prl.launch.shared_engines import launcher_of
from prl.models import model_path
from prl.runs.owner import owned
from prl.train import main

MINE = """
from dataclasses import dataclass
from typing import Annotated
from annotated_types import Ge
from prl.algorithms.base import Algorithm
from prl.algorithms.grpo import GRPOAlgorithm
from prl.losses import default_loss

def loss(inputs, *, k: int = 1): ...
def credit(group, scale: float = 1.0): ...
async def later(group): ...

class Scorer:
    def __init__(self, k: int): self.k = k

def scaled(inputs, scale: Annotated[float, Ge(0)] = 1.0, **options):
    return default_loss(inputs, **options)

@dataclass(kw_only=True)
class Scaled(GRPOAlgorithm):
    scale: Annotated[float, Ge(0)] = 1.0

@dataclass(kw_only=True)
class Algo(Algorithm):
    action_loss_type = "rl"
    scorer: Scorer | None = None
    def check(self, where):
        if self.scorer and self.scorer.k == 13:
            raise ValueError("unlucky")

class Weighted(GRPOAlgorithm):
    def __init__(self, weight: float = 0.1, **options):
        super().__init__(**options)
        self.kl = weight

class Connects(GRPOAlgorithm):
    async def setup(self):
        self.pools, self.mine = [], []

class Sums(GRPOAlgorithm):
    def score_group(self, group):
        self.step += 1

@dataclass(kw_only=True)
class Named(GRPOAlgorithm):
    log: str = "file"

class Drives(GRPOAlgorithm):
    async def finalize_group(self, rollouts): ...

class Fine(GRPOAlgorithm):
    group_relative = False
    mask_truncated: bool = True
    async def close(self):
        self.closed, self.kl.coef = True, 0.0
        await super().close()
"""
ROWS = [{"prompt": f"say {number}", "answer": str(number)} for number in range(8)]
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
FEW = ["envs.math.args.num_tasks=8", "envs.math.eval_args=null"]
JSONL = ["env=jsonl", "envs.jsonl.args.eval_fraction=0", "envs.jsonl.eval_args=null"]
CALCULATOR = ["env=calculator", "envs.calculator.args.num_tasks=8", "envs.calculator.eval_args=null"]
OWN = ["algo=custom_class", "algo._target_=refused_mine.Algo"]
LATENT = ["model=hf", "model.path=latent", "model.max_model_len=256"]
KEEP = ["orchestrator.eval.keep_best=true", "envs.math.eval_args={num_tasks: 2}"]
SFT = ["algo=sft", "algo.sampling.source=demonstrations", "orchestrator.group_size=1"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder with code and data of the user's, a run and a folder of theirs."""
    (tmp_path / "refused_mine.py").write_text(MINE)
    (tmp_path / "broken_mine.py").write_text("import no_such_module_xyz\n")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": CHAT, "tools": [{"name": "add", "parameters": {}}]}))
    for name, changes in (("few_rows", {"vocab_size": 100}), ("latent", {"model_type": "deepseek_v3"})):
        shutil.copytree(model_path("tiny"), tmp_path / name)
        config = tmp_path / name / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    for name, file in (("a_run", "config.yaml"), ("theirs", "thesis.txt")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("envs: {}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("PRL_TOKEN", raising=False)
    monkeypatch.setattr("prl.launch.run.start_early", lambda *_: [])


def prepared(config):
    """Prepare a run as the command does."""
    with launcher_of(config.launcher) as launcher:
        return run.prepare(config, planned(config), launcher)


def refusal(overrides, tmp_path, dry="false"):
    """The words with which the preparation of a run, or of a dry run, refuses a config."""
    with pytest.raises(ConfigError) as caught:
        few = [] if any(each.startswith("env=") for each in overrides) else FEW
        config = compose([f"run.dir={tmp_path}/run", *few, *overrides, f"dry_run={dry}"])
        if config.dry_run:
            main(config)
        validated(config)
        prepared(config)
    return str(caught.value)


TABLE = [
    # tasks
    ([*JSONL, "envs.jsonl.args.path=none.jsonl"], "envs.jsonl.args: 'none.jsonl' is not a file"),
    ([*JSONL, "envs.jsonl.args.path=rows.jsonl", "envs.jsonl.args.grader=no_grader.fn"], "envs.jsonl.args"),
    ([*JSONL, "envs.jsonl.args.path=rows.jsonl", "envs.jsonl.args.grader=broken_mine.fn"], "envs.jsonl.args"),
    ([*JSONL, "envs.jsonl.args.path=rows.jsonl", "envs.jsonl.args.answer_key=no"], "envs.jsonl.args: rows.jsonl, line"),
    (["+envs.math.args.operants=3"], "envs.math.args.operants"),
    # renderers
    (["renderer=custom", "renderer.import_path=no_such.Renderer"], "renderer.import_path: No module named"),
    (["renderer.name=nope"], "renderer.name: Input tag 'nope'"),
    (["renderer=gpt-oss"], "renderer.name=gpt-oss does not fit"),
    # components
    ([*SFT, *JSONL, "envs.jsonl.args.path=rows.jsonl"], "algo.sampling.source=demonstrations: task"),
    ([*SFT, *CALCULATOR], "algo.sampling.source=demonstrations: task"),
    ([*SFT, "algo.sampling.demo_key="], "algo.sampling.demo_key is empty"),
    ([*SFT, "algo=opd"], "algo.sampling.source is demonstrations, but OPDAlgorithm feeds the ref_kl loss"),
    (["algo._target_=refused_mine.Scaled", "+algo.scale=-1"], "algo.scale="),
    (["algo=custom", "algo.fn._target_=no_such.fn"], "algo.fn._target_='no_such.fn'"),
    (["algo=custom", "algo.fn._target_=refused_mine.later"], "algo.fn._target_='refused_mine.later' is async"),
    (["algo=custom", "algo.fn._target_=refused_mine.credit", "+algo.fn.scale=x"], "algo.fn.scale=x"),
    ([*OWN, "+algo.scorer={_target_: refused_mine.Scorer, k: 13}"], "algo: Algo.check failed: ValueError: unl"),
    (["algo._target_=refused_mine.Weighted"], "algo: Weighted sets 'kl', a name that prl's Algorithm has"),
    (["algo._target_=refused_mine.Connects"], "algo: Connects sets 'pools'"),
    (["algo._target_=refused_mine.Sums"], "algo: Sums sets 'step'"),
    (["algo._target_=refused_mine.Named"], "algo: Named sets 'log'"),
    (["algo._target_=refused_mine.Drives"], "algo: Drives sets 'finalize_group'"),
    (["algo=opsd", "algo.demo_key=work"], "algo.demo_key=work: 8 of 8 tasks of env 'math' have nothing in this field"),
    (["algo=opsd", *JSONL, "envs.jsonl.args.path=rows.jsonl"], "algo.demo_key=demonstration: 8 of 8 tasks"),
    (["algo=opd", "teacher=endpoint", "teacher.name=big"], "teacher.base_url has no value"),
    (["loss=custom", "loss._target_=refused_mine.loss", "+loss.kk=3"], "loss: refused_mine.loss(inputs"),
    (["loss=custom", "loss._target_=refused_mine.loss", "+loss.k=x"], "loss.k=x"),
    (["loss=custom", "loss._target_=refused_mine.scaled", "+loss.scale=-1"], "loss.scale="),
    (["loss._target_=refused_mine.scaled", "loss.kl_tau=-5"], "loss.kl_tau="),
    (["loss._target_=refused_mine.scaled", "loss.entropy_coef=-1"], "loss.entropy_coef="),
    (["+envs.math.args.keys=[{a: '***'}]"], "envs.math.args.keys.0.a is '***'"),
    (["trainer.optim.lr=true"], "trainer.optim.lr=true"),
    (["optim=muon", "trainer.optim.parts.muon.dims=two"], "trainer.optim.parts.muon.dims=two"),
    (["+trainer.optim.parts.x=5"], "trainer.optim.parts.x=5"),
    (["loss.agg_mode=constant"], "loss.agg_mode=constant needs loss.constant_length=<tokens>"),
    (["loss=gspo", "loss.constant_length=9"], "loss.constant_length=9: loss.agg_mode=sequence_mean reads none"),
    (["+loss@envs.math.loss=gspo", "envs.math.loss.clip_ratio_low=1"], "envs.math.loss.clip_ratio_low="),
    (["loss=aipo", "loss.agg_mode=mean"], "loss.agg_mode=mean: "),
    (["loss=ppo", "loss.proximal=true"], "loss.proximal=true: with one update on a batch"),
    (["+loss@envs.math.loss=ppo", "envs.math.loss.proximal=true"], "envs.math.loss.proximal=true: with one update"),
    (["loss=ppo", "loss.correction_cap=3"], "loss.correction_cap is given, but only correction=tis reads it"),
    (["loss=ppo", "loss.correction=icepop", "loss.correction_cap=3"], "loss.correction_cap is given"),
    (["loss=cispo", "loss.correction=tis"], "loss.correction=tis: the loss has a ratio to the sampler itself"),
    (["loss.correction=tis", "trainer.epochs=2"], "loss.correction=tis: the loss has a ratio to the sampler itself"),
    (["loss=reinforce", "loss.correction=mis"], "loss.correction=mis: "),
    (["loss=ppo", "loss.dual_clip=1"], "loss.dual_clip=1"),
    (["loss._target_=refused_mine.scaled", "loss.entropy_target=0"], "loss.entropy_target=0"),
    (["trainer.updates_per_batch=0"], "trainer.updates_per_batch=0"),
    (["trainer.epochs=0"], "trainer.epochs=0"),
    (["trainer.ref_kl.mask_low=-1"], "trainer.ref_kl.mask_low=-1"),
    (["+loss.kl_tua=1"], "loss.kl_tua: there is no such key"),
    (["curriculum=pools", "curriculum.hash_keys=[no_key]", "curriculum.load_from=a_run"], "curriculum."),
    (["curriculum.load_from=none"], "curriculum.load_from='none' is no folder"),
    (["+filters.post_batch.mine={_target_: refused_mine.Algo}"], "filters.post_batch.mine._target_='refused_mine.A"),
    (["+trainer.optim.rate=1"], "trainer.optim.rate: AdamW has no such option"),
    (["optim=sgd", "trainer.optim.nesterov=true"], "trainer.optim._target_=torch.optim.SGD: Nesterov"),
    (["trainer._target_=rich.text.Text"], "trainer._target_='rich.text.Text' is not a subclass of prl.trainer.trainer"),
    (["trainer.optim._target_=torch.nn.Linear"], "trainer.optim._target_='torch.nn.Linear' is not a subclass of torch"),
    (["+trainer.max_steps=3"], "trainer.max_steps: there is no such key"),
    (["+orchestrator.foo=1"], "orchestrator.foo: there is no such key; keys there: batch_size"),
    (["+weights.run_dir=/x"], "weights.run_dir: FileWeights has no such option; its options: none"),
    (["launcher._target_=prl.launch.launcher.Launcher"], "launcher: making Launcher failed: TypeError: Can't instant"),
    (["launcher._target_=rich.text.Text"], "launcher._target_='rich.text.Text' is not a subclass of prl.launch.launch"),
    (["optim=custom", "trainer.optim._target_=torch.optim.Muon"], "trainer.optim._target_=torch.optim.Muon: "),
    (["sampling.stop=['']"], "sampling.stop has an empty string"),
    (["sampling.top_p=0.5"], "sampling.top_p=0.5"),
    # weights
    (["weights=ray"], "weights=ray goes between the nodes of launcher=ray"),
    (["weights=transfer", "engine=transformers"], "weights=transfer: this engine loads folders alone"),
    ([*KEEP, "weights=transfer"], "orchestrator.eval.keep_best copies a folder, weights=transfer writes none"),
    (["weights=transfer", "sweep.share_engine=true"], "sweep.share_engine has the engine load the base weights from"),
    (["weights=transfer", "weights.backend=nccl", "engine.device=cpu"], "weights.backend=nccl goes between GPUs"),
    (["weights=transfer", "weights.backend=mpi"], "weights.backend=mpi"),
    (["weights=transfer", "weights.timeout_s=0"], "weights.timeout_s=0"),
    # engines
    (["engine.urls=[http://127.0.0.1:9]"], "engine.urls names servers that already run: set PRL_TOKEN"),
    # data
    ([*JSONL, "envs.jsonl.args.path=chat.jsonl"], "envs.jsonl.args: chat.jsonl, line 1 has no answer, which grader=ex"),
    # workers
    (["launcher=slurm", "sweep.share_engine=true"], "sweep.share_engine keeps engines of one process"),
    (["launcher=slurm", "engine=transformers"], "launcher=ray places processes, and engine=transformers has none"),
    (["envs.math.workers={count: 4, where: ray}"], "envs.math.workers.where=ray: choose launcher=ray as well"),
    (["launcher=ray", "envs.math.in_process=true", "envs.math.workers.where=ray"], "envs.math.workers.where=ray: its"),
    # models and checkpoints
    (["model=hf", "model.path=./none"], "model.path='./none': there is no such folder"),
    (["model=hf", "model.path=few_rows", "model.max_model_len=256"], "model.path='few_rows': its tokenizer has '"),
    ([*LATENT, "engine.device=cpu"], "model.path='latent': vLLM on a CPU computes logprobs that are 0.3 off"),
    (["teacher=local", "teacher.model.path=latent", "teacher.engine.device=cpu", "algo=opd"], "teacher.model.path='l"),
    (["run.resume=none"], "run.resume='none' is neither a run directory nor a checkpoint"),
    (["run.resume=a_run"], "run.dir={folder}/run: a run goes on in its own directory"),
    # run directories
    (["run.dir=a_run"], "run.dir='{folder}/a_run' already holds a run"),
    (["run.dir=theirs"], "run.dir='{folder}/theirs' holds other files (thesis.txt)"),
    (["run.dir=rows.jsonl"], "run.dir='{folder}/rows.jsonl'"),
    (["run.dir=rows.jsonl/x"], "run.dir='{folder}/rows.jsonl/x' cannot be made"),
]  # fmt: skip


def files_below(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if "__pycache__" not in path.parts}


@pytest.mark.parametrize(("overrides", "key"), TABLE, ids=lambda value: value[-1] if isinstance(value, list) else "")
def test_a_run_is_refused_and_nothing_is_written(tmp_path, overrides, key):
    before = files_below(tmp_path)
    assert refusal(overrides, tmp_path).startswith(key.replace("{folder}", str(tmp_path)))
    assert files_below(tmp_path) == before


@pytest.mark.parametrize("overrides", [["renderer=gpt-oss"], ["run.dir=theirs"], ["run.resume=a_run"], LATENT])
def test_a_dry_run_refuses_the_same(tmp_path, overrides):
    assert refusal(overrides, tmp_path, dry="true") == refusal(overrides, tmp_path)


def test_an_algorithm_may_set_what_is_its_own(tmp_path):
    config = compose([f"run.dir={tmp_path}/run", "algo._target_=refused_mine.Fine", *FEW])
    prepared(config)


def test_opsd_on_an_env_that_may_write_its_demonstrations_is_warned_of(tmp_path):
    config = compose([f"run.dir={tmp_path}/run", "algo=opsd", "env=guess", "envs.guess.eval_args=null"])
    with pytest.warns(UserWarning, match=r"algo.demo_key=demonstration: .*info"):
        prepared(config)


def test_a_directory_that_a_run_owns_is_refused(tmp_path):
    with owned(tmp_path / "run"):
        found = refusal([], tmp_path)
    assert found.startswith(f"run.dir='{tmp_path}/run' belongs to process {os.getpid()}")
