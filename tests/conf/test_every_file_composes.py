"""Every file under conf/ composes, passes the checks and can be loaded back. New files are covered as they come."""

import shutil
import warnings

import pytest
import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.errors import MissingConfigException
from hydra.utils import instantiate

from prl.config.build import build, plain
from prl.config.compose import CONF, compose, options
from prl.config.schema import TrainConfig
from prl.config.signature import schema_of
from prl.config.validate import validate
from prl.curriculum.pools import TaskCurriculum
from prl.filters.base import Filter
from prl.filters.gibberish import Gibberish
from prl.filters.repetition import Repetition
from prl.launch.components import build_components
from prl.tools.sweep.naming import LAUNCHERS, digest

REQUIRED = {  # what a user has to fill in for these options
    ("model", "hf"): ["model.path=some/model"],
    ("env", "jsonl"): ["envs.jsonl.args.path=my.jsonl"],
    ("loss", "custom"): ["loss._target_=prl.models.model_path"],
    ("algo", "custom"): ["algo.fn._target_=prl.models.model_path"],  # any function will do
    ("algo", "custom_class"): ["algo._target_=prl.algorithms.reward.RewardAlgorithm"],
    ("renderer", "custom"): ["renderer.import_path=my_renderers.Mine"],
    ("sampling", "greedy"): ["algo=sft"],  # a policy that trains on its own samples has to sample
    ("teacher", "endpoint"): ["teacher.name=large", "teacher.base_url=http://127.0.0.1:8001/v1"],
}
ROOTS = sorted(path.stem for path in CONF.glob("*.yaml"))
OF_TRAIN = [
    (group, option) for group, found in options().items() for option in found if group not in ("filter", "engine")
]


def check(config):
    """What is refused before a model or a task is looked at."""
    validate(config)
    build_components(config)


@pytest.mark.parametrize(("group", "option"), OF_TRAIN, ids=lambda value: value)
def test_option_composes_and_its_components_are_built(group, option, monkeypatch):
    monkeypatch.setattr("prl.monitors.tensorboard.TensorBoard.check", lambda *_: None)
    config = compose(["run.name=x", f"{group}={option}", *REQUIRED.get((group, option), ())])
    assert isinstance(config, TrainConfig)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(config)


def test_every_file_is_an_option_and_every_option_is_composed_above():
    files = {(path.parent.name, path.stem) for path in CONF.glob("*/*.yaml")}
    assert {(group, name) for group, name in files if group not in ("filter", "engine")} == set(OF_TRAIN)
    assert {("algo", "grpo"), ("loss", "aipo"), ("renderer", "glm-5"), ("curriculum", "default")} <= files


@pytest.mark.parametrize("name", options()["filter"])
def test_a_filter_alone_in_a_slot(name):
    config = compose(["run.name=x", "filters=none", f"+filter@filters.post_batch.mine={name}"])
    check(config)
    assert type(build(config.filters.post_batch["mine"], Filter, "mine")).__name__.lower() == name.replace("_", "")


@pytest.mark.parametrize("name", ROOTS)
def test_root_composes(name):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        assert hydra_compose(name)


@pytest.mark.parametrize("path", sorted(CONF.rglob("*.yaml")), ids=lambda path: path.relative_to(CONF).as_posix())
def test_file_is_valid_yaml_of_a_mapping(path):
    assert isinstance(yaml.safe_load(path.read_text()), dict)


@pytest.mark.parametrize(
    ("group", "option"), [(g, o) for g, o in OF_TRAIN if g in ("experiment", "debug")], ids=lambda value: value
)
def test_experiment_changes_something_and_opens_with_its_command(group, option):
    text = (CONF / group / f"{option}.yaml").read_text()
    assert text.startswith(f"# @package _global_\n# python -m prl.train {group}={option}")
    assert compose(["run.name=x", f"{group}={option}"]) != compose(["run.name=x"])


def test_two_envs_side_by_side():
    config = compose(["run.name=x", "env=[math,reverse_text]", "seed=4"])
    assert set(config.envs) == {"math", "reverse_text"}
    assert config.envs["math"].args["seed"] == config.envs["reverse_text"].args["seed"] == 4
    check(config)


def test_the_same_env_twice_under_two_names():
    config = compose(["run.name=x", "+env@envs.b=math", "envs.b.args.max_operand=9", "envs.b.weight=2"])
    assert set(config.envs) == {"math", "b"}
    assert (config.envs["b"].args["max_operand"], config.envs["math"].args["max_operand"]) == (9, 99)
    assert config.envs["b"].weight == 2.0 and config.envs["b"].algo is None
    check(config)


def test_an_env_with_a_node_of_its_own_takes_nothing_from_the_runs():
    config = compose(
        [
            "run.name=x",
            "algo.length_penalty=turns",
            "loss.delta=3",
            "+algo@envs.math.algo=grpo",
            "+loss@envs.math.loss=aipo",
        ]
    )
    assert config.algo.length_penalty == "turns" and config.envs["math"].algo.length_penalty is None
    assert plain(config.envs["math"].loss) == {
        "_target_": "prl.losses.aipo_loss",
        "_partial_": True,
        "delta": 8.0,
        "entropy_coef": 0.0,
        "agg_mode": "token_mean",
        "constant_length": None,
    }


PER_ENV = [
    (group, option) for group, option in OF_TRAIN if group in ("algo", "loss", "filters", "renderer", "curriculum")
]


@pytest.mark.parametrize(("group", "option"), PER_ENV, ids=lambda value: value)
def test_an_env_chooses_by_group_what_the_run_chooses_by_group(group, option):
    needed = REQUIRED.get((group, option), [])
    alone = compose(["run.name=x", f"{group}={option}", *needed])
    given = ["run.name=x", "env=[math,reverse_text]", f"+{group}@envs.math.{group}={option}"]
    own = compose([*given, *(f"envs.math.{setting}" for setting in needed)])
    assert plain(own.node_of("math", group)[1]) == plain(getattr(alone, group))
    assert plain(own.node_of("reverse_text", group)[1]) == plain(getattr(compose(["run.name=x"]), group))
    check(own)


def test_an_env_chooses_its_sampling_by_group_and_takes_the_rest_from_the_run():
    given = ["run.name=x", "env=[math,reverse_text]", "algo=sft", "sampling.max_tokens=9", "sampling.temperature=0.7"]
    for own, temperatures in (("greedy", (0.0, 0.7)), ("default", (0.7, 0.7))):
        envs = build_components(compose([*given, f"+sampling@envs.math.sampling={own}"])).envs
        assert (envs["math"].sampler.temperature, envs["reverse_text"].sampler.temperature) == temperatures
        assert envs["math"].sampler.max_tokens == envs["reverse_text"].sampler.max_tokens == 9
    config = compose([*given, "+sampling@envs.math.sampling=greedy", "envs.math.sampling.temperature=0.2"])
    assert build_components(config).envs["math"].sampler.temperature == 0.2


def test_evaluation_chooses_its_sampling_by_group():
    env = build_components(compose(["run.name=x", "+sampling@orchestrator.eval.sampling=greedy"])).envs["math"]
    assert (env.sampler.temperature, env.eval_sampler.temperature) == (1.0, 0.0)


def test_sampling_is_inherited_knob_by_knob():
    config = compose(
        ["run.name=x", "sampling.temperature=0.9", "sampling.max_tokens=32", "envs.math.sampling.temperature=0.7"]
    )
    assert (config.envs["math"].sampling.temperature, config.envs["math"].sampling.max_tokens) == (0.7, 32)
    env = build_components(config).envs["math"]
    assert (env.sampler.temperature, env.sampler.max_tokens) == (0.7, 32)
    assert (env.eval_sampler.temperature, env.eval_sampler.max_tokens) == (0.7, 32), "as in training"
    own = compose(["run.name=x", "orchestrator.eval.sampling.temperature=0", "orchestrator.eval.sampling.top_p=0.9"])
    env = build_components(own).envs["math"]
    assert (env.sampler.temperature, env.eval_sampler.temperature, env.eval_sampler.top_p) == (1.0, 0.0, 0.9)


ALL_FILTERS = {"gibberish", "repetition", "zero_advantage"}


@pytest.mark.parametrize(
    ("option", "pre", "post"),
    [
        ("default", set(), {"zero_advantage"}),
        ("monitor", set(), set()),
        ("enforce", ALL_FILTERS, ALL_FILTERS),
        ("enforce_post", set(), ALL_FILTERS),
    ],
)
def test_all_filters_are_in_both_slots_and_the_option_says_which_drop(option, pre, post):
    filters = compose(["run.name=x", f"filters={option}"]).filters
    assert set(filters.pre_batch) == set(filters.post_batch) == ALL_FILTERS
    assert {name for name, node in filters.pre_batch.items() if node.enforce} == pre
    assert {name for name, node in filters.post_batch.items() if node.enforce} == post
    for name in ALL_FILTERS:
        assert type(filters.pre_batch[name]) is type(filters.post_batch[name]), "each has its schema"
    assert next(iter(filters.post_batch)) == "zero_advantage", "no monitor takes its matches from it"


def test_filters_are_what_the_specification_says():
    slot = {name: build(node, Filter, name) for name, node in compose(["run.name=x"]).filters.pre_batch.items()}
    gibberish, repetition = slot["gibberish"], slot["repetition"]
    assert (gibberish.mode, gibberish.enforce) == ("token", False)
    assert (gibberish.setting("token_id_threshold"), gibberish.setting("logprob_offset")) == (100_000, 2.0)
    assert (repetition.mode, repetition.enforce) == ("prob", False)
    assert (repetition.setting("window"), repetition.setting("prob_threshold")) == (3000, 0.99)


@pytest.mark.parametrize(
    ("option", "changed"),
    [
        ("default", {}),
        ("pools", {"easy_threshold": 0.95, "hard_threshold": 0.05, "refill": True}),
        ("odf", {"online_difficulty_filtering": True}),
        (
            "pools_odf",
            {"easy_threshold": 0.95, "hard_threshold": 0.05, "refill": True, "online_difficulty_filtering": True},
        ),
    ],
)
def test_what_each_buffer_turns_on(option, changed):
    built = build_components(compose(["run.name=x", f"curriculum={option}"])).envs["math"].curriculum
    assert vars(built) == vars(build({"_target_": TARGET, **changed}, TaskCurriculum, "curriculum"))


TARGET = "prl.curriculum.pools.TaskCurriculum"


def test_a_buffer_without_options_is_the_one_that_was():
    defaults = {
        "shuffle": True,
        "easy_threshold": None,
        "hard_threshold": None,
        "refill": False,
        "load_from": None,
        "hash_keys": None,
        "easy_fraction": 0.0,
        "hard_fraction": 0.0,
        "online_difficulty_filtering": False,
    }
    assert plain(schema_of(TaskCurriculum)()) == {"_target_": TARGET, **defaults}


def test_without_filters_both_slots_are_empty():
    filters = compose(["run.name=x", "filters=none"]).filters
    assert filters.pre_batch == filters.post_batch == {}


def test_one_filter_is_left_out_changed_or_added_on_the_command_line():
    config = compose(
        [
            "run.name=x",
            "~filters.pre_batch.gibberish",
            "filters.pre_batch.repetition.window=9",
            "filters.post_batch.zero_advantage.enforce=false",
            "+filters.post_batch.mine={_target_: my.Filter, enforce: true, tokens: 2}",
        ]
    )
    assert set(config.filters.pre_batch) == {"repetition", "zero_advantage"}
    assert config.filters.pre_batch["repetition"].window == 9 and config.filters.post_batch["repetition"].window is None
    assert not config.filters.post_batch["zero_advantage"].enforce
    assert config.filters.post_batch["mine"]["tokens"] == 2
    validate(config)


def test_a_filter_is_put_into_an_empty_slot_with_its_schema():
    added = "+filter@filters.post_batch.gibberish=gibberish"
    config = compose(["run.name=x", "filters=none", added, "filters.post_batch.gibberish.mode=mean_logprob"])
    assert plain(config.filters.post_batch) == {"gibberish": plain(schema_of(Gibberish)(mode="mean_logprob"))}
    assert config.filters.pre_batch == {}
    check(config)


def test_a_conf_file_of_ones_own_sets_the_slots_anew(tmp_path, monkeypatch):
    copy = shutil.copytree(CONF, tmp_path / "conf")
    (copy / "filters" / "mine.yaml").write_text(
        "defaults:\n  - /filter@post_batch.repetition: repetition\n  - _self_\n"
        "post_batch:\n  repetition: {mode: ngram, threshold: 0.3, enforce: true}\n"
    )
    monkeypatch.setattr("prl.config.compose.CONF", copy)
    filters = compose(["run.name=x", "filters=mine"]).filters
    assert filters.pre_batch == {}
    expected = schema_of(Repetition)(mode="ngram", threshold=0.3, enforce=True)
    assert plain(filters.post_batch) == {"repetition": plain(expected)}


@pytest.mark.parametrize("override", ["filters.post_batch={}", "filters={post_batch: {}}"])
def test_setting_a_slot_replaces_it(override):
    changed = compose(
        ["run.name=x", override.replace("{}", "{gibberish: {enforce: true}, mine: {_target_: a.B}}")]
    ).filters
    assert list(changed.post_batch) == ["gibberish", "mine"] and changed.post_batch["gibberish"]["enforce"] is True
    assert changed.post_batch["gibberish"]["_target_"].endswith("Gibberish"), "it keeps what is not set"
    assert set(changed.pre_batch) == ALL_FILTERS, "and the other slot stays"
    assert compose(["run.name=x", override]).filters.post_batch == {}


def test_a_replaced_slot_keeps_what_another_override_names_and_forgets_what_one_removes():
    slot = "filters.post_batch={repetition: {enforce: true}}"
    left = compose(["run.name=x", slot, "filters.post_batch.gibberish.enforce=true"]).filters.post_batch
    assert {name: node["enforce"] for name, node in left.items()} == {"repetition": True, "gibberish": True}
    added = compose(["run.name=x", slot, "+filter@filters.post_batch.more=gibberish"]).filters.post_batch
    assert list(added) == ["repetition", "more"]
    assert compose(["run.name=x", slot, "~filters.post_batch.repetition"]).filters.post_batch == {}


def test_an_experiment_that_is_not_there_is_no_default_run():
    with pytest.raises(MissingConfigException, match="experiment/on_polcy"):
        compose(["run.name=x", "experiment=on_polcy"])


def test_experiment_on_policy_is_synchronous():
    assert compose(["run.name=x", "experiment=on_policy"]).orchestrator.max_async_level == 0


def test_the_name_of_a_run_says_its_algorithm():
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = hydra_compose("train", return_hydra_config=True)
        assert config.run.name.startswith("grpo-") and config.run.dir == f"outputs/{config.run.name}"


def test_the_jobs_of_a_sweep_are_named_by_what_varies(monkeypatch):
    overrides = ["run.name=s", "max_steps=3", "seed=1", "model.path=a/b"]
    fixed = "hydra.job.config.override_dirname.exclude_keys=[run.name,max_steps]"
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = hydra_compose("train", [*overrides, fixed], return_hydra_config=True)
        monkeypatch.setattr(HydraConfig.instance(), "cfg", None)
        HydraConfig.instance().set_config(config)
        assert config.hydra.sweep.subdir == f"model.path=a_b,seed=1-{digest('model.path=a/b,seed=1')}"
        assert config.hydra.sweep.dir == "outputs/s"


def hydras(*overrides):
    """The node `hydra` of a sweep."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra_compose("train", ["run.name=s", *overrides], return_hydra_config=True).hydra


@pytest.mark.parametrize(
    ("option", "module"),
    [
        ("joblib", "hydra_joblib_launcher.joblib_launcher"),
        ("slurm", "hydra_submitit_launcher.submitit_launcher"),
    ],
)
def test_an_option_for_sweeps_chooses_a_launcher(option, module):
    launcher = instantiate(hydras(f"sweep={option}").launcher)
    assert type(launcher).__module__ == f"hydra_plugins.{module}"
    assert option in LAUNCHERS


def test_a_slurm_job_has_what_prl_and_the_user_set():
    params = instantiate(hydras("sweep=slurm", "hydra.launcher.partition=long").launcher).params
    assert {key: params[key] for key in ("name", "timeout_min", "cpus_per_task", "array_parallelism", "partition")} == {
        "name": "prl",
        "timeout_min": 1440,
        "cpus_per_task": 4,
        "array_parallelism": 16,
        "partition": "long",
    }


def test_a_search_optimises_what_optimized_metric_says_and_goes_on_after_a_failure():
    node = hydras("sweep=[lr_search,joblib]", "optimized_metric.direction=minimize").sweeper
    sweeper = instantiate(node).sweeper
    assert sweeper._get_directions() == ["minimize"] and sweeper.max_failure_rate == 1.0 and sweeper.n_jobs == 1
    assert node.sampler.seed == 0 and list(node.params) == ["trainer.optim.lr"]
    assert hydras("sweep=lr_search").sweeper.direction == "maximize"


def test_a_conf_file_that_does_not_fit_its_schema_would_be_found(tmp_path, monkeypatch):
    copy = shutil.copytree(CONF, tmp_path / "conf")
    (copy / "loss" / "mine.yaml").write_text("defaults:\n  - aipo\n  - _self_\ndelt: 3\n")
    monkeypatch.setattr("prl.config.compose.CONF", copy)
    with pytest.raises(Exception, match="delt"):
        compose(["run.name=x", "loss=mine"])


def test_a_conf_file_of_ones_own_for_sampling_sets_what_it_names_for_the_run_or_an_env(tmp_path, monkeypatch):
    copy = shutil.copytree(CONF, tmp_path / "conf")
    (copy / "sampling" / "short.yaml").write_text("max_tokens: 9\n")
    (copy / "sampling" / "based.yaml").write_text("defaults: [short, _self_]\ntemperature: 0.5\n")
    monkeypatch.setattr("prl.config.compose.CONF", copy)
    for choice in ("sampling=based", "+sampling@envs.math.sampling=based"):
        own = compose(["run.name=x", choice]).envs["math"].sampling
        assert (own.max_tokens, own.temperature, own.top_p) == (9, 0.5, 1.0)
