"""One run, many algorithms: an env's own replaces the run's, and nothing leaks either way."""

import pytest

from prl.compose import CONF, compose
from prl.orchestrator.algo.check import check_algorithms

FILL = {
    "custom": ["fn._target_=prl.models.model_path"],
    "custom_class": ["_target_=prl.orchestrator.algo.reward.RewardAlgorithm"],
}
OPTIONS = sorted(path.stem for path in (CONF / "algo").glob("*.yaml"))
TUNED = [
    "algo=echo",
    "algo.sampling.temperature=0.3",
    "algo.sampling.max_tokens=7",
    "algo.length_penalty=turns",
    "algo.completion_weight=9",
    "+algo.roles.user.alpha=0.5",
    "algo.filter._target_=prl.models.model_path",
]


def filled(option, where):
    return [f"{where}.{setting}" for setting in FILL.get(option, ())]


@pytest.mark.parametrize("option", OPTIONS)
def test_an_envs_own_algorithm_is_what_it_would_be_as_the_runs(option):
    alone = compose(["run.name=x", f"algo={option}", *filled(option, "algo")])
    own = compose(["run.name=x", *TUNED, f"+algo@envs.math.algo={option}", *filled(option, "envs.math.algo")])
    assert own.envs["math"].algo == alone.algo and type(own.envs["math"].algo) is type(alone.algo)
    assert own.algo == compose(["run.name=x", *TUNED]).algo, "and the run's stays what it was"
    assert own.algo_of("math") == ("envs.math.algo", own.envs["math"].algo)
    check_algorithms(own)


def test_the_same_algorithm_twice_shares_no_setting():
    config = compose(["run.name=x", *TUNED, "+algo@envs.math.algo=echo", "+envs.math.algo.roles.tool.alpha=0.2"])
    own = config.envs["math"].algo
    assert own.roles == {"tool": {"alpha": 0.2}} and config.algo.roles == {"user": {"alpha": 0.5}}
    assert (own.sampling.temperature, own.sampling.max_tokens, own.length_penalty) == (1.0, None, None)
    assert (own.completion_weight, own.filter._target_) == (1.0, None)


def test_an_env_without_one_inherits_the_runs():
    config = compose(["run.name=x", "env=[math,reverse_text]", "algo=opd", "+algo@envs.math.algo=grpo"])
    assert config.algo_of("reverse_text") == ("algo", config.algo)
    assert config.algo_of("math")[1]._target_.endswith("GRPOAlgorithm")


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
def test_a_conf_file_of_ones_own_says_how_its_algorithm_samples(tmp_path, choice):
    (tmp_path / "algo").mkdir()
    (tmp_path / "algo" / "mine.yaml").write_text(
        "defaults: [grpo, _self_]\nsampling: {temperature: 0.6, max_tokens: 9}\n"
    )
    searched = f"hydra.searchpath=[file://{tmp_path}]"
    own = compose(["run.name=x", searched, choice]).algo_of("math")[1]
    assert (own.sampling.temperature, own.sampling.max_tokens) == (0.6, 9)
    told = compose(
        [
            "run.name=x",
            searched,
            choice,
            f"{choice.lstrip('+').partition('=')[0].partition('@')[2] or 'algo'}.sampling.max_tokens=5",
        ]
    )
    assert told.algo_of("math")[1].sampling.max_tokens == 5
