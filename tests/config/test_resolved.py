"""The resolved config of a run loads back to itself."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from omegaconf import OmegaConf
from prepared_run import planned, run_dir_of, validated

from prl.base.errors import ConfigError
from prl.config.build import maker, plain
from prl.config.compose import compose
from prl.config.schema import TrainConfig
from prl.launch.command import FULL_ERROR
from prl.launch.components import build_components, check_loss

OWN_CONF = """
# @package _global_
defaults: [override /loss: custom, override /algo: custom_class, override /optim: custom]
loss: {_target_: conf_mine.loss, k: 3, scorer: {_target_: conf_mine.Scorer, k: 4}}
algo: {_target_: conf_mine.Algo, n: 5}
trainer: {optim: {_target_: torch.optim.SGD, momentum: 0.9}}
"""
OWN_CODE = """
from dataclasses import dataclass
from prl.algorithms.base import Algorithm
class Scorer:
    def __init__(self, k: int): self.k = k
def loss(inputs, *, k: int, scorer): return (inputs, k, scorer.k)
@dataclass(kw_only=True)
class Algo(Algorithm):
    action_loss_type = "rl"
    n: int = 1
"""

CHOICES = {
    "default": [],
    "options of groups": ["env=[math,reverse_text]", "loss=aipo", "filters=none", "monitor=wandb", "renderer=qwen3"],
    "an env's own": [
        *("+env@envs.b=math", "+algo@envs.b.algo=grpo", "envs.b.sampling.temperature=0.5"),
        *("envs.math.eval_args=null", "+algo@envs.math.algo=sft", "+engine.args={block-size: 16}"),
    ],
    "a function of the user's": [
        *("loss=custom", "loss._target_=my.loss", "+loss.clip=0.2"),
        *("orchestrator.batch_size=null", "orchestrator.token_batch_size=999"),
    ],
    "a teacher elsewhere": [
        *("algo=opd", "teacher=endpoint", "teacher.name=big", "teacher.base_url=[http://a/v1,http://b/v1]"),
        *("filters=enforce", "~filters.pre_batch.gibberish", "filters.post_batch.repetition.mode=ngram"),
    ],
    "a class of the user's": [
        *("algo=custom_class", "algo._target_=a.B", "+algo.judge={name: ${teacher.name}, base_url: [http://a]}"),
        *("+algo.x={y: 1}", "+filters.post_batch.mine={_target_: a.B, x: {y: 1}}"),
    ],
}


@pytest.mark.parametrize("overrides", CHOICES.values(), ids=CHOICES)
def test_saved_and_loaded_it_is_the_same_config(overrides, tmp_path):
    config = compose(["run.name=x", f"run.dir={tmp_path}/x", *overrides])
    path = run_dir_of(config) / "config.yaml"
    again = compose(["run.name=x", f"run.dir={tmp_path}/x"], path.parent)
    assert isinstance(again, TrainConfig)
    assert plain(again) == plain(config), "as by --config-dir <run> --config-name config"
    for name in ("orchestrator", "trainer", "engine", "model", "teacher"):
        assert getattr(again, name) == getattr(config, name), "of the same types, with the same values"


OVER_A_RUN = {
    "filters": (["filters=enforce"], "filters=enforce_post"),
    "an optimiser": (["optim=muon"], "optim=adamw"),
    "a loss": (["loss=gspo"], "loss=aipo"),
    "an algorithm": (["algo=echo"], "algo=grpo"),
}


@pytest.mark.parametrize(("before", "chosen"), OVER_A_RUN.values(), ids=OVER_A_RUN)
def test_an_option_chosen_over_a_run_replaces_the_runs_own(before, chosen, tmp_path):
    run = ["run.name=x", f"run.dir={tmp_path}/x"]
    over = compose([*run, f"+{chosen}"], run_dir_of(compose([*run, *before])))
    assert plain(over) == plain(compose([*run, chosen]))


def test_what_was_loaded_builds_the_same_components(tmp_path):
    overrides = ["algo=echo", "+algo.roles.user.alpha=0.5", "filters=enforce_post"]
    config = compose(["run.name=x", f"run.dir={tmp_path}/x", *overrides])
    again = compose(["run.name=x", f"run.dir={tmp_path}/x"], run_dir_of(config))
    validated(again)
    built, rebuilt = build_components(config).envs["math"], build_components(again).envs["math"]
    assert (rebuilt.algorithm, rebuilt.filters) == (built.algorithm, built.filters)
    assert vars(rebuilt.sampler) == vars(built.sampler) and vars(rebuilt.curriculum) == vars(built.curriculum)


def test_nothing_in_it_is_left_to_resolve(tmp_path):
    config = compose(["run.name=x", f"run.dir={tmp_path}/x", "seed=5"])
    text = (run_dir_of(config) / "config.yaml").read_text()
    assert "${" not in text and "???" not in text
    assert OmegaConf.load(tmp_path / "x" / "config.yaml").envs.math.args.seed == 5


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A search path of the user's with an experiment, a curriculum and a loss, and the module that they name."""
    (tmp_path / "conf_mine.py").write_text(OWN_CODE)
    files = {
        "experiment/own": OWN_CONF,
        "experiment/typo": "# @package _global_\nalgo: {baselin: mean}\n",
        "experiment/closed": "# @package _global_\nmax_stepz: 3\n",
        "experiment/unfit": "# @package _global_\nloss: {_target_: conf_mine.loss, k: 3}\n",
        "curriculum/mine": "defaults: [default, _self_]\n_target_: conf_mine.Curriculum\nenough: 0.5\n",
        "loss/mine": "defaults: [custom, _self_]\n_target_: conf_mine.loss\nk: 1\nscorer: null\n",
    }
    for name, text in files.items():
        path = tmp_path / "conf" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.lstrip("\n"))
    monkeypatch.syspath_prepend(str(tmp_path))
    return f"hydra.searchpath=[file://{tmp_path}/conf]"


def test_conf_file_sets_options_of_own_class(mine, tmp_path):
    config = compose([mine, f"run.dir={tmp_path}/x", "experiment=own"])
    assert check_loss("loss", config.loss, config.trainer) is None and config.loss["k"] == 3
    parts = build_components(config).envs["math"]
    assert (type(parts.algorithm).__name__, parts.algorithm.n) == ("Algo", 5)
    payload = planned(config).trainer.payload
    node = payload["losses"][""]
    assert node == {
        "_target_": "conf_mine.loss",
        "_partial_": True,
        "k": 3,
        "scorer": {"_target_": "conf_mine.Scorer", "k": 4},
    }
    assert maker(node, Callable, "loss")("x") == ("x", 3, 4), "as the trainer makes it"
    assert payload["trainer"]["optim"]["momentum"] == 0.9
    saved = OmegaConf.load(run_dir_of(config) / "config.yaml")
    assert saved.loss.scorer == {"_target_": "conf_mine.Scorer", "k": 4} and saved.algo.n == 5
    assert compose([mine, "experiment=own", "loss.k=7", "algo.n=8"]).loss["k"] == 7
    assert compose([mine, "curriculum=mine"]).curriculum["enough"] == 0.5
    assert plain(compose([mine, "experiment=own", "loss=mine"]).loss)["k"] == 3


UNKNOWN = {
    "experiment=typo": "algo.baselin: GRPOAlgorithm has no such option; did you mean algo.baseline?",
    "experiment=closed": "max_stepz: there is no such key; did you mean max_steps?",
    "experiment=unfit": "loss: conf_mine.loss(inputs, *, k: int, scorer) cannot be called",
    "loss.kl_tua=3": "Could not override 'loss.kl_tua'",
    "trainer.optim.lrr=3": "Could not override 'trainer.optim.lrr'",
    "+max_stepz=3": "max_stepz: there is no such key; did you mean max_steps?",
    "+envs.math.argz=1": "did you mean envs.math.args?",
    "+algo.sampling.top_p=1": "algo.sampling.top_p: there is no such key; keys there: demo_key, source",
    "+loss.kl_tua=3": "loss.kl_tua: there is no such key; did you mean loss.kl_tau?",
}


@pytest.mark.parametrize(("override", "says"), UNKNOWN.items(), ids=UNKNOWN)
def test_a_key_that_nothing_reads_is_refused(mine, override, says):
    with pytest.raises(Exception) as caught:
        build_components(compose([mine, override]))
    assert says in " ".join(str(each) for each in (caught.value, caught.value.__cause__))


def test_an_engine_that_extends_the_in_process_one_has_its_options(tmp_path, monkeypatch):
    text = "from prl.engines.transformers import TransformersEngine\nclass Mine(TransformersEngine): ...\n"
    (tmp_path / "engine_mine.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = compose(["debug=fast", "engine._target_=engine_mine.Mine"])
    assert config.engine.in_process and config.engine._target_ == "engine_mine.Mine"
    validated(config)


OWN_SERVER = """
from dataclasses import dataclass
from prl.engines.base import ServerConfig, ServerEngine

@dataclass
class Options(ServerConfig):
    beams: int = 2

class Mine(ServerEngine):
    Config = Options
    command = classmethod(lambda cls, spec, port: ["serve", str(port)])
"""


def test_a_server_engine_of_ones_own_has_its_options_and_none_of_another(tmp_path, monkeypatch):
    (tmp_path / "engine_served.py").write_text(OWN_SERVER)
    monkeypatch.syspath_prepend(str(tmp_path))
    node = "engine={_target_: engine_served.Mine, beams: 3, restarts: 2}"
    config = compose(["run.name=x", "~engine", f"+{node}"])
    validated(config)
    assert (config.engine.beams, config.engine.servers) == (3, 1) and not hasattr(config.engine, "kv_cache_gb")
    with pytest.raises(ConfigError, match="engine.kv_cache_gb: there is no such key"):
        compose(["run.name=x", "~engine", "+engine={_target_: engine_served.Mine, kv_cache_gb: 1}"])


def test_a_class_with_options_that_is_no_engine_is_refused():
    with pytest.raises(ConfigError, match="prl.trainer.trainer.Trainer' is not a subclass of prl.engines.base.Engine"):
        compose(["run.name=x", "~engine", "+engine={_target_: prl.trainer.trainer.Trainer}"])


def test_an_option_of_ones_own_is_chosen_over_a_run(mine, tmp_path):
    """As on a command line, where Hydra keeps its own overrides apart."""
    run = ["run.name=x", f"run.dir={tmp_path}/x"]
    folder = run_dir_of(compose([*run, "loss=aipo"]))
    command = [sys.executable, "-m", "prl.train", "--config-dir", str(folder), "--config-name", "config", mine]
    command += ["+loss=mine", "loss.scorer=7", "loss.oops=1", f"run.dir={tmp_path}/y"]
    env = {name: value for name, value in os.environ.items() if name != FULL_ERROR}  # of tests that ran in this process
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert "Could not find 'loss/mine'" not in done.stderr and "loss.oops" in done.stderr and done.returncode == 2


def test_a_run_needs_no_name_from_python(tmp_path):
    config = compose([f"run.dir={tmp_path}/x", "algo=reward"])
    assert config.run.dir == f"{tmp_path}/x" and config.run.name.startswith("reward-")
    assert compose([]).run.dir.startswith(os.path.abspath("outputs/grpo-")), "as on the command line"
    assert compose(["run.dir=5"]).run.dir == os.path.abspath("5")


def test_it_composes_to_the_same_again(tmp_path):
    one, two = compose(["run.name=x"]), compose(["run.name=x"])
    assert one == two and one is not two


def test_a_plus_may_add_where_keys_are_free():
    config = compose(["run.name=x", "+engine.args.block-size=16", "+envs.math.args.mine=1"])
    assert config.engine.args == {"block-size": 16} and config.envs["math"].args["mine"] == 1


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("prl.transport.files.FileTransport", "prl.weights.files.FileWeights"),
        ("prl.transport.ray.RayTransport", "prl.weights.ray.RayWeights"),
    ],
)
def test_weights_of_an_older_run_are_found_where_they_are_now(before, now):
    assert compose(["run.name=x", f"weights._target_={before}"]).weights == {"_target_": now}
