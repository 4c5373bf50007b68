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
def test_algorithm_of_an_env_equals_that_of_a_run(option):
    alone = compose(["run.name=x", f"algo={option}", *filled(option, "algo")])
    own = compose(["run.name=x", *TUNED, f"+algo@envs.math.algo={option}", *filled(option, "envs.math.algo")])
    assert own.envs["math"].algo == alone.algo and type(own.envs["math"].algo) is type(alone.algo)
    assert own.algo == compose(["run.name=x", *TUNED]).algo, "and the run's stays what it was"
    assert own.node_of("math", "algo") == ("envs.math.algo", own.envs["math"].algo)
    assert vars(built(own)) == vars(built(alone))


def test_an_env_without_one_inherits_the_runs():
    config = compose(["run.name=x", "env=[math,reverse_text]", "algo=opd", "+algo@envs.math.algo=grpo"])
    assert config.node_of("reverse_text", "algo") == ("algo", config.algo)
    assert config.node_of("math", "algo")[1]._target_.endswith("GRPOAlgorithm")
