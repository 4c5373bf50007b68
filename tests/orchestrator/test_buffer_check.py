"""What is refused of a buffer's knobs before anything starts."""

import copy
import math
import warnings

import pytest

from prl.compose import compose
from prl.errors import ConfigError
from prl.orchestrator import pools
from prl.orchestrator.buffer import Buffer, warn_of_strangers


def refused(config):
    with pytest.raises(ConfigError) as caught:
        Buffer.check(config.buffer, "buffer")
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("easy_threshold", math.nan, "must be a finite number or null, got nan"),
        ("hard_threshold", math.inf, "must be a finite number or null, got inf"),
        ("easy_fraction", -0.1, "must be from 0 to 1, got -0.1"),
        ("hard_fraction", 1.1, "must be from 0 to 1, got 1.1"),
        ("hard_fraction", math.nan, "must be from 0 to 1, got nan"),
        ("oversampling_factor", 0.99, "must be at least 1, got 0.99"),
        ("oversampling_factor", math.inf, "must be at least 1, got inf"),
    ],
)
def test_buffer_knobs_out_of_range(config, key, value, says):
    setattr(config.buffer, key, value)
    assert f"buffer.{key} {says}" in refused(config)


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
def test_easy_is_above_hard(config, easy, hard, fine):
    config.buffer.easy_threshold, config.buffer.hard_threshold = easy, hard
    if fine:
        Buffer.check(config.buffer, "buffer")
    else:
        assert f"buffer.easy_threshold={easy} must be above buffer.hard_threshold={hard}" in refused(config)


def test_buffer_knobs_at_their_bounds(config, save_pools):
    config.buffer.load_from = save_pools("math")
    config.buffer.easy_fraction, config.buffer.hard_fraction, config.buffer.oversampling_factor = 0.0, 1.0, 1.0
    Buffer.check(config.buffer, "buffer")


@pytest.fixture
def save_pools(tmp_path):
    """Write a checkpoint's pools: a hard task of each env named."""

    def save(*envs):
        pools.write(tmp_path, {"easy": [], "hard": [{"env": env, "key": "k", "task": {}} for env in envs]})
        return str(tmp_path)

    return save


@pytest.mark.parametrize(("key", "value"), [("easy_fraction", 0.1), ("hard_fraction", 1.0), ("hash_keys", ["prompt"])])
def test_what_is_about_loaded_pools_needs_some(config, key, value, save_pools):
    setattr(config.buffer, key, value)
    config.buffer.easy_threshold = 1.0  # of pools that begin empty there is nothing to sample again or to find
    message = refused(config)
    assert message.startswith(f"buffer.{key}={value} is about the pools that a run begins with")
    assert "add buffer.load_from=" in message
    config.buffer.load_from = save_pools("math")
    Buffer.check(config.buffer, "buffer")


def test_refill_needs_pools(config, save_pools):
    config.buffer.refill = True
    message = refused(config)
    assert message.startswith("buffer.refill=true without difficulty pools") and "buffer=pools" in message
    for key, value in (("easy_threshold", 1.0), ("hard_threshold", 0.0), ("load_from", save_pools("math"))):
        other = copy.deepcopy(config)
        setattr(other.buffer, key, value)
        Buffer.check(other.buffer, "buffer")


@pytest.mark.parametrize("option", ["default", "odf", "pools", "pools_odf"])
def test_the_options_of_the_buffer_pass(option):
    Buffer.check(compose(["run.name=x", f"buffer={option}"]).buffer, "buffer")


def test_pools_of_other_envs_warn(save_pools):
    folder = save_pools("maths", "sums", "maths")
    with pytest.warns(UserWarning) as caught:
        warn_of_strangers(folder, {"math": None, "b": None})
    (said,) = [str(warning.message) for warning in caught]
    assert "its tasks are those of maths, sums, and this run has only b, math: none is retired" in said
    for envs in ((), ("b",), ("math", "maths")):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warn_of_strangers(save_pools(*envs), {"math": None, "b": None})


def test_a_folder_to_load_pools_from_has_both_files(config, tmp_path):
    config.buffer.load_from = str(tmp_path)
    for name in ("easy_examples.jsonl", "hard_examples.jsonl"):
        message = refused(config)
        assert f"buffer.load_from={str(tmp_path)!r} has no {name}" in message and "checkpoints/step_<n>" in message
        (tmp_path / name).touch()
    Buffer.check(config.buffer, "buffer")
