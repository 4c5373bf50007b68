"""One run, two envs: each group of components can be chosen for one env, and nothing leaks to the other."""

import pytest
from prepared_run import validated

from prl.algorithms.base import Algorithm
from prl.config.build import build
from prl.config.compose import compose
from prl.launch.components import build_components

GROUPS = (
    "+algo@envs.math.algo=max_rl",
    "+sampling@envs.math.sampling=default",
    "envs.math.sampling.temperature=0.7",
    "+loss@envs.math.loss=aipo",
    "+filters@envs.math.filters=none",
    "+renderer@envs.math.renderer=qwen3",
    "+curriculum@envs.math.curriculum=pools_odf",
)


def test_every_group_can_be_chosen_per_env():
    config = compose(["run.name=x", "env=[math,reverse_text]", *GROUPS])
    validated(config)
    envs = build_components(config).envs
    chosen = {
        name: (
            type(env.algorithm).__name__,
            env.sampler.temperature,
            env.loss,
            len(env.filters["post_batch"]),
            env.curriculum.pooled and env.curriculum.online_difficulty_filtering,
            config.node_of(name, "renderer")[1]["name"],
        )
        for name, env in envs.items()
    }
    assert chosen["math"] == ("MaxRLAlgorithm", 0.7, "math", 0, True, "qwen3")
    assert chosen["reverse_text"] == ("GRPOAlgorithm", 1.0, "", 3, False, "auto")


@pytest.mark.parametrize("option", ["echo", "opd"])
def test_env_algorithm_inherits_nothing_from_the_runs(option):
    tuned = ["algo=echo", "algo.length_penalty=turns", "+algo.roles.user.alpha=0.5", "algo.kl.coef=0.1"]
    alone = compose(["run.name=x", f"algo={option}"])
    config = compose(["run.name=x", *tuned, f"+algo@envs.math.algo={option}"])
    where, node = config.node_of("math", "algo")
    assert where == "envs.math.algo" and node == alone.algo
    assert vars(build(node, Algorithm, where)) == vars(build(alone.algo, Algorithm, "algo"))
    assert build(config.algo, Algorithm, "algo").chosen == {"user": {"alpha": 0.5}}, "and the run's stays what it was"
