"""Every file under conf/ composes, passes the checks and can be loaded back. New files are covered as they come."""

import functools
import itertools
import re
import shutil
import warnings

import pytest
import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.errors import MissingConfigException
from hydra.utils import instantiate
from prepared_run import validated

from prl.base.errors import ConfigError
from prl.config.build import build, options_taken, plain, sampling_of
from prl.config.compose import CONF, compose, options
from prl.config.schema import TrainConfig
from prl.curriculum.pools import TaskCurriculum
from prl.filters.base import Filter
from prl.filters.gibberish import Gibberish
from prl.filters.repetition import Repetition
from prl.launch.components import build_components
from prl.tools.sweep.naming import LAUNCHERS, digest

REQUIRED = {  # what a user has to fill in for these options
    ("schedule", "custom"): ["trainer.schedule._target_=prl.trainer.schedule.Constant"],
    ("curriculum", "custom"): ["curriculum._target_=prl.curriculum.pools.TaskCurriculum"],
    ("optim", "custom"): ["trainer.optim._target_=torch.optim.Adamax"],
    ("model", "hf"): ["model.path=some/model"],
    ("env", "jsonl"): ["envs.jsonl.args.path=my.jsonl"],
    ("env", "judge"): ["envs.judge.args.path=my.jsonl"],
    ("env", "tools"): ["envs.tools.args.env=my_shop.Shop"],
    ("loss", "custom"): ["loss._target_=prl.models.model_path"],
    ("algo", "custom"): ["algo.fn._target_=prl.models.model_path"],  # any function will do
    ("algo", "custom_class"): ["algo._target_=prl.algorithms.reward.RewardAlgorithm"],
    ("renderer", "custom"): ["renderer.import_path=my_renderers.Mine"],
    ("sampling", "greedy"): ["algo=sft"],  # a policy that trains on its own samples has to sample
    ("teacher", "endpoint"): ["teacher.name=large", "teacher.base_url=http://127.0.0.1:8001/v1"],
}
RECIPES = CONF.parent / "prl" / "RECIPES.md"
ROOTS = sorted(path.stem for path in CONF.glob("*.yaml"))
PER_ENV = ("algo", "loss", "filters", "renderer", "curriculum")
INDEPENDENT = ("curriculum", "filters", "launcher", "loss", "monitor", "optim", "schedule", "weights")
"""Groups of which any option goes with any of the others': one of each is composed together."""
MADE_OF_GROUPS = ("arm", "debug", "env", "experiment", "model", "settings", "sweep")
"""Groups whose options name no class themselves."""
TOGETHER = [
    [(group, option) for group, option in zip(INDEPENDENT, row, strict=True) if option]
    for row in itertools.zip_longest(*(options()[group] for group in INDEPENDENT))
]
ALONE = [
    (group, option)
    for group, names in options().items()
    for option in names
    if group not in (*INDEPENDENT, "experiment", "filter", "engine", "env", "renderer")
]
"""Options that are composed alone; those of `experiment` are in `tests/test_experiments.py`."""


@functools.cache
def composed(*overrides):
    """A config, which several tests share: not to be changed."""
    return compose(["run.name=x", *overrides])


def defaults_of(cls):
    """The node of a component whose options are all left out."""
    return {"_target_": f"{cls.__module__}.{cls.__qualname__}", **options_taken(cls).defaults}


def chosen(choices):
    """The overrides that choose options of groups, with what these need."""
    return [text for choice in choices for text in ("=".join(choice), *REQUIRED.get(choice, ()))]


def check(config):
    """What is refused before a model or a task is looked at."""
    validated(config)
    build_components(config)


@pytest.mark.parametrize(
    "choices", [*TOGETHER, *([choice] for choice in ALONE)], ids=lambda choices: ",".join(map("=".join, choices))
)
def test_options_compose_and_their_components_are_built(choices, monkeypatch):
    monkeypatch.setattr("prl.monitors.tensorboard.TensorBoard.check", lambda *_: None)
    config = composed(*chosen(choices))
    assert isinstance(config, TrainConfig)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(config)


def test_all_envs_compose_side_by_side():
    names = options()["env"]
    needed = [text for (group, _), texts in REQUIRED.items() if group == "env" for text in texts]
    config = composed(f"env=[{','.join(names)}]", *needed, "seed=4")
    assert set(config.envs) == set(names)
    assert config.envs["math"].args["seed"] == config.envs["reverse_text"].args["seed"] == 4
    check(config)


@pytest.mark.parametrize("group", PER_ENV)
def test_an_env_chooses_by_group_what_the_run_chooses_by_group(group):
    """An env for each option, which has what a run has that chooses it."""
    given = []
    for number, option in enumerate(options()[group]):
        own = f"envs.e{number}"
        needed = (f"{own}.{setting}" for setting in REQUIRED.get((group, option), ()))
        given += [f"+env@{own}=math", f"+{group}@{own}.{group}={option}", *needed]
    config = composed("env=reverse_text", *given)
    for number, option in enumerate(options()[group]):
        if group != "renderer":  # the files of renderers differ in a name alone
            alone = composed(*chosen([(group, option)]))
            assert plain(config.node_of(f"e{number}", group)[1]) == plain(getattr(alone, group)), option
    assert plain(config.node_of("reverse_text", group)[1]) == plain(getattr(composed(), group))
    check(config)


def test_a_run_chooses_its_renderer_by_group():
    assert composed("renderer=glm-5").renderer["name"] == "glm-5" and composed().renderer["name"] == "auto"


def test_a_filter_alone_in_a_slot():
    added = [f"+filter@filters.post_batch.{name}={name}" for name in options()["filter"]]
    config = composed("filters=none", *added)
    check(config)
    for name, node in config.filters.post_batch.items():
        assert type(build(node, Filter, "mine")).__name__.lower() == name.replace("_", "")


@pytest.mark.parametrize("group", [group for group in options() if group not in MADE_OF_GROUPS])
def test_plain_hydra_makes_what_each_option_names(group):
    """`hydra.utils.instantiate` alone, without prl's reader; the options of a group stand side by side as `mine.e0`…"""
    given = []
    for number, option in enumerate(options()[group]):
        given.append(f"+{group}@mine.e{number}={option}")
        for text in REQUIRED.get((group, option), ()):
            given += [re.sub(rf"^(trainer\.)?{group}\.", f"mine.e{number}.", text)] if group in text else []
    mine = of_hydra("run.name=x", "model=tiny", *given).mine
    assert len(mine) == len(options()[group])
    for node in mine.values():
        instantiate(node, _convert_="all")


def test_every_root_and_every_file_is_a_mapping_that_composes():
    with initialize_config_dir(str(CONF), version_base="1.3"):
        assert all(hydra_compose(name) for name in ROOTS)
    for path in CONF.rglob("*.yaml"):
        assert isinstance(yaml.safe_load(path.read_text()), dict), path
    depths = {len(path.relative_to(CONF).parts) for path in CONF.rglob("*.yaml")}
    assert depths == {1, 2}, "a file in a folder of its own would be none of the options above"


@pytest.mark.parametrize("group", ["experiment", "debug"])
def test_an_experiment_opens_with_its_command(group):
    for option in options()[group]:
        text = (CONF / group / f"{option}.yaml").read_text()
        assert text.startswith(f"# @package _global_\n# python -m prl.train {group}={option}")


def test_the_same_env_twice_under_two_names():
    config = composed("+env@envs.b=math", "envs.b.args.max_operand=9", "envs.b.weight=2")
    assert set(config.envs) == {"math", "b"}
    assert (config.envs["b"].args["max_operand"], config.envs["math"].args["max_operand"]) == (9, 99)
    assert config.envs["b"].weight == 2.0 and config.envs["b"].algo is None
    check(config)


def test_own_node_takes_nothing_from_the_runs():
    own = ("+algo@envs.math.algo=grpo", "+loss@envs.math.loss=aipo")
    config = composed("algo.length_penalty=turns", "loss.delta=3", *own)
    assert config.algo["length_penalty"] == "turns" and config.envs["math"].algo["length_penalty"] is None
    assert (config.loss["delta"], config.envs["math"].loss["delta"]) == (3.0, 8.0)


def test_env_chooses_its_sampling_by_group():
    given = ["env=[math,reverse_text]", "algo=sft", "sampling.max_tokens=9", "sampling.temperature=0.7"]
    for own, settings in (("greedy", (0.0, 9)), ("default", (1.0, None))):
        envs = build_components(composed(*given, f"+sampling@envs.math.sampling={own}")).envs
        assert (envs["math"].sampler.temperature, envs["math"].sampler.max_tokens) == settings
        assert (envs["reverse_text"].sampler.temperature, envs["reverse_text"].sampler.max_tokens) == (0.7, 9)
    config = composed(*given, "+sampling@envs.math.sampling=greedy", "envs.math.sampling.temperature=0.2")
    assert build_components(config).envs["math"].sampler.temperature == 0.2


def test_evaluation_chooses_its_sampling_by_group():
    env = build_components(composed("+sampling@orchestrator.eval.sampling=greedy")).envs["math"]
    assert (env.sampler.temperature, env.eval_sampler.temperature) == (1.0, 0.0)
    given = ["sampling.max_tokens=9", "envs.math.sampling.temperature=0.7"]
    env = build_components(composed(*given, "+sampling@orchestrator.eval.sampling=default")).envs["math"]
    assert (env.sampler.temperature, env.sampler.max_tokens) == (0.7, 9)
    assert (env.eval_sampler.temperature, env.eval_sampler.max_tokens) == (1.0, None)


def test_sampling_is_inherited_option_by_option():
    config = composed("sampling.temperature=0.9", "sampling.max_tokens=32", "envs.math.sampling.temperature=0.7")
    env = build_components(config).envs["math"]
    assert (env.sampler.temperature, env.sampler.max_tokens) == (0.7, 32)
    assert (env.eval_sampler.temperature, env.eval_sampler.max_tokens) == (0.7, 32), "as in training"
    own = composed("orchestrator.eval.sampling.temperature=0", "orchestrator.eval.sampling.top_p=0.9")
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
def test_option_says_which_filters_drop(option, pre, post):
    filters = composed(f"filters={option}").filters
    assert set(filters.pre_batch) == set(filters.post_batch) == ALL_FILTERS
    assert {name for name, node in filters.pre_batch.items() if node["enforce"]} == pre
    assert {name for name, node in filters.post_batch.items() if node["enforce"]} == post
    for name in ALL_FILTERS:
        assert filters.pre_batch[name].keys() == filters.post_batch[name].keys()
    assert next(iter(filters.post_batch)) == "zero_advantage", "no monitor takes its matches from it"


def test_filters_are_what_the_specification_says():
    slot = {name: build(node, Filter, name) for name, node in composed().filters.pre_batch.items()}
    gibberish, repetition = slot["gibberish"], slot["repetition"]
    assert (gibberish.mode, gibberish.enforce) == ("token", False)
    assert (gibberish.setting("token_id_threshold"), gibberish.setting("logprob_offset")) == (100_000, 2.0)
    assert (repetition.mode, repetition.enforce) == ("prob", False)
    assert (repetition.setting("window"), repetition.setting("prob_threshold")) == (3000, 0.99)


POOLS = {"easy_threshold": 0.95, "hard_threshold": 0.05, "refill": True}
ODF = {"online_difficulty_filtering": True}


@pytest.mark.parametrize(
    ("option", "changed"), [("default", {}), ("pools", POOLS), ("odf", ODF), ("pools_odf", POOLS | ODF)]
)
def test_what_each_curriculum_turns_on(option, changed):
    defaults = plain(defaults_of(TaskCurriculum))
    assert plain(composed(f"curriculum={option}").curriculum) == defaults | changed


def test_a_curriculum_without_options_draws_shuffled_tasks_from_one_pool():
    defaults = defaults_of(TaskCurriculum)
    assert not defaults.pop("replay").share
    assert {name for name, value in defaults.items() if value} == {"_target_", "shuffle"}


def test_filter_is_removed_changed_or_added():
    config = composed(
        "~filters.pre_batch.gibberish",
        "filters.pre_batch.repetition.window=9",
        "filters.post_batch.zero_advantage.enforce=false",
        "+filters.post_batch.mine={_target_: my.Filter, enforce: true, tokens: 2}",
    )
    assert set(config.filters.pre_batch) == {"repetition", "zero_advantage"}
    assert config.filters.pre_batch["repetition"]["window"] == 9
    assert not config.filters.post_batch["zero_advantage"]["enforce"]
    assert config.filters.post_batch["mine"]["tokens"] == 2
    validated(config)


def test_a_filter_is_put_into_an_empty_slot_with_its_schema():
    added = "+filter@filters.post_batch.gibberish=gibberish"
    config = composed("filters=none", added, "filters.post_batch.gibberish.mode=mean_logprob")
    assert config.filters.post_batch == {"gibberish": defaults_of(Gibberish) | {"mode": "mean_logprob"}}
    assert config.filters.pre_batch == composed("filters=none").filters.post_batch == {}
    check(config)


@pytest.fixture
def own_conf(tmp_path, monkeypatch):
    """`own_conf(file, text)`: composes over a copy of `conf/` with a file more."""

    def made(file, text):
        (copy / file).write_text(text)

    copy = shutil.copytree(CONF, tmp_path / "conf")
    monkeypatch.setattr("prl.config.compose.CONF", copy)
    return made


def test_a_conf_file_of_ones_own_sets_the_slots_anew(own_conf):
    own_conf(
        "filters/mine.yaml",
        "defaults:\n  - /filter@post_batch.repetition: repetition\n  - _self_\n"
        "post_batch:\n  repetition: {mode: ngram, threshold: 0.3, enforce: true}\n",
    )
    filters = compose(["run.name=x", "filters=mine"]).filters
    assert filters.pre_batch == {}
    expected = defaults_of(Repetition) | {"mode": "ngram", "threshold": 0.3, "enforce": True}
    assert filters.post_batch == {"repetition": expected}


def test_a_conf_file_that_does_not_fit_its_function_is_refused(own_conf):
    own_conf("loss/mine.yaml", "defaults:\n  - aipo\n  - _self_\ndelt: 3\n")
    with pytest.raises(ConfigError, match="^loss.delt: .* did you mean loss.delta"):
        check(compose(["run.name=x", "loss=mine"]))


def test_own_sampling_file_sets_what_it_names(own_conf):
    own_conf("sampling/short.yaml", "max_tokens: 9\n")
    own_conf("sampling/based.yaml", "defaults: [short, _self_]\ntemperature: 0.5\n")
    for choice in ("sampling=based", "+sampling@envs.math.sampling=based"):
        _, own = sampling_of(compose(["run.name=x", choice]), "math")
        assert (own["max_tokens"], own["temperature"], own["top_p"]) == (9, 0.5, 1.0)


@pytest.mark.parametrize("override", ["filters.post_batch={}", "filters={post_batch: {}}"])
def test_setting_a_slot_replaces_it(override):
    named = override.replace("{}", "{gibberish: {enforce: true}, mine: {_target_: a.B}}")
    changed = composed(named).filters
    assert list(changed.post_batch) == ["gibberish", "mine"] and changed.post_batch["gibberish"]["enforce"] is True
    assert changed.post_batch["gibberish"]["_target_"].endswith("Gibberish"), "it keeps what is not set"
    assert set(changed.pre_batch) == ALL_FILTERS, "and the other slot stays"
    assert composed(override).filters.post_batch == {}


def test_replaced_slot_keeps_what_other_overrides_name():
    slot = "filters.post_batch={repetition: {enforce: true}}"
    left = composed(slot, "filters.post_batch.gibberish.enforce=true").filters.post_batch
    assert {name: node["enforce"] for name, node in left.items()} == {"repetition": True, "gibberish": True}
    added = composed(slot, "+filter@filters.post_batch.more=gibberish").filters.post_batch
    assert list(added) == ["repetition", "more"]
    assert composed(slot, "~filters.post_batch.repetition").filters.post_batch == {}


@pytest.mark.parametrize("recipe", re.findall(r"^\| .*? \| \[?`(.*?)`", RECIPES.read_text(), re.MULTILINE))
def test_a_recipe_of_the_page_is_a_run(recipe):
    check(composed(*recipe.split()))


def test_an_experiment_that_is_not_there_is_no_default_run():
    with pytest.raises(MissingConfigException, match="experiment/on_polcy"):
        composed("experiment=on_polcy")


def test_experiment_on_policy_is_synchronous():
    assert composed("experiment=on_policy").orchestrator.max_async_level == 0


# --- Hydra's own node -------------------------------------------------------------------------------------------------


@functools.cache
def of_hydra(*overrides):
    """A composed config with Hydra's own node in it."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra_compose("train", list(overrides), return_hydra_config=True)


def test_the_name_of_a_run_says_its_algorithm():
    config = of_hydra()
    assert config.run.name.startswith("grpo-") and config.run.dir == f"outputs/{config.run.name}"


def test_the_jobs_of_a_sweep_are_named_by_what_varies(monkeypatch):
    fixed = "hydra.job.config.override_dirname.exclude_keys=[run.name,max_steps]"
    config = of_hydra("run.name=s", "max_steps=3", "seed=1", "model.path=a/b", fixed)
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)
    HydraConfig.instance().set_config(config)
    assert config.hydra.sweep.subdir == f"model.path=a_b,seed=1-{digest('model.path=a/b,seed=1')}"
    assert config.hydra.sweep.dir == "outputs/s"


@pytest.mark.parametrize(
    ("option", "module"),
    [
        ("joblib", "hydra_joblib_launcher.joblib_launcher"),
        ("slurm", "hydra_submitit_launcher.submitit_launcher"),
    ],
)
def test_an_option_for_sweeps_chooses_a_launcher(option, module):
    launcher = instantiate(of_hydra("run.name=s", f"sweep={option}").hydra.launcher)
    assert type(launcher).__module__ == f"hydra_plugins.{module}"
    assert option in LAUNCHERS


def test_a_slurm_job_has_what_prl_and_the_user_set():
    config = of_hydra("run.name=s", "sweep=slurm", "hydra.launcher.partition=long")
    params = instantiate(config.hydra.launcher).params
    assert {key: params[key] for key in ("name", "timeout_min", "cpus_per_task", "array_parallelism", "partition")} == {
        "name": "prl",
        "timeout_min": 1440,
        "cpus_per_task": 4,
        "array_parallelism": 16,
        "partition": "long",
    }


def test_search_optimises_what_optimized_metric_names():
    node = of_hydra("run.name=s", "sweep=[lr_search,joblib]", "optimized_metric.direction=minimize").hydra.sweeper
    assert (node.direction, node.max_failure_rate, node.n_jobs) == ("minimize", 1.0, 1)
    assert node.sampler.seed == 0 and list(node.params) == ["trainer.optim.lr"]
    assert of_hydra("run.name=s", "sweep=lr_search").hydra.sweeper.direction == "maximize"
