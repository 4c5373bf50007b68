"""The resolved config of a run loads back to itself."""

import pytest
from omegaconf import OmegaConf

from prl.compose import compose, load_config
from prl.config.instantiate import plain
from prl.config.schema import TrainConfig
from prl.config.validate import validate
from prl.errors import ConfigError
from prl.launch.components import build_components
from prl.train import new_run_dir, refuse_existing

CHOICES = [
    [],
    ["env=[math,reverse_text]", "loss=aipo", "filters=none", "monitor=wandb"],
    ["+env@envs.b=math", "+algo@envs.b.algo=grpo", "envs.b.sampling.temperature=0.5", "envs.math.eval_args=null"],
    [
        "loss=custom",
        "loss._target_=my.loss",
        "+loss.clip=0.2",
        "orchestrator.batch_size=null",
        "orchestrator.token_batch_size=999",
    ],
    [
        "algo=opd",
        "teacher=endpoint",
        "teacher.name=big",
        "teacher.base_url=[http://a/v1,http://b/v1]",
        "env=math_retry",
    ],
    [
        "algo=echo",
        "+algo.roles.user.alpha=0.5",
        "+algo@envs.math.algo=sft",
        "+filters.post_batch.mine={_target_: a.B, x: {y: 1}}",
    ],
    ["filters=enforce", "~filters.pre_batch.gibberish", "filters.post_batch.repetition.mode=ngram"],
    [
        "algo=custom_class",
        "algo._target_=a.B",
        "+algo.judge={name: ${teacher.name}, base_url: [http://a]}",
        "+algo.x={y: 1}",
    ],
    ["+inference.args={block-size: 16}", "renderer=qwen3", "+renderer.thinking_retention=all", "seed=7"],
]


@pytest.mark.parametrize("overrides", CHOICES, ids=lambda overrides: overrides[0] if overrides else "default")
def test_saved_and_loaded_it_is_the_same_config(overrides, tmp_path):
    config = compose(["run.name=x", f"run.dir={tmp_path}/x", *overrides])
    path = new_run_dir(config) / "config.yaml"
    again = load_config(path)
    assert isinstance(again, TrainConfig) and plain(again) == plain(config)
    for name in ("orchestrator", "trainer", "inference", "model", "teacher"):
        assert getattr(again, name) == getattr(config, name), "of the same types, with the same values"
    assert OmegaConf.to_container(OmegaConf.load(path)) == OmegaConf.to_container(OmegaConf.create(plain(config)))


@pytest.mark.parametrize("overrides", [[], ["algo=echo", "+algo.roles.user.alpha=0.5", "filters=enforce_post"]])
def test_what_was_loaded_builds_the_same_components(overrides, tmp_path):
    config = compose(["run.name=x", f"run.dir={tmp_path}/x", *overrides])
    again = load_config(new_run_dir(config) / "config.yaml")
    validate(again)
    built, rebuilt = build_components(config).envs["math"], build_components(again).envs["math"]
    assert (rebuilt.algorithm, rebuilt.filters) == (built.algorithm, built.filters)
    assert vars(rebuilt.sampler) == vars(built.sampler) and vars(rebuilt.buffer) == vars(built.buffer)


def test_nothing_in_it_is_left_to_resolve(tmp_path):
    config = compose(["run.name=x", f"run.dir={tmp_path}/x", "seed=5"])
    text = (new_run_dir(config) / "config.yaml").read_text()
    assert "${" not in text and "???" not in text
    assert OmegaConf.load(tmp_path / "x" / "config.yaml").envs.math.args.seed == 5


def test_it_composes_to_the_same_again(tmp_path):
    one, two = compose(["run.name=x"]), compose(["run.name=x"])
    assert one == two and one is not two


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "result.json"])
def test_a_directory_that_holds_a_run_is_refused(tmp_path, name):
    refuse_existing(tmp_path / "new")
    refuse_existing(tmp_path)
    (tmp_path / name).touch()
    with pytest.raises(ConfigError, match="already holds a run"):
        refuse_existing(tmp_path)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("+max_stepz=3", "max_stepz: there is no such key in TrainConfig; did you mean max_steps?"),
        ("+envs.math.argz=1", "did you mean envs.math.args?"),
        ("+algo.sampling.top_p=1", "algo.sampling.top_p: there is no such key in SourceConfig"),
    ],
)
def test_a_key_that_a_plus_appends_beside_a_schema_is_refused(override, says):
    with pytest.raises(ConfigError) as caught:
        compose(["run.name=x", override])
    assert says in str(caught.value)


def test_a_plus_may_add_where_keys_are_free():
    config = compose(["run.name=x", "+inference.args.block-size=16", "+envs.math.args.mine=1"])
    assert config.inference.args == {"block-size": 16} and config.envs["math"].args["mine"] == 1
