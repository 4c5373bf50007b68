"""One run, many algorithms: an env's own replaces the run's, and nothing leaks either way."""

import pytest

from prl.compose import CONF, compose
from prl.config.build import build
from prl.orchestrator.algo.base import Algorithm

FILL = {
    "custom": ["fn._target_=prl.models.model_path"],
    "custom_class": ["_target_=prl.orchestrator.algo.reward.RewardAlgorithm"],
}
OPTIONS = sorted(path.stem for path in (CONF / "algo").glob("*.yaml"))
TUNED = [
    "algo=echo",
    "algo.sampling.source={name:big,base_url:http://h/v1}",
    "algo.length_penalty=turns",
    "algo.completion_weight=9",
    "+algo.roles.user.alpha=0.5",
    "algo.filter._target_=prl.models.model_path",
]


def filled(option, where):
    return [f"{where}.{setting}" for setting in FILL.get(option, ())]


def built(config):
    """The algorithm of env `math`; of a function, the function itself: Hydra makes a new partial each time."""
    where, node = config.node_of("math", "algo")
    algorithm = build(node, Algorithm, where)
    if hasattr(algorithm, "fn"):
        algorithm.fn = algorithm.fn.func
    return algorithm


@pytest.mark.parametrize("option", OPTIONS)
def test_an_envs_own_algorithm_is_what_it_would_be_as_the_runs(option):
    alone = compose(["run.name=x", f"algo={option}", *filled(option, "algo")])
    own = compose(["run.name=x", *TUNED, f"+algo@envs.math.algo={option}", *filled(option, "envs.math.algo")])
    assert own.envs["math"].algo == alone.algo and type(own.envs["math"].algo) is type(alone.algo)
    assert own.algo == compose(["run.name=x", *TUNED]).algo, "and the run's stays what it was"
    assert own.node_of("math", "algo") == ("envs.math.algo", own.envs["math"].algo)
    assert vars(built(own)) == vars(built(alone))


def test_the_same_algorithm_twice_shares_no_setting():
    config = compose(["run.name=x", *TUNED, "+algo@envs.math.algo=echo", "+envs.math.algo.roles.tool.alpha=0.2"])
    own = config.envs["math"].algo
    assert own.roles == {"tool": {"alpha": 0.2}} and config.algo.roles == {"user": {"alpha": 0.5}}
    made = built(config)
    assert (made.sampling.source, made.length_penalty, made.completion_weight) == ("policy", None, 1.0)
    assert made.filter is None and made.alphas == {"tool": 0.2}
    runs = build(config.algo, Algorithm, "algo")
    assert runs.alphas == {"user": 0.5} and runs.sampling.source.name == "big" and runs.filter is not None


def test_an_env_without_one_inherits_the_runs():
    config = compose(["run.name=x", "env=[math,reverse_text]", "algo=opd", "+algo@envs.math.algo=grpo"])
    assert config.node_of("reverse_text", "algo") == ("algo", config.algo)
    assert config.node_of("math", "algo")[1]._target_.endswith("GRPOAlgorithm")


def test_envs_do_not_touch_each_other():
    config = compose(
        [
            "run.name=x",
            "env=[math,reverse_text]",
            "+algo@envs.math.algo=opd",
            "+algo@envs.reverse_text.algo=opd",
            "envs.math.algo.max_concurrent=3",
        ]
    )
    assert [config.envs[name].algo.max_concurrent for name in ("math", "reverse_text")] == [3, 32]


@pytest.mark.parametrize("choice", ["algo=mine", "+algo@envs.math.algo=mine"])
def test_a_conf_file_of_ones_own_sets_knobs_that_the_command_line_changes(tmp_path, choice):
    (tmp_path / "algo").mkdir()
    (tmp_path / "algo" / "mine.yaml").write_text(
        "defaults: [grpo, _self_]\nlength_penalty: turns\ncompletion_weight: 3\n"
    )
    given = ["run.name=x", f"hydra.searchpath=[file://{tmp_path}]", choice]
    own = built(compose(given))
    assert (own.length_penalty, own.completion_weight) == ("turns", 3.0)
    where = choice.lstrip("+").partition("=")[0].partition("@")[2] or "algo"
    own = built(compose([*given, f"{where}.completion_weight=5"]))
    assert (own.length_penalty, own.completion_weight) == ("turns", 5.0)
