"""What keeps a run from a Ray cluster."""

import sys

import pytest

from prl.base.errors import ConfigError
from prl.config.build import build
from prl.config.schema import ModelConfig
from prl.launch.host import Node
from prl.launch.launcher import Launcher
from prl.launch.plan import Bundle
from prl.launch.ray import RayLauncher, check_node

NODE = Node(id="1", address="10.0.0.2", prl="0.1.0", folder="/dev/shm/prl-x", room=2**30)


@pytest.mark.parametrize(
    ("bundle", "node", "has_model", "message"),
    [
        ({}, {"prl": "0.0.9"}, True, "which has prl 0.0.9; this machine has 0.1.0"),
        ({}, {}, False, "model.path='/models/x': 'engine' is placed on node 10.0.0.2, which sees no such folder"),
        ({"room": 2**31}, {}, True, "where weights need 2.0 GiB of /dev/shm/prl-x, and 1.0 GiB are free"),
        ({"host": "127.0.0.1"}, {}, True, "engine.host=127.0.0.1: .* engine.host=0.0.0.0"),
        ({"host": "0.0.0.0"}, {}, True, None),
        ({"host": "127.0.0.1"}, {"address": "10.0.0.1"}, True, None),
    ],
)
def test_a_node_that_cannot_run_a_process_is_refused(bundle, node, has_model, message):
    asked = Bundle(**{"process": "engine", "model": ModelConfig(path="/models/x"), "cpus": 1, "gpus": 0} | bundle)
    node = Node(**vars(NODE) | node)
    if message is None:
        check_node(asked, node, "10.0.0.1", has_model=has_model)
        return
    with pytest.raises(ConfigError, match=message):
        check_node(asked, node, "10.0.0.1", has_model=has_model)


def test_without_ray_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "prl.launch.ray")
    with pytest.raises(ConfigError, match=r"launcher._target_=.*: pip install 'prl\[ray\]'"):
        build({"_target_": "prl.launch.ray.RayLauncher"}, Launcher, "launcher")


@pytest.mark.slow
def test_too_few_resources_and_a_dead_address_are_refused(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # a process keeps what it began with, and other tests join clusters
    bundle = Bundle("engine", ModelConfig(path="x/y"), cpus=1, gpus=3)
    with (
        RayLauncher(wait_s=0.5) as launcher,
        pytest.raises(ConfigError, match="no room for 1 x engine of 1 CPU and 3 GPU; "),
    ):
        launcher.reserve([bundle])
    with (
        RayLauncher(address="127.0.0.1:9") as launcher,
        pytest.raises(ConfigError, match=r"launcher.address: no Ray at 127.0.0.1:9: .*refus"),
    ):
        launcher.reserve([bundle])
