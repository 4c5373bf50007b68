"""`--from <run>`: the same config again, with further overrides, and nothing of a stranger's without `--trust`."""

import copy
import functools
import json
import shlex

import hydra
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import GrammarParseError

from prl import command, rerun, resume
from prl.compose import CONF, allow_new_filters, to_config
from prl.config.instantiate import plain
from prl.errors import ConfigError
from prl.sweep import command as sweep_command


@functools.cache
def of(*overrides):
    """What they compose to: the same from call to call."""
    return composed(*overrides)


def composed(*arguments):
    """What `prl train <arguments>` would write into `config.yaml`, without the run's name."""
    overrides = rerun.expand(list(arguments))
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = hydra.compose("train", allow_new_filters(["run.name=x", *overrides]))
    return OmegaConf.to_container(OmegaConf.create(plain(to_config(cfg, overrides)) | {"run": None}))


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """`ran(*overrides)`: the directory of a run with these overrides, as prl leaves it."""
    monkeypatch.chdir(tmp_path)

    def make(*overrides, edit=None):
        folder = tmp_path / "outputs" / "first"
        (folder / ".hydra").mkdir(parents=True)
        config = copy.deepcopy(of(*overrides))
        for key, value in (edit or {}).items():
            config = OmegaConf.to_container(merged(config, key, value))
        OmegaConf.save(
            OmegaConf.create(config | {"run": {"name": "first", "dir": str(folder)}}), folder / "config.yaml"
        )
        typed = [each for each in overrides if not each.startswith("hydra.")]
        searched = [each for each in overrides if each.startswith("hydra.")]
        OmegaConf.save(OmegaConf.create([*typed, "run.name=first"]), folder / ".hydra" / "overrides.yaml")
        OmegaConf.save({"overrides": {"hydra": ["hydra.mode=RUN", *searched]}}, folder / ".hydra" / "hydra.yaml")
        (folder / "provenance.json").write_text(json.dumps({"cwd": str(tmp_path)}))
        return folder

    return make


def merged(config, key, value):
    cfg = OmegaConf.create(config)
    OmegaConf.update(cfg, key, value, merge=False, force_add=True)
    return cfg


def saved(folder):
    return OmegaConf.to_container(OmegaConf.load(folder / "config.yaml")) | {"run": None}


CHOICES = [
    [],
    ["env=[math,reverse_text]", "+algo@envs.reverse_text.algo=opd", "seed=7", "envs.math.sampling.temperature=0.5"],
    [
        *("algo=echo", "+algo.roles.user.alpha=0.5", "experiment=on_policy", "monitor=[wandb]"),
        *("~filters.pre_batch.gibberish", "filters.post_batch={zero_advantage: {enforce: false}}"),
    ],
    [
        *("loss=custom", "loss._target_=prl.trainer.loss.functions.aipo", "+loss.delta=4.0", "model.max_model_len=64"),
        *("sampling.stop=['a,b', \"it's\", 'c: {d}']", "+inference.args.block-size=16", "teacher.timeout_s=1e3"),
    ],
]


@pytest.mark.parametrize(
    ("overrides", "hydra_gone"),
    [*((overrides, False) for overrides in CHOICES), (CHOICES[1], True), (CHOICES[3], True)],
    ids=str,
)
def test_it_composes_to_config_yaml(ran, overrides, hydra_gone, capsys):
    folder = ran(*overrides)
    if hydra_gone:
        (folder / ".hydra" / "overrides.yaml").unlink()
    assert composed("--from", "first", "--trust") == saved(folder)
    assert ("is followed" in capsys.readouterr().err) == (hydra_gone and bool(overrides))


def test_an_edited_config_yaml_is_followed_and_said(ran, capsys):
    edit = {"max_steps": 99, "trainer.optim.lr": 0.25, "filters.pre_batch": {}, "envs.math.eval_args": None}
    folder = ran(edit=edit)
    assert composed(f"--from={folder}/config.yaml") == saved(folder)
    said = capsys.readouterr().err
    assert all(key in said for key in edit)


OF_HYDRA = (
    "+hydra.callbacks.x={_target_:pandas.read_pickle,_args_:[x]}",
    "++hydra.job.env_set.LD_PRELOAD=x",
    "hydra/launcher=joblib",
    "~hydra.callbacks",
    "env@hydra.callbacks.x=math",
    "+experiment@_global_=x",
    "--config-dir=x",
    "-m",
)


def test_what_hydra_would_obey_is_not_taken_from_a_run(ran):
    path = ran() / ".hydra" / "overrides.yaml"
    own = [*OmegaConf.load(path)]
    for override in OF_HYDRA:
        OmegaConf.save(OmegaConf.create([*own, override]), path)
        for trust in ([], ["--trust"]):
            with pytest.raises(ConfigError, match="is no override of a run: remove it there"):
                rerun.expand(["--from", "first", *trust])


def test_a_config_with_a_node_for_hydra_is_followed_without_it(ran):
    expected = composed("--from", str(folder := ran()))
    path = folder / "config.yaml"
    recorded = OmegaConf.load(path)
    recorded.hydra, recorded._target_ = {"job": {"env_set": {"LD_PRELOAD": "x"}}}, "x"
    OmegaConf.save(recorded, path)
    assert "hydra" not in "".join(rerun.expand(["--from", "first"])) and composed("--from", "first") == expected


def test_a_node_that_was_added_by_hand_is_there(ran):
    edit = {
        "envs.b": {"taskset": "prl.envs.math", "args": {"num_tasks": 3}},
        "envs.math.algo": {"_target_": "prl.orchestrator.algo.reward.RewardAlgorithm"},
    }
    ran(edit=edit)
    again = composed("--from", "first")
    for key, value in edit.items():
        found = OmegaConf.to_container(OmegaConf.select(OmegaConf.create(again), key))
        assert {name: found[name] for name in value} == value, "with the defaults of what was left out"


def test_a_default_that_has_changed_since_is_as_it_was_and_what_follows_it_still_does(ran, capsys):
    ran(edit={"model.lr": 1e-3, "trainer.optim.lr": 1e-3})
    assert composed("--from", "first")["trainer"]["optim"]["lr"] == 1e-3
    assert "model.lr=0.001" in (said := capsys.readouterr().err) and "trainer.optim" not in said
    assert composed("--from", "first", "model.lr=0.5")["trainer"]["optim"]["lr"] == 0.5


def test_new_overrides_come_last_and_what_follows_them_follows(ran):
    ran("seed=7", "env=[math,reverse_text]", "envs.reverse_text.weight=3.0", "algo=opd", "algo.teacher.timeout_s=5.0")
    again = composed("--from", "first", "seed=8", "max_steps=3")
    assert (again["seed"], again["max_steps"], again["envs"]["math"]["args"]["seed"]) == (8, 3, 8)
    assert again["envs"]["reverse_text"]["weight"] == 3.0 and again["algo"]["teacher"]["timeout_s"] == 5.0
    assert composed("--from", "first", "algo=grpo", "env=math") == composed("seed=7")
    assert set(composed("--from", "first", "env=[reverse_text,guess]")["envs"]) == {"reverse_text", "guess"}


@pytest.mark.parametrize(
    ("added", "removed"),
    [
        (["+filters.pre_batch.mine={_target_: mine.Mine}"], "~filters.pre_batch.mine"),
        (["++filters.pre_batch.mine._target_=mine.Mine"], "~filters.pre_batch.mine"),
        (["+monitor@monitor.tensorboard=tensorboard"], "~monitor@monitor.tensorboard"),
        (["+algo@envs.math.algo=max_rl"], "~algo@envs.math.algo"),
    ],
)
def test_what_a_run_had_added_can_be_removed(ran, added, removed):
    folder = ran(*added)
    assert composed("--from", "first", "--trust", removed) == of()
    OmegaConf.save(OmegaConf.create([*added, removed]), folder / ".hydra" / "overrides.yaml")
    OmegaConf.save(OmegaConf.create(of() | {"run": {}}), folder / "config.yaml")
    assert composed("--from", "first") == of(), "it is recorded, and nothing is left that needs trust"
    assert composed("--from", "first", removed) == of()


def test_what_a_run_had_added_can_be_set(ran):
    own = ("algo=custom_class", "algo._target_=mine.Mine")
    ran(*own, "+algo.mode=first", "+env@envs.two=gsm8k", "+sampling.args={a: 1}")
    for mode in ("algo.mode=second", "++algo.mode=second"):
        again = composed("--from=first", "--trust", mode, "env@envs.two=guess", "++sampling.args={b: 2}")
        assert again == of(*own, "+algo.mode=second", "+env@envs.two=guess", "+sampling.args={b: 2}")


@pytest.mark.parametrize(
    "flags",
    [["--config-dir", "outputs/first", "--config-name", "config"], ["-cn=config.yaml", "-cd=outputs/first"]],
    ids=str,
)
def test_a_saved_config_named_as_hydra_would_is_that_run(ran, tmp_path, flags):
    ran("seed=4", "model=tiny")
    assert composed(*command.of_saved_config([*flags, "max_steps=3"])) == of("seed=4", "model=tiny", "max_steps=3")
    (tmp_path / "config.yaml").write_text("defaults: [train]\n")
    for other in (["--config-dir=.", "--config-name", "config"], ["-cd", "nowhere", "-cn=config"], flags[:-1]):
        assert command.of_saved_config(other) == other


@pytest.mark.parametrize(
    ("overrides", "trust"),
    [
        ((), False),
        (("algo=custom_class", "algo._target_=mine.Mine"), True),
        (("inference.urls=[http://127.0.0.1:1]",), True),
        (("hydra.searchpath=[file://mine]",), True),
    ],
    ids=str,
)
def test_the_command_that_goes_on_is_taken_as_it_is_printed(ran, overrides, trust):
    folder = ran(*overrides)
    (spaced := folder.parent / "the first").symlink_to(folder)
    python, *module, resumed, said = [*shlex.split(rerun.going_on(spaced)), *([] if trust else [""])]
    assert (python, module, said) == ("python", ["-m", "prl.train"], "--trust" * trust)
    again = [argument for argument in resume.expanded([resumed]) if not argument.startswith("run.")]
    if trust:
        with pytest.raises(ConfigError, match="add --trust"):
            rerun.expand(again)
    assert composed(*again, *[said] * trust)["algo"] == of(*overrides)["algo"]


def test_overrides_that_do_not_compose_any_more_leave_config_yaml(ran, capsys):
    folder = ran("seed=7")
    OmegaConf.save(OmegaConf.create(["algo=gone", "seed=7"]), folder / ".hydra" / "overrides.yaml")
    assert composed("--from", "first") == saved(folder)
    assert "do not compose any more" in capsys.readouterr().err


def test_keys_that_there_are_no_more_are_left_out_and_said(ran, capsys):
    edit = {"inference.poll_s": 1, "teacher.inference.poll_s": 2, "algo.gone": 3, "gone": {"a": 1}}
    folder = ran("seed=7", edit=edit)
    assert composed("--from", "first") == of("seed=7") | {"run": None}
    said = capsys.readouterr().err
    assert all(key in said for key in edit) and said.count("\n") == 1 and "do not compose" not in said
    OmegaConf.save(OmegaConf.create(["inference.poll_s=1", "seed=7"]), folder / ".hydra" / "overrides.yaml")
    assert composed("--from", "first") == of("seed=7") | {"run": None}
    assert "do not compose any more (Could not override 'inference.poll_s'" in capsys.readouterr().err


def test_a_value_that_config_yaml_may_not_have_is_said_to_be_there(ran, capsys):
    folder = ran("seed=7", edit={"max_steps": "many"})
    with pytest.raises(ConfigError) as caught:
        rerun.expand(["--from", "first"])
    assert str(caught.value).startswith(f"{folder}/config.yaml cannot be followed any more: Error merging override ")
    assert "max_steps='many': Value 'many' of type 'str' could not be converted to Integer" in str(caught.value)
    assert capsys.readouterr().err == "", "the overrides are not what is wrong"


def test_an_override_that_follows_a_key_still_does(ran):
    folder = ran("envs.math.args.seed=${max_steps}", "seed=7")
    assert composed("--from", "first") == saved(folder)
    assert composed("--from", "first", "max_steps=9")["envs"]["math"]["args"]["seed"] == 9


@pytest.mark.parametrize("name", ["hydra.yaml", "overrides.yaml"])
@pytest.mark.parametrize("text", ["a: [", "5", "[1]"])
def test_what_hydra_wrote_and_is_broken_is_refused_in_a_line(ran, name, text):
    folder = ran("seed=7")
    (folder / ".hydra" / name).write_text(text)
    with pytest.raises(ConfigError, match=r"first/\.hydra does not say what was typed: .*followed alone$"):
        rerun.expand(["--from", "first"])


def test_its_search_path_and_its_folder_are_used_once_it_is_trusted(ran, tmp_path, monkeypatch):
    conf = tmp_path / "mine" / "algo" / "eager.yaml"
    conf.parent.mkdir(parents=True)
    conf.write_text("defaults: [/schema/algo@_here_: grpo]\nlength_penalty: tokens\n")
    folder = ran("hydra.searchpath=[file://mine]", "algo=eager")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr("sys.path", [])
    with pytest.raises(ConfigError) as caught:
        rerun.expand(["--from", str(folder)])
    assert "hydra.searchpath=[file://mine]" in str(caught.value) and f"it ran in, {tmp_path} " in str(caught.value)
    assert composed("--from", str(folder), "--trust") == saved(folder)
    assert rerun.Path.cwd() == tmp_path and rerun.sys.path == [str(tmp_path)]


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        ({"algo._target_": "os.system"}, "algo._target_=os.system"),
        ({"envs.math.taskset": "evil"}, "envs.math.taskset=evil"),
        ({"filters.pre_batch.x": {"_target_": "evil.F"}}, "filters.pre_batch.x._target_=evil.F"),
        ({"envs.math.args": {"grader": "evil.grade"}}, "envs.math.args.grader=evil.grade"),
        ({"renderer.import_path": "evil.py:Theirs"}, "renderer.import_path=evil.py:Theirs"),
        ({"model.trust_remote_code": True}, "model.trust_remote_code=True"),
        ({"teacher.api_key_var": "HOME"}, "teacher.api_key_var=HOME"),
        ({"inference.urls": ["http://evil"]}, "inference.urls="),
        ({"inference.args": {"middleware": "evil"}}, "inference.args="),
        ({"sampling.stop": ["${oc.env:HOME}"]}, "sampling.stop.0=${oc.env:HOME}"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_names_code_or_a_secret_needs_trust(ran, edit, named):
    ran(edit=edit)
    with pytest.raises(ConfigError, match="add --trust") as caught:
        rerun.expand(["--from", "first"])
    assert named in str(caught.value)


def test_so_does_what_only_the_recorded_overrides_name(ran):
    folder = ran("+inference.args.middleware=evil")
    recorded = OmegaConf.load(folder / "config.yaml")
    del recorded.inference["args"]
    OmegaConf.save(recorded, folder / "config.yaml")
    with pytest.raises(ConfigError, match="inference.args={'middleware': 'evil'}\nadd --trust"):
        rerun.expand(["--from", "first"])
    assert rerun.expand(["--from", "first", "--trust"])


@pytest.mark.parametrize("second", [["--from", "b"], ["--from=b"]])
def test_two_runs_are_refused(second):
    with pytest.raises(ConfigError, match="--from is given twice, a first"):
        rerun.expand(["seed=1", "--from", "a", *second])


def test_the_choice_of_envs_may_be_removed():
    assert rerun.without_superseded(["env=guess", "envs.guess.weight=2", "seed=1"], ["~env"]) == ["seed=1"]


def test_the_names_of_a_sweeps_jobs_hold_only_what_is_new(ran):
    ran("env=math", "+algo@envs.math.algo=opd")
    expanded = rerun.expand(["-m", "--from", "first", "seed=1,2"])
    assert expanded[0] == "-m" and expanded[-1] == "seed=1,2"
    folder, arguments = sweep_command.prepared(expanded)
    assert folder.name.startswith("sweep-seed-")
    assert "hydra.job.config.override_dirname.exclude_keys=['env','algo@envs.math.algo']" in arguments
    flagged = rerun.expand(["--cfg", "job", "--from", "first", "--resolve", "seed=1"])
    assert flagged[:3] == ["--cfg", "job", "--resolve"] and flagged[-1] == "seed=1", "Hydra takes overrides in one row"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--from"], "names no run"),
        (["--from", "nope"], "nope: there is no run here or under outputs/"),
        (["--from=bad.yaml"], "is not the config of a run"),
        (["--from=broken.yaml"], "cannot be read"),
        (["--trust"], "goes with --from"),
        (["--from", "first"], "provenance.json does not say where"),
    ],
    ids=str,
)
def test_what_cannot_be_run_again_is_refused(ran, tmp_path, arguments, says):
    (ran() / "provenance.json").write_text("[]")
    (tmp_path / "bad.yaml").write_text("a: 1\n")
    (tmp_path / "broken.yaml").write_text("a: [\n")
    with pytest.raises(ConfigError) as caught:
        rerun.expand(arguments)
    assert says in str(caught.value)


def can_be_in_a_config(text):
    """Half an interpolation cannot."""
    try:
        return OmegaConf.create([text]) is not None
    except GrammarParseError:
        return False


TEXTS = st.text(st.characters(codec="ascii")).filter(can_be_in_a_config)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=5,
)


@settings(max_examples=50, deadline=None)
@given(VALUES)
def test_a_value_is_written_as_hydra_reads_it(value):
    (read,) = OverridesParser.create().parse_overrides([f"key={rerun.written(value)}"])
    assert OmegaConf.to_container(OmegaConf.create({"x": read.value()})) == {"x": value}
