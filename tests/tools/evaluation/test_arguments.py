"""The command line: targets among overrides, and a run's settings, of which code is not taken unasked."""

import hydra
import pytest

from prl.base.errors import ConfigError
from prl.config.build import plain, sampling_of
from prl.config.compose import CONF, to_config
from prl.config.evaluation import EvaluationConfig
from prl.engines.sampler import Sampler
from prl.tools.evaluation.arguments import to_overrides


def compose(*arguments):
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        overrides = ["run.name=x", *to_overrides(arguments)]
        return to_config(EvaluationConfig, hydra.compose("eval", overrides), overrides)


def test_word_without_a_key_is_a_target(make_run):
    make_run("sweep/0-seed=1", steps=())
    arguments = ["k=4", "a b/c", "sweep/0-seed=1", "env=math", "http://h/v1?x=1", "--cfg", "job", "~monitor.jsonl"]
    found = to_overrides(arguments)
    assert found[0] == 'targets=["a b/c", "sweep/0-seed=1", "http://h/v1?x=1"]'
    assert found[-5:] == ["k=4", "env=math", "--cfg", "job", "~monitor.jsonl"]
    assert compose("a b/c", "tiny").targets == ["a b/c", "tiny"]
    assert to_overrides(["k=4"]) == ["k=4"]


def test_a_run_gives_its_envs_sampling_renderer_and_seed(make_run):
    make_run(
        "mine",
        "env=[guess,reverse_text]",
        "seed=7",
        "sampling.max_tokens=9",
        "orchestrator.eval.sampling.temperature=0.5",
        "envs.guess.sampling.top_k=0",
        "envs.guess.sampling.max_tokens=5",
        "envs.reverse_text.eval_args=null",
        "renderer=qwen3",
        "+renderer.thinking_retention=all",
    )
    config = compose("tiny", "mine/checkpoints/step_000010")
    assert list(config.envs) == ["guess"] and config.seed == 7, "the other env has no held-out tasks"
    assert config.envs["guess"].eval_args is not None and config.envs["guess"].args["seed"] == 7
    assert (config.sampling["temperature"], config.sampling["max_tokens"]) == (0.5, 9)
    _, guess = sampling_of(config, "guess")
    assert (guess["temperature"], guess["max_tokens"]) == (0.5, 5)
    assert plain(config.renderer) | {"name": "qwen3", "thinking_retention": "all"} == plain(config.renderer)
    typed = compose(
        "mine", "sampling.temperature=0.2", "envs.guess.sampling.max_tokens=6", "seed=3", "renderer=default"
    )
    _, guess = sampling_of(typed, "guess")
    assert (guess["temperature"], guess["max_tokens"], typed.seed, typed.renderer["name"]) == (0.2, 6, 3, "default")


class Mine(Sampler):
    """A sampler of the user's own."""


def test_a_run_gives_its_envs_sampling_that_is_whole_or_of_another_class(make_run):
    own = "+sampling@envs.guess.sampling=default"
    make_run("mine", "env=guess", "sampling.temperature=0.3", "sampling.max_tokens=7", own, steps=())
    _, guess = sampling_of(compose("mine"), "guess")
    assert (guess.get("temperature", 1.0), guess.get("max_tokens")) == (1.0, None)
    _, guess = sampling_of(compose("mine", "envs.guess.sampling.temperature=0.5"), "guess")
    assert (guess["temperature"], guess.get("max_tokens")) == (0.5, None)
    make_run("other", "env=guess", f"sampling._target_={__name__}.Mine", "sampling.max_tokens=7", steps=())
    for typed in ([], ["sampling.temperature=0.5"]):
        _, guess = sampling_of(compose("other", *typed), "guess")
        assert (guess["_target_"], guess["max_tokens"]) == (f"{__name__}.Mine", 7)


def test_what_is_chosen_by_group_goes_before_the_runs(make_run):
    make_run("mine", "env=guess", "sampling.temperature=0.3", "sampling.max_tokens=7", steps=())
    config = compose("mine", "env=[math]")
    assert list(config.envs) == ["math"] and config.sampling["temperature"] == 1.0
    config = compose("mine", "sampling=greedy")
    assert (config.sampling["temperature"], config.sampling["max_tokens"]) == (0.0, 7)
    _, guess = sampling_of(config, "guess")
    assert (guess["temperature"], guess["max_tokens"]) == (0.0, 7)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("envs: {math: {args: {path: '${oc.env:HOME}'}}}\n", "is not the config of a run, which is resolved"),
        ("seed: 1\n", "mine/config.yaml is not the config of a run"),
        ("envs: {}\n", "mine/config.yaml is not the config of a training run"),
        ("{", "mine/config.yaml cannot be read"),
    ],
)
def test_a_config_that_is_not_a_runs(tmp_path, text, says):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=says):
        to_overrides(["mine"])
