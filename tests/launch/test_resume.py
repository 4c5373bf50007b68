"""`run.resume`: where a run goes on, what may change, and what is cut back."""

import copy
import functools
import json
import re
import shutil
from contextlib import nullcontext

import hydra
import pytest
from hydra import initialize_config_dir
from omegaconf import OmegaConf
from prepared_run import run_dir_of, validated

from prl.base.checkpoint_folders import STATE, checkpoint_path, finish, part_path, verify
from prl.base.errors import ConfigError
from prl.base.files import writing
from prl.config.compose import CONF, compose
from prl.config.named_run import check_named
from prl.config.run_yaml import yaml_of
from prl.launch import resume
from prl.launch.command import errors_as_exit_codes
from prl.launch.components import build_components
from prl.orchestrator.state import RunState, SyncState, encode
from prl.runs.owner import LOCK
from prl.runs.result import RunResult
from prl.runs.run_dir import clear, refuse_existing
from prl.tools.sweep.job import write_result


@pytest.fixture
def run(tmp_path):
    """`run(*overrides, steps=…)`: a run directory with its config and checkpoints of these steps."""

    def make(*overrides, name="x", steps=(), lines=(), evaluated=-1):
        folder = run_dir_of(config_of(tmp_path / name, *overrides))
        for step in steps:
            with writing(part_path(folder, step)) as part:
                (part / STATE).mkdir()
                state = RunState(step)
                state.sync = SyncState(lines=list(lines), evaluated=evaluated)
                (part / STATE / "run.msgpack").write_bytes(encode(state))
            finish(folder, step)
        return folder

    return make


@functools.cache
def composed(*overrides):
    return compose(["run.name=x", "run.dir=x", *overrides])


def config_of(folder, *overrides, at=None):
    """The config of a run in this folder, which goes on from `at`."""
    config = copy.deepcopy(composed(*overrides))
    config.run.dir, config.run.resume = str(folder), None if at is None else str(at)
    return config


def again(folder, *overrides, at="auto"):
    return resume.find(config_of(folder, *overrides, at=at))


def test_auto_starts_or_goes_on(run, tmp_path):
    assert again(tmp_path / "new") is None
    folder = run()
    point = again(folder)
    assert (point.step, point.folder, point.state) == (0, None, None), "no checkpoint yet: it begins again"
    folder = run(name="y", steps=(10, 20))
    assert again(folder).step == 20
    assert again(folder, at=checkpoint_path(folder, 10)).step == 10
    assert again(folder, at=folder).folder == checkpoint_path(folder, 20)


@pytest.mark.parametrize("at", ["auto", "run"])
@pytest.mark.parametrize("how", ["a file is gone", "no manifest"])
def test_where_no_checkpoint_is_whole_nothing_begins_again(run, at, how):
    folder = run(steps=(2,))
    checkpoint = checkpoint_path(folder, 2)
    manifest = checkpoint / "manifest.json"
    if how == "a file is gone":
        next(path for path in checkpoint.rglob("*") if path.is_file() and path != manifest).unlink()
    else:
        manifest.unlink()
    with pytest.raises(ConfigError, match="step_000002 .*; there is none before it"):
        again(folder, at=folder if at == "run" else at)


def test_files_of_another_process_are_not_cut_off(run):
    folder, config = run(), composed()
    for step in (2, 4):
        point = again(folder)
        checkpoint_path(folder, step).mkdir(parents=True)
        with pytest.raises(ConfigError, match="another process has gone on with the run"):
            resume.take_over(point, config, {})
        assert checkpoint_path(folder, step).exists()
        shutil.rmtree(folder / "checkpoints")
        folder = run(name=f"{step}", steps=(2,))


def test_without_a_checkpoint_the_way_out_is_said(run):
    folder = run()
    with pytest.raises(ConfigError, match="has no checkpoint to go on from; run.resume=auto begins again"):
        again(folder, at=folder)


def test_checkpoint_that_has_all_the_steps_is_refused(run):
    folder = run(steps=(2, 4))
    last = checkpoint_path(folder, 4)
    for at, max_steps in (("auto", 3), (folder, 3), (last, 3), (last, 4)):
        with pytest.raises(ConfigError, match=r"step_000004 is of step 4, .*give max_steps=5 or more, or an earlier"):
            again(folder, f"max_steps={max_steps}", at=at)
    for at in ("auto", folder):
        assert again(folder, "max_steps=4", at=at).step == 4
    assert again(folder, "max_steps=4", at=checkpoint_path(folder, 2)).step == 2


def test_run_is_completed_unless_a_checkpoint_is_named(run):
    folder = run(steps=(2, 4))
    write_result(folder, RunResult(status="completed", steps=4))

    def completed(at, *overrides):
        return resume.completed(config_of(folder, "max_steps=4", *overrides, at=at))

    assert completed("auto").steps == completed(folder).steps == 4
    assert completed(folder, "max_steps=5") is completed(checkpoint_path(folder, 2)) is None
    for at in ("auto", folder):
        with pytest.raises(ConfigError, match="seed was 0 and is 7"):
            completed(at, "seed=7")


@pytest.mark.parametrize("change", ["curriculum.refill=true", "orchestrator.stop.time_budget_s=9", "max_steps=9"])
def test_run_that_ended_early_needs_a_changed_setting(run, change):
    folder = run("max_steps=8", steps=(2, 4))
    write_result(folder, RunResult(status="completed", steps=4, ended_because="every env has run out of tasks"))
    for at in ("auto", folder):
        completed = lambda *more: resume.completed(config_of(folder, "max_steps=8", *more, at=at))  # noqa: B023, E731
        assert completed().steps == 4, "a scheduler repeats the command"
        assert completed("sweep.share_engine=true").steps == 4, "no setting of the run's own"
        assert completed(change) is None
        assert completed(change, "max_steps=4").steps == 4


def test_run_that_ended_early_under_an_older_version_is_completed(run):
    """Classes of `weights` have moved since, and more nodes have Hydra's `_partial_`."""
    folder = run("max_steps=8", steps=(4,))
    write_result(folder, RunResult(status="completed", steps=4, ended_because="every env has run out of tasks"))
    older = OmegaConf.load(folder / "config.yaml")
    older.weights._target_ = "prl.transport.files.FileTransport"
    for node in (older.orchestrator, older.orchestrator.batcher, older.trainer):
        del node["_partial_"]
    OmegaConf.save(older, folder / "config.yaml")
    assert resume.completed(config_of(folder, "max_steps=8", at="auto")).steps == 4
    assert resume.completed(config_of(folder, "max_steps=8", "weights=ray", at="auto")) is None


def test_refused_directory_is_named_as_given(run, tmp_path):
    folder = run(steps=(2,))
    for at, printed in ((folder, "is not of the run in run.dir"), (tmp_path, "is neither"), ("", "is neither")):
        with pytest.raises(ConfigError, match=f"^run.resume='.*' {printed}"):
            again(tmp_path / "y", at=at)


@pytest.mark.parametrize("left", [{"config.yaml": ""}, {"metrics.jsonl": '{"step": 1}\n'}])
def test_start_without_config_begins_again_unless_checkpoints_exist(tmp_path, run, left):
    folder, config = tmp_path / "y", config_of(tmp_path / "y")
    folder.mkdir()
    for name, content in left.items() | {("run.lock", "")}:
        (folder / name).write_text(content)
    with pytest.raises(ConfigError, match=r"already holds a run.*go on with it \(run.resume=auto\)"):
        refuse_existing(folder)
    resume.take_over(again(folder), config, {})
    assert again(folder).changed == {} and not (folder / "metrics.jsonl").exists()
    (folder / "config.yaml").write_text("")
    run(steps=(2,)).joinpath("checkpoints").rename(folder / "checkpoints")
    with pytest.raises(ConfigError, match="config.yaml is not the config of a run"):
        again(folder)


def test_beginning_again_removes_the_config_last(run, monkeypatch):
    folder, gone = run(), []
    monkeypatch.setattr("prl.runs.run_dir._remove", lambda path: gone.append(path.name))
    clear(folder)
    assert gone[-1] == "config.yaml" and gone.count("config.yaml") == 1


def test_fork_begins_a_new_run_and_leaves_the_source(run, tmp_path):
    source, new = run(steps=(2, 4), lines=[{"step": 4}]), tmp_path / "new"
    for name in ("a.png", "a.0.safetensors"):
        (source / "pictures").mkdir(exist_ok=True)
        (source / "pictures" / name).touch()
    before = {path: path.stat().st_mtime_ns for path in source.rglob("*")}

    def forking(*overrides, at=source, auto=None):
        config = config_of(new, *overrides, at=auto)
        config.run.fork = str(at)
        return config

    assert resume.find(forking(at=checkpoint_path(source, 2))).step == 2
    for overrides, refusal in ((["seed=1"], "^seed was 0 and is 1"), (["max_steps=4"], "nothing is left to train")):
        with pytest.raises(ConfigError, match=refusal):
            resume.find(forking(*overrides))
    for nowhere, refusal in ((tmp_path, "^run.fork='.*' is neither"), (run(name="z"), "z has no checkpoint to go on")):
        with pytest.raises(ConfigError, match=f"{refusal}[^;]*$"):
            resume.find(forking(at=nowhere))
    left = part_path(new, 4)  # of a start that died
    left.mkdir(parents=True)
    (left / "half").touch()
    (new / LOCK).touch()
    config = forking("trainer.optim.lr=1e-5", auto="auto")
    point = resume.take_over(resume.find(config), config, {})
    own = checkpoint_path(new, 4)
    assert (point.run_dir, point.folder, point.step, verify(own)) == (new, own, 4, 4)
    assert [path.name for path in (new / "pictures").iterdir()] == ["a.png"], "features are made again"
    assert (new / "checkpoints").is_dir() and not (own / "half").exists()
    (line,) = map(json.loads, (new / "resumes.jsonl").read_text().splitlines())
    assert line["checkpoint"] == str(checkpoint_path(source, 4)) and "trainer.optim.lr" in line["changed"]
    assert {path: path.stat().st_mtime_ns for path in source.rglob("*")} == before
    again = resume.find(config)
    assert (again.folder, again.changed) == (own, {}), "a scheduler that repeats the command goes on with the fork"
    with pytest.raises(ConfigError, match="already holds a run"):
        resume.take_over(point, config, {})


def test_a_config_that_cannot_be_read_is_said_once(run, capsys):
    folder = run(steps=(2, 4))
    path = folder / "config.yaml"
    path.write_bytes(b"\x87" + path.read_bytes())
    for at in ("auto", folder):
        with pytest.raises(ConfigError, match=r"cannot be read: .*invalid start byte$"):
            again(folder, at=at)
    with pytest.raises(SystemExit), errors_as_exit_codes():
        resume.expanded([f"run.resume={folder}"])
    assert capsys.readouterr().err.count("invalid start byte") == 1


def test_damaged_checkpoint_is_refused_offering_the_one_before(run, capsys):
    folder = run(steps=(10, 20))
    path = checkpoint_path(folder, 20) / STATE / "run.msgpack"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"step_000020 is damaged: .*before it: .*step_000010"):
        again(folder, at=folder)
    assert again(folder).step == 10, "a scheduler has nobody to ask"
    assert "step_000020 is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        "seed=1",
        "model=tiny-teacher",
        "model.lora.rank=4",
        "model.freeze=[embed_tokens]",
        "trainer.optim._target_=torch.optim.SGD",
        "env=reverse_text",
        "envs.math.args.max_operand=7",
        "+env@envs.more=math",
    ],
)
def test_what_a_run_must_keep(run, change):
    folder = run(steps=(10,))
    with pytest.raises(ConfigError, match="(go|goes) on with"):
        again(folder, change)


def test_secret_is_never_saved_and_is_given_again(run, tmp_path, monkeypatch):
    """`run.resume=auto` has it on its command line, as the run had."""
    given = ("+envs.math.args.api_key=s3cret", "+envs.math.args.urls=['http://me:s3cret@h/v1']", "+envs.math.args.n=3")
    folder = run(*given, steps=(10,))
    args = yaml_of((folder / "config.yaml").read_text())["envs"]["math"]["args"]
    assert (args["api_key"], args["urls"], args["n"]) == ("***", ["http://***@h/v1"], 3)
    assert again(folder, *given).step == 10
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^envs\.math\.args\.api_key is"):
        validated(compose(["run.name=x"], folder))
    typed = ("++envs.math.args.api_key=s3cret", "++envs.math.args.urls=['http://me:s3cret@h/v1']")
    config = compose(["run.name=x", *typed], folder)
    validated(config)
    assert config.envs["math"].args["api_key"] == "s3cret"


def test_everything_else_may_change_and_is_told(run, capsys):
    folder = run(steps=(10,))
    point = again(folder, "max_steps=90", "trainer.optim.lr=1e-5", "algo=max_rl", "orchestrator.batch_size=64")
    assert point.changed["max_steps"] == (200, 90) and point.changed["orchestrator.batch_size"] == (256, 64)
    assert any(key.startswith("algo.") for key in point.changed)
    resume.take_over(point, config_of(folder, "max_steps=90"), {})
    (line,) = map(json.loads, (folder / "resumes.jsonl").read_text().splitlines())
    assert line["step"] == 10 and line["changed"]["max_steps"] == [200, 90] and line["issued_again"] == 0
    assert "max_steps: 200 → 90" in capsys.readouterr().err
    assert "max_steps: 90" in (folder / "config.yaml").read_text()


def test_other_data_is_refused(run):
    folder = run(steps=(10,))
    hashes = {"math": {"train": ["a", "b"]}}
    from prl.runs.provenance import data_hash

    recorded = {"data": {"math": {"train": data_hash(["a", "c"])}}}
    (folder / "provenance.json").write_text(json.dumps(recorded))
    (folder / "metrics.jsonl").write_text('{"step": 11}\n')
    with pytest.raises(ConfigError, match="has other tasks than before: start a new run"):
        resume.take_over(again(folder), config_of(folder), hashes)
    assert (folder / "metrics.jsonl").read_text() == '{"step": 11}\n'


THEIRS = {".notes.1", "rollouts/.notes.1", "rollouts/mystep_000600.jsonl", "rollouts/step_600.jsonl"}
"""Names that are none of a run's files."""
KEPT = {
    *(
        "rollouts/step_000004.jsonl",
        "rollouts/eval_math_step_000003.jsonl",
        "tokens/step_000004",
        "batches/step_000004",
    ),
    *("checkpoints/step_000002", "checkpoints/step_000004"),
}
GONE = {
    *("rollouts/step_000005.jsonl", "rollouts/eval_math_step_000004.jsonl"),
    *("tokens/step_000005", "batches/step_000005", "weights/step_000006", "batches/end.json", "result.json"),
    *("checkpoints/step_000006", "checkpoints/.step_000007.writing", "checkpoints/best"),
}


def test_files_are_cut_back_to_the_checkpoint(run):
    folder = run(steps=(2, 4, 6), lines=[{"step": 4, "loss/mean": 1.0}], evaluated=3)
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {n}}}\n' for n in range(7)) + '{"ste')
    for name in sorted(THEIRS | KEPT | GONE):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.name.startswith(("step_", ".step_", "best")) and path.suffix in ("", ".writing"):
            path.mkdir(exist_ok=True)
        else:
            path.write_text("{}\n")
    (folder / "checkpoints" / "best" / "best.json").write_text('{"step": 6, "reward": 1.0}')
    events = "".join(f'{{"what": "trainer", "step": {step}}}\n' for step in (0, 3, 4, 5, 4)) + '{"step": 1}'
    (folder / "events").mkdir()
    (folder / "events" / "trainer.jsonl").write_text(events)
    resume.take_over(again(folder, at=checkpoint_path(folder, 4)), config_of(folder), {})
    left = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    assert left >= THEIRS | KEPT and not left & GONE
    assert (folder / "metrics.jsonl").read_text() == "".join(f'{{"step": {n}}}\n' for n in range(4))
    lines = (folder / "events" / "trainer.jsonl").read_text().splitlines()
    assert lines == [f'{{"what": "trainer", "step": {step}}}' for step in (0, 3, 4, 4)]


LINES = [f'{{"step": {step}}}\n' for step in range(7)]


@pytest.mark.parametrize(
    ("left", "missing"),
    [
        ("".join(LINES), []),
        ("".join(LINES[1:]), []),  # nothing was evaluated before step 1
        ("".join(LINES)[:-3], [6]),
        ("".join(LINES[:3] + LINES[4:]), [3]),
        ("".join([*LINES[:2], '{"ste\n', "[]\n", "null\n", *LINES[5:]]), [2, 3, 4]),
        ("", [1, 2, 3, 4, 5, 6]),
        (None, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_steps_whose_metrics_are_lost_are_named(run, capsys, left, missing):
    folder = run(steps=(6,))
    if left is not None:
        (folder / "metrics.jsonl").write_text(left)
    resume.take_over(again(folder), config_of(folder), {})
    (line,) = map(json.loads, (folder / "resumes.jsonl").read_text().splitlines())
    assert line["without_metrics"] == missing
    warned = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(warned) == bool(missing) and all(", ".join(map(str, missing)) in line for line in warned)


def test_a_fork_lacks_no_line_from_before_it_began(run):
    folder = run(steps=(6,))
    forked = {"step": 4, "checkpoint": "/elsewhere/checkpoints/step_000004"}
    (folder / "resumes.jsonl").write_text(json.dumps(forked) + "\n")
    (folder / "metrics.jsonl").write_text(LINES[6])
    resume.take_over(again(folder), config_of(folder), {})
    _, line = map(json.loads, (folder / "resumes.jsonl").read_text().splitlines())
    assert line["without_metrics"] == [5]


@pytest.mark.parametrize("content", ["", '{"da', "[]", "{}", "\udcff", '"x"', '{"data": 1, "step": "x", "status": 1}'])
@pytest.mark.parametrize("name", ["result.json", "provenance.json", "checkpoints/best/best.json"])
def test_a_damaged_record_is_refused_by_its_name(run, name, content):
    folder = run(steps=(2, 4), evaluated=1)
    (folder / "metrics.jsonl").write_text("".join(LINES))
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content, errors="surrogateescape")
    config = config_of(folder, at="auto")
    if name == "result.json" and content == "{}":  # of a run that failed, for all that it says
        assert resume.completed(config) is None
        return
    with pytest.raises(ConfigError, match=re.escape(str(path))):
        resume.completed(config)
        resume.take_over(resume.find(config), config, {"math": {"train": ["a"]}})
    assert (folder / "metrics.jsonl").read_text() == "".join(LINES)


def test_beginning_again_leaves_nothing_of_the_first_time(run):
    folder = run()
    for name in ("metrics.jsonl", "result.json", "provenance.json"):
        (folder / name).write_text('{"data": {}}')
    for name in ("rollouts", "events"):
        (folder / name).mkdir()
    (folder / "trace.json").touch()
    resume.take_over(again(folder), config_of(folder), {})
    assert {path.name for path in folder.iterdir()} <= {"config.yaml", "run.lock", ".hydra", "logs"}


def test_the_command_line_of_a_run_or_a_checkpoint(run, monkeypatch):
    folder = run(steps=(10,))
    monkeypatch.chdir(folder.parent)
    config = ["--config-dir", str(folder), "--config-name", "config"]
    named = [f"run.dir='{folder}'", "run.name='x'"]
    assert resume.expanded(["max_steps=9", "run.resume=x"]) == [
        *config,
        "max_steps=9",
        f"run.resume='{folder}'",
        *named,
    ]
    given = f"x/checkpoints/{checkpoint_path(folder, 10).name}"
    assert resume.expanded([f"run.resume={given}"]) == [*config, f"run.resume='{folder.parent / given}'", *named]
    assert resume.expanded(["run.resume=auto", "seed=1"]) == ["run.resume=auto", "seed=1"]
    fork = f"run.fork='{folder.parent / given}'"
    auto = ["run.name=y", "run.resume=auto"]
    assert resume.expanded([f"run.fork={given}", *auto]) == [*config, *auto, fork], "with a name of its own"
    with pytest.raises(ConfigError, match="leave one out"):
        resume.expanded([f"run.fork={given}", "run.resume=x"])
    for bad in ("nowhere", "x/checkpoints", "..", "AUTO", "[1]"):
        with pytest.raises(ConfigError, match="run.resume"):
            resume.expanded([f"run.resume={bad}"])
    for written in (f"++run.resume={folder}", "run.resume='x'", ["run.resume=x", "run.dir=other"][0]):
        assert resume.expanded([written]) == [*config, f"run.resume='{folder}'", *named]
    for none in ("run.resume=null", "run.resume", "~run.resume"):
        assert resume.expanded([none]) == [none]


def test_from_python_a_run_is_named_as_on_the_command_line(run, monkeypatch):
    folder = run("algo=max_rl", "seed=3", name="a run", steps=(10,))
    monkeypatch.chdir(folder.parent)
    config = compose(["loss=ppo", "run.resume=a run", "max_steps=300", "loss=aipo"])
    assert (config.run.dir, config.run.name, config.seed) == (str(folder), "a run", 3)
    found = resume.find(config)
    assert (found.step, found.run_dir) == (10, folder) and {"max_steps", "loss._target_"} <= set(found.changed)
    assert config.loss["_target_"].endswith("aipo_loss"), "of two options the last"
    fork = compose([f"run.fork={checkpoint_path(folder, 10)}", "run.name=y"])
    assert (fork.run.dir, fork.seed, resume.find(fork).forks) == (str(folder.parent / "outputs" / "y"), 3, True)
    with pytest.raises(ConfigError, match="^run.dir=z: a run goes on in its own directory"):
        compose(["run.resume=a run", "run.dir=z"])
    with pytest.raises(ConfigError, match="^run.resume='nowhere' is neither"):
        compose(["run.resume=nowhere"])
    with pytest.raises(ConfigError, match="^run.resume=auto: .*: name it"):
        compose(["run.resume=auto"])


def test_an_option_of_ones_own_goes_over_a_named_run(run, tmp_path):
    folder = run(steps=(10,))
    (tmp_path / "my conf" / "loss").mkdir(parents=True)
    (tmp_path / "my conf" / "loss" / "mine.yaml").write_text("_target_: prl.losses.aipo_loss\n_partial_: true\n")
    config = compose([f"run.resume={folder}", f"hydra.searchpath=['file://{tmp_path}/my conf']", "loss=mine"])
    assert config.loss == {"_target_": "prl.losses.aipo_loss", "_partial_": True}


def test_recomposed_config_of_a_run_is_unchanged(run):
    folder = run("algo=echo", "+algo.roles.user.alpha=0.5", "trainer.optim._target_=torch.optim.SGD", steps=(10,))
    config = compose([f"run.dir={folder}", "run.name=x", "run.resume=auto"], folder)
    assert resume.find(config).changed == {}
    more = compose([f"run.dir={folder}", "run.name=x", "run.resume=auto", "max_steps=400"], folder)
    assert resume.find(more).changed == {"max_steps": (200, 400)}


KL = {"coef": 0.0, "reference": "initial", "divergence": None, "beta": 0.5, "top_k": 32, "decay": 0.999, "every": 16}


@pytest.mark.parametrize(("algo", "kl"), [("opd", KL | {"align": None}), ("opsd", KL), ("sft", KL)])
def test_a_run_from_when_every_algorithm_had_a_kl_goes_on(run, algo, kl):
    """`align` came later. One that had set it is not trained by something else."""
    folder = run(f"algo={algo}", steps=(10,))
    older = OmegaConf.load(folder / "config.yaml")
    older.algo.kl = kl
    OmegaConf.save(older, folder / "config.yaml")
    config = compose([f"run.dir={folder}", "run.name=x", "run.resume=auto"], folder)
    assert resume.find(config).changed == {} and build_components(config)
    with pytest.raises(ConfigError, match="algo.kl: .* has no such option; it is added to tokens of the rl loss"):
        build_components(compose([f"run.dir={folder}", "run.name=x", "algo.kl.coef=0.1"], folder))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ([], False),
        (["algo=max_rl"], False),
        (["run.name=x"], True),
        (["run.name=${now:%Y%m%d}"], True),  # one a day
        (["run.dir=x"], True),
        (["run.dir=x/${run.name}"], False),
    ],
)
def test_auto_wants_a_name_that_does_not_change(given, named):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = hydra.compose("train", ["run.resume=auto", *given])
    with nullcontext() if named else pytest.raises(ConfigError, match="run.resume=auto: .*: name it, run.name="):
        check_named(cfg)
    cfg.run.resume = None
    check_named(cfg)
