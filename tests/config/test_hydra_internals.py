"""What prl uses of Hydra beyond its public interface, and what the node `hydra` may name."""

import importlib.metadata

import hydra._internal.hydra as hydra_main
import pytest
import yaml
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import OmegaConf

from prl import _hydra_internals
from prl._hydra_internals import check
from prl.compose import CONF
from prl.config import targets
from prl.errors import ConfigError


class Quiet(Callback):
    """A callback of a user's."""


class Loud:
    """None."""


OWN = f"{__name__}.Quiet"
HANDLER = {"class": "logging.StreamHandler"}


def test_hydra_is_the_one_that_this_was_written_for():
    assert importlib.metadata.version("hydra-core").startswith("1.3.")
    assert hydra_main.Callbacks.__name__ in ("Callbacks", "CheckedCallbacks")


@pytest.mark.parametrize(
    "node",
    [
        {},
        {"callbacks": {"x": {"_target_": OWN, "n": {"a": [1]}}}},
        {"launcher": {"_target_": "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher"}},
        {"sweeper": {"_target_": "hydra_plugins.x.Y", "sampler": {"_target_": "optuna.samplers.TPESampler"}}},
        {"job_logging": {"handlers": {"x": HANDLER}, "root": {"handlers": ["x"]}}},
    ],
)
def test_what_passes(node, capsys, monkeypatch):
    monkeypatch.setattr(targets, "_said", set())  # another test may have had it said
    check(node)
    assert capsys.readouterr().err == (f"this config imports {__name__.split('.')[0]}\n" if "callbacks" in node else "")


@pytest.mark.parametrize(
    ("node", "says"),
    [
        (
            {"callbacks": {"x": {"_target_": f"{__name__}.Loud"}}},
            "hydra.callbacks.x._target_='.*' is not a subclass of",
        ),
        ({"callbacks": {"x": {"_target_": "pandas.read_pickle"}}}, "hydra.callbacks.x._target_='.*' is not a sub"),
        ({"callbacks": {"x": {"_target_": "os.system"}}}, "hydra.callbacks.x._target_='os.system': nothing of os"),
        ({"callbacks": {"x": {"_target_": "${oc.env:X}"}}}, "hydra.callbacks.x._target_="),
        ({"callbacks": {"x": "${y}"}}, "hydra.callbacks.x has no _target_"),
        ({"callbacks": "${y}"}, "hydra.callbacks='.*' is no node"),
        (
            {"callbacks": {"x": {"_target_": OWN, "a": [{"_target_": "${z}"}]}}},
            r"x.a.0._target_='.*': a callback takes",
        ),
        ({"launcher": {"_target_": "mine.Launcher"}}, "hydra.launcher._target_='mine.Launcher' is not one"),
        (
            {"sweeper": {"_target_": "hydra.A", "b": {"_target_": "${c}"}}},
            "hydra.sweeper.b._target_='.*' is not one of",
        ),
        ({"job_logging": {"handlers": {"x": {"()": "mine.f"}}}}, r"job_logging.handlers.x.\(\)='mine.f': of a log"),
        (
            {"hydra_logging": {"handlers": [{"class": "mine.H"}]}},
            "hydra_logging.handlers.0.class='mine.H': of a logging",
        ),
    ],
)
def test_what_is_refused(node, says):
    with pytest.raises(ConfigError, match=says):
        check(node)


def test_it_comes_before_any_callback_is_made(monkeypatch):
    monkeypatch.setattr(hydra_main, "Callbacks", hydra_main.Callbacks)
    _hydra_internals.install()
    made = []
    monkeypatch.setattr(Quiet, "__init__", lambda self: made.append(self), raising=False)
    with pytest.raises(ConfigError, match="plain values"):
        hydra_main.Callbacks(
            OmegaConf.create(
                {"hydra": {"callbacks": {"a": {"_target_": OWN}, "b": {"_target_": OWN, "c": {"_target_": OWN}}}}}
            )
        )
    assert not made
    hydra_main.Callbacks(OmegaConf.create({"hydra": {"callbacks": {"a": {"_target_": OWN}}}}))
    assert made


@pytest.mark.parametrize("several", [(), ("-m", "seed=0,1")])
def test_a_conf_file_that_names_a_callback(run_command, tmp_path, monkeypatch, several):
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "x.yaml").write_text(
        "# @package _global_\nhydra: {callbacks: {x: {_target_: mine_callback.Thing}}}\n"
    )
    (tmp_path / "mine_callback.py").write_text("class Thing: pass\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = run_command(
        tmp_path, "prl.train", *several, "experiment=x", f"hydra.searchpath=[file://{tmp_path}/conf]", "max_steps=0"
    )
    assert done.returncode == 2
    said, error = done.stderr.splitlines()
    assert said == "this config imports mine_callback" and error.startswith("error: hydra.callbacks.x._target_=")


def modes(monkeypatch, folder=None):
    """What `get_mode` gives for overrides; `folder` is that of `--config-dir`."""
    monkeypatch.setattr(hydra_main.Hydra, "get_mode", hydra_main.Hydra.get_mode)
    monkeypatch.setattr(hydra_main, "Callbacks", hydra_main.Callbacks)
    _hydra_internals.install()
    GlobalHydra.instance().clear()
    path = create_config_search_path(str(CONF))
    if folder is not None:
        path.prepend("command-line", f"file://{folder}")
    hydra = hydra_main.Hydra.create_main_hydra2("train", path)
    GlobalHydra.instance().clear()
    return lambda *overrides: hydra.get_mode("train", list(overrides))


def test_a_config_is_composed_for_its_mode_only_where_something_may_set_one(monkeypatch, tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "many.yaml").write_text("# @package _global_\nhydra: {mode: MULTIRUN}\n")
    mode = modes(monkeypatch)
    assert mode("hydra.mode=MULTIRUN") is RunMode.MULTIRUN and mode("hydra.mode=RUN") is RunMode.RUN
    assert mode(f"hydra.searchpath=[file://{tmp_path}]", "experiment=many") is RunMode.MULTIRUN
    assert modes(monkeypatch, tmp_path)("experiment=many") is RunMode.MULTIRUN
    monkeypatch.setattr(hydra_main.Hydra, "compose_config", None)
    assert mode("seed=1", "algo=opd") is None


@pytest.mark.parametrize("path", sorted(CONF.rglob("*.yaml")), ids=lambda path: path.relative_to(CONF).as_posix())
def test_no_conf_file_of_prls_sets_a_mode(path):
    assert "mode" not in ((yaml.safe_load(path.read_text(encoding="utf-8")) or {}).get("hydra") or {})
