"""The vLLM plugin, in processes of its own: it changes vLLM for good."""

import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

PATCHED = """
import os, time, types
from vllm.distributed.device_communicators import shm_broadcast
from prl.inference.plugin import register

original, slept, polled = shm_broadcast.SpinCondition.wait, [], []
os.environ.pop("PRL_ENGINE_POLL_S", None)
register()
assert shm_broadcast.SpinCondition.wait is original, "patched without being asked"
os.environ["PRL_ENGINE_POLL_S"] = ""
register()
assert shm_broadcast.SpinCondition.wait is original, "patched for an empty value"
os.environ["PRL_ENGINE_POLL_S"] = "0.003"
register()
wait = shm_broadcast.SpinCondition.wait
assert wait is not original
time.sleep = slept.append
poller = types.SimpleNamespace(poll=lambda timeout: polled.append(timeout) or [])
reader = types.SimpleNamespace(
    is_reader=True, busy_loop_s=1, last_read=time.monotonic(), poller=poller,
    read_cancel_socket=object(), local_notify_socket=object(),
)
wait(reader, 500)
assert (slept, polled) == ([0.003], []), (slept, polled)
reader.last_read -= 2  # idle: vLLM's own way of waiting, which wakes on a message
wait(reader, timeout_ms=500)
assert (slept, polled) == ([0.003], [500]), (slept, polled)
"""

UNASKED = """
import sys
from prl.inference.plugin import register
register()
assert "vllm" not in sys.modules and "torch" not in sys.modules
"""


def run(code):
    env = {name: value for name, value in os.environ.items() if name != "PRL_ENGINE_POLL_S"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_waits_by_short_sleeps_only_when_asked():
    run(PATCHED)


def test_costs_nothing_elsewhere():
    """vLLM loads the plugin in every process of every engine on the machine, also those prl did not start."""
    run(UNASKED)


def test_vllm_finds_it():
    (found,) = [entry for entry in entry_points(group="vllm.general_plugins") if entry.name == "prl"]
    assert found.value == "prl.inference.plugin:register"
