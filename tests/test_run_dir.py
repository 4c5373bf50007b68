"""A run directory has one owner."""

import stat
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import msgspec
import pytest
from omegaconf import OmegaConf

from prl.compose import CONF, compose, load_config
from prl.config.build import plain
from prl.config.machine import check_run_dir
from prl.errors import ConfigError, PrlError
from prl.owner import owned
from prl.result import RunResult
from prl.run_dir import new_run_dir, recorded, refuse_existing, refuse_other_files, set_aside
from prl.run_yaml import without_run, yaml_of


def test_of_runs_that_begin_at_the_same_moment_one_has_the_directory(tmp_path):
    config, ready = compose(["run.name=x", f"run.dir={tmp_path}/x"]), Barrier(8)

    def begin(_):
        ready.wait(10)
        try:
            return new_run_dir(config)
        except ConfigError as error:
            return str(error)

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(begin, range(8)))
    assert found.count(tmp_path / "x") == 1
    refusal = f"run.dir='{tmp_path}/x' already holds a run: choose another run.name, remove it, or go on with it"
    assert sum(str(each).startswith(refusal) for each in found) == 7
    assert plain(load_config(tmp_path / "x" / "config.yaml")) == plain(config)


def test_it_is_its_owners_alone(tmp_path):
    folder = tmp_path / "x"
    folder.mkdir(mode=0o755)
    new_run_dir(compose(["run.name=x", f"run.dir={folder}"]))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("root", ["base", "eval"])
def test_runs_of_one_second_have_names_of_their_own(root):
    name = OmegaConf.to_container(OmegaConf.load(CONF / f"{root}.yaml"))["run"]["name"]
    assert name.endswith("${now:%Y%m%d-%H%M%S-%f}"), "down to the microsecond"


def test_a_second_run_is_refused(tmp_path):
    config = compose(["run.name=x", f"run.dir={tmp_path}/x"])
    new_run_dir(config)
    with pytest.raises(ConfigError, match="already holds a run"):
        new_run_dir(config)


@pytest.mark.parametrize("status", ["failed", "refused", "stopped"])
def test_a_run_that_ended_before_its_first_step_blocks_no_second_try(tmp_path, status):
    run = tmp_path / "run"
    for number in (1, 2):
        (run / "logs").mkdir(parents=True)
        (run / "run.lock").touch()
        (run / "config.yaml").write_text(str(number))
        (run / "result.json").write_bytes(msgspec.json.encode(RunResult(status=status, error="x")))
        assert set_aside(run) == tmp_path / f"run.failed-{number}" and not run.exists()
        refuse_existing(run)
    assert (tmp_path / "run.failed-1" / "config.yaml").read_text() == "1"


@pytest.mark.parametrize(
    "result",
    [
        None,
        RunResult(status="completed"),
        RunResult(status="failed", steps=1),
        RunResult(status="stopped", metrics={"eval/math/avg@1": 0.5}),
    ],
)
def test_a_run_that_has_something_or_still_runs_is_left_where_it_is(tmp_path, result):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("")
    if result is not None:
        (tmp_path / "run" / "result.json").write_bytes(msgspec.json.encode(result))
    assert set_aside(tmp_path / "run") is None
    with pytest.raises(ConfigError, match="already holds a run"):
        refuse_existing(tmp_path / "run")


@pytest.mark.parametrize(
    ("files", "shown"),
    [
        (["notes.md"], "notes.md"),
        (["logs/a", "checkpoints/b"], "checkpoints, logs"),  # folders that a run has, too
        (["run.lock", "thesis.tex"], "thesis.tex"),
        (["a", "b", "c", "d"], "a, b, c, …"),
    ],
)
def test_a_directory_with_somebodys_files_becomes_no_run(tmp_path, files, shown):
    folder = tmp_path / "x"
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    folder.chmod(0o755)
    for refused in (
        lambda: refuse_other_files(folder),
        lambda: new_run_dir(compose(["run.name=x", f"run.dir={folder}"])),
    ):
        with pytest.raises(ConfigError) as error:
            refused()
        assert (
            str(error.value) == f"run.dir='{folder}' holds other files ({shown}): name a directory that is new or empty"
        )
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755 and not (folder / "config.yaml").exists()


@pytest.mark.parametrize("below", ["", "x"])
def test_a_run_directory_may_be_a_link_or_lie_below_one(tmp_path, below):
    (tmp_path / "disk").mkdir()
    (tmp_path / "outputs").symlink_to("disk")
    config = compose(["run.name=x", f"run.dir={tmp_path}/outputs/{below}"])
    check_run_dir(config.run.dir)
    with owned(tmp_path / "outputs" / below):
        new_run_dir(config)
    assert (tmp_path / "disk" / below / "config.yaml").is_file()


def test_what_a_run_has_left_before_its_config_is_in_nobodys_way(tmp_path):
    with owned(tmp_path / "x"):
        pass
    for left in (".config.yaml.123", "logs", ".hydra"):
        (tmp_path / "x" / left).mkdir()
    new_run_dir(compose(["run.name=x", f"run.dir={tmp_path}/x"]))


@pytest.mark.parametrize(
    "files", [{"result.json": "{}"}, {"result.json": '{"status": "failed"}', "run.lock": "", "thesis.tex": ""}]
)
def test_a_directory_with_somebodys_files_is_not_moved(tmp_path, files):
    folder = tmp_path / "x"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(content)
    assert set_aside(folder) is None and {path.name for path in folder.iterdir()} == set(files)


def test_a_run_that_goes_on_keeps_its_directory(tmp_path):
    with owned(tmp_path / "run"):
        (tmp_path / "run" / "config.yaml").touch()
        (tmp_path / "run" / "result.json").write_bytes(msgspec.json.encode(RunResult(status="failed")))
        assert set_aside(tmp_path / "run") is None
    assert set_aside(tmp_path / "run") == tmp_path / "run.failed-1"


def test_the_error_of_a_run_is_said_where_its_result_cannot_be_written(tmp_path, capsys):
    with pytest.raises(PrlError, match="the first"), owned(tmp_path), recorded(tmp_path, RunResult()):
        (tmp_path / "result.json").mkdir()
        raise PrlError("the first")
    assert capsys.readouterr().err == f"no result.json: {tmp_path}/result.json cannot be written: Is a directory\n"


def test_an_exit_from_within_is_a_failure_that_names_its_line(tmp_path):
    result = RunResult()
    said = rf"^the run was ended from within: SystemExit: 0 \({__file__}, line \d+\)$"
    with pytest.raises(PrlError, match=said), recorded(tmp_path, result):
        raise SystemExit(0)
    assert result.status == "failed" and result.error.startswith("the run was ended from within")


def test_a_config_that_was_cut_off_is_noticed(tmp_path):
    config = compose(["run.name=x", f"run.dir={tmp_path}/x"])
    text = (new_run_dir(config) / "config.yaml").read_text()
    assert yaml_of(text) == OmegaConf.to_container(OmegaConf.create(without_run(plain(config))))
    with pytest.raises(ValueError, match="its end is missing"):
        yaml_of(text[: text.index("checkpoint:")])
