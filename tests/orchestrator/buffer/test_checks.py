"""What is refused of a buffer's knobs before anything starts."""

import math
import warnings
from pathlib import Path

import pytest
import verifiers.v1 as vf
from omegaconf import OmegaConf

from prl.config.build import build
from prl.config.signature import schema_of
from prl.errors import ConfigError
from prl.orchestrator.buffer.base import Buffer
from prl.orchestrator.buffer.task_buffer import TaskBuffer, warn_of_other_envs, write_pools

CONF = Path(__file__).parents[3] / "conf" / "buffer"


def make(where="buffer", **knobs):
    """The buffer that a config node with these knobs describes."""
    return build(OmegaConf.structured(schema_of(TaskBuffer)(**knobs)), Buffer, where)


def refused(where="buffer", **knobs):
    with pytest.raises(ConfigError) as caught:
        make(where, **knobs)
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("easy_threshold", math.nan, "="),
        ("hard_threshold", math.inf, "="),
        ("easy_fraction", -0.1, "="),
        ("hard_fraction", 1.1, "="),
        ("hard_fraction", math.nan, "="),
    ],
)
@pytest.mark.parametrize("where", ["buffer", "envs.math.buffer"])
def test_buffer_knobs_out_of_range(key, value, says, where):
    assert refused(where, **{key: value}).startswith(f"{where}.{key}{says}")


@pytest.mark.parametrize(
    ("easy", "hard", "fine"),
    [
        (0.5, 0.5, False),
        (0.4, 0.5, False),
        (0.6, 0.5, True),
        (None, 0.5, True),
        (-1.0, None, True),
    ],
)
def test_easy_is_above_hard(easy, hard, fine):
    if fine:
        make(easy_threshold=easy, hard_threshold=hard)
    else:
        message = refused(easy_threshold=easy, hard_threshold=hard)
        assert f"buffer.easy_threshold={easy} must be above buffer.hard_threshold={hard}" in message


def test_buffer_knobs_at_their_bounds(save_pools):
    buffer = make(load_from=save_pools("math"), easy_fraction=0.0, hard_fraction=1.0)
    assert type(buffer) is TaskBuffer and (buffer.easy_fraction, buffer.hard_fraction) == (0.0, 1.0)


@pytest.fixture
def save_pools(tmp_path):
    """Write a checkpoint's pools: a hard task of each env named."""

    def save(*envs):
        hard = [{"env": env, "key": "k", "task": {}} for env in envs]
        write_pools(tmp_path, {"easy": [], "hard": hard})
        return str(tmp_path)

    return save


@pytest.mark.parametrize(("key", "value"), [("easy_fraction", 0.1), ("hard_fraction", 1.0)])
def test_a_share_of_the_pools_needs_some(key, value, save_pools):
    """Of pools that begin empty there is nothing to sample again."""

    def load(goes_on=False, **knobs):
        make(**{key: value}, **knobs).check_start(goes_on=goes_on)

    for goes_on, knobs in ((False, {"easy_threshold": 1.0}), (True, {})):
        with pytest.raises(ConfigError, match=rf"^buffer\.{key}={value} is about the pools .*add buffer\.load_from="):
            load(goes_on, **knobs)
    load(True, easy_threshold=1.0)
    load(load_from=save_pools("math"))


def test_refill_needs_pools(save_pools):
    message = refused(refill=True)
    assert message.startswith("buffer.refill=true without difficulty pools") and "buffer=pools" in message
    for key, value in (("easy_threshold", 1.0), ("hard_threshold", 0.0), ("load_from", save_pools("math"))):
        make(refill=True, **{key: value})


@pytest.mark.parametrize("option", ["default", "odf", "pools", "pools_odf"])
def test_the_options_of_the_buffer_pass(option):
    path = CONF / f"{option}.yaml"
    node = OmegaConf.load(path) if path.exists() else OmegaConf.create()  # the default one needs no file
    inherited = OmegaConf.load(CONF / "pools.yaml") if "pools" in (node.get("defaults") or ()) else {}
    knobs = OmegaConf.merge(inherited, node)
    knobs.pop("defaults", None)
    knobs.pop("_target_", None)
    buffer = make(**knobs)
    assert buffer.online_difficulty_filtering is option.endswith("odf")
    assert buffer.pooled is option.startswith("pools")


def test_pools_of_other_envs_warn(save_pools):
    folder = save_pools("maths", "sums", "maths")
    with pytest.warns(UserWarning) as caught:
        warn_of_other_envs(folder, {"math": None, "b": None})
    (said,) = [str(warning.message) for warning in caught]
    assert "its tasks belong to the envs maths, sums, and this run has only b, math: none is retired" in said
    assert said.startswith(f"buffer.load_from={folder!r}")
    for envs in ((), ("b",), ("math", "maths")):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warn_of_other_envs(save_pools(*envs), {"math": None, "b": None})


def test_a_folder_to_load_pools_from_has_both_files(tmp_path):
    for name in ("easy_examples.jsonl", "hard_examples.jsonl"):
        message = refused(load_from=str(tmp_path))
        assert f"buffer.load_from={str(tmp_path)!r} has no {name}" in message and "checkpoints/step_<n>" in message
        (tmp_path / name).touch()
    make(load_from=str(tmp_path))


def test_what_tasks_and_files_show_is_refused_by_the_envs_own_key(save_pools):
    folder = save_pools("math")
    tasks = [vf.Task(vf.TaskData(idx=0, prompt="1+1="))]
    with pytest.raises(ConfigError, match=r"^envs\.math\.buffer\.hash_keys: 'promt' is not a field of TaskData"):
        make("envs.math.buffer", load_from=folder, hash_keys=["promt"]).load(tasks, seed=0, env_name="math")
    (Path(folder) / "hard_examples.jsonl").write_text("{\n")
    with pytest.raises(ConfigError, match=r"^envs\.math\.buffer\.load_from: line 1 of "):
        make("envs.math.buffer", load_from=folder).load(tasks, seed=0, env_name="math")


def test_a_buffer_of_ones_own_has_settings_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "my_buffers.py").write_text(
        "from dataclasses import dataclass\n"
        "from typing import Annotated\n"
        "from annotated_types import Ge\n"
        "from prl.orchestrator.buffer.task_buffer import TaskBuffer\n"
        "@dataclass(kw_only=True)\n"
        "class Longest(TaskBuffer):\n"
        "    first: Annotated[int, Ge(1)] = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    node = {"_target_": "my_buffers.Longest", "first": 2, "refill": True, "easy_threshold": 1.0}
    buffer = build(node, Buffer, "buffer")
    assert (type(buffer).__name__, buffer.first, buffer.refill) == ("Longest", 2, True)
    with pytest.raises(ConfigError, match=r"^buffer\.first="):
        build(node | {"first": 0}, Buffer, "buffer")
