"""An event loop that stands still is told, with the env and the function, while it does."""

import asyncio
import logging
import threading
import time
from types import SimpleNamespace

import pytest
import verifiers.v1 as vf

from prl.config.schema import EnvConfig
from prl.episodes.environment import Environment
from prl.episodes.grading import grade
from prl.episodes.turn import AGENT, trace_task
from prl.loop_monitor import watching

SLOW = """
import time
class Slow(vf.Task):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        time.sleep(0.9)
        return 1.0
class Taskset(vf.Taskset[Slow, vf.TasksetConfig]):
    IN_PROCESS = True
    def load(self):
        yield Slow(vf.TaskData(prompt="?"))
__all__ = ["Taskset"]
"""


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """A standstill is told after 0.4 s."""
    monkeypatch.setattr("prl.loop_monitor.STILL_S", 0.4)
    monkeypatch.setattr("prl.loop_monitor.BEAT_S", 0.05)


async def test_a_grader_that_blocks_is_named_while_it_blocks(module, caplog):
    environment = Environment("lazy", EnvConfig(taskset=module(SLOW)), eval_tasks=0)
    (task,) = environment.tasks
    with caplog.at_level(logging.INFO, logger="prl"):
        async with environment.serving():
            await asyncio.sleep(0.1)
            said = []
            threading.Timer(0.8, lambda: said.append(caplog.text)).start()
            await grade(task, vf.Trace(task=trace_task(task), agent=AGENT))
            await asyncio.sleep(0.2)
    (told,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert told in said[0], "before it returned"
    assert told.startswith("env lazy: the event loop has stood still for more than 0.4 s in Slow.right (")
    assert "tasks.py, line 7)" in told and "envs.lazy.in_process=false" in told
    (after,) = [record.getMessage() for record in caplog.records if "stood still for 0." in record.getMessage()]
    assert float(after.split(" for ")[1].split()[0]) == pytest.approx(0.9, abs=0.3)


async def test_the_same_place_is_told_once_and_other_code_without_an_env(caplog):
    def wait():
        time.sleep(0.7)

    with caplog.at_level(logging.INFO, logger="prl"), watching("other", {"elsewhere"}, 60.0) as monitor:
        for _ in range(2):
            await asyncio.sleep(0.1)
            wait()
        await asyncio.sleep(0.3)
    (told,) = [record.getMessage() for record in caplog.records if "has stood" in record.getMessage()]
    assert not [record for record in caplog.records if record.levelno > logging.INFO], "the machine may be busy"
    assert told.startswith("the event loop has stood still for more than 0.4 s in ") and ".wait (" in told
    assert list(monitor.standstills.values()) == [2]
    assert not monitor._thread.is_alive()


class Slow:
    """A monitor of which both hooks take a second."""

    def start(self):
        time.sleep(1.0)

    def step(self):
        time.sleep(1.0)


@pytest.mark.parametrize(("hook", "said"), [("start", "starting, nothing new for"), ("step", "no progress for")])
async def test_what_takes_long_at_the_start_is_no_lack_of_progress(caplog, monkeypatch, hook, said):
    monkeypatch.setattr("prl.loop_monitor.QUIET_S", 0.5)
    slow = Slow()
    with watching("other") as monitor:
        monitor.hooks[id(slow)] = ("monitor.slow", 60.0)
        await asyncio.sleep(0.1)
        getattr(slow, hook)()
        await asyncio.sleep(0.2)
    (first, *_) = [record.getMessage() for record in caplog.records if "monitor.slow" in record.getMessage()]
    assert first.startswith(said) and ("no progress" in caplog.text) is (hook == "step")


async def test_a_loop_that_is_busy_but_turns_is_not_told(caplog):
    with caplog.at_level(logging.INFO, logger="prl"), watching("busy", set(), 60.0):
        end = time.monotonic() + 0.9
        while time.monotonic() < end:
            time.sleep(0.1)  # noqa: ASYNC251
            await asyncio.sleep(0)
    assert not caplog.records


TALKS = """
class Talking(vf.Task):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return 1.0
class TalkingTaskset(vf.Taskset[Talking, vf.TasksetConfig]):
    def load(self):
        yield Talking(vf.TaskData(prompt="?"))
class TalkingEnv(vf.Env[vf.SingleAgentEnvConfig]):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as talk:
            while True:
                pass
__all__ = ["TalkingTaskset", "TalkingEnv"]
"""


async def test_a_simulated_user_that_spins_is_interrupted_at_the_deadline_of_its_rollout(module, caplog):
    environment = Environment("talks", EnvConfig(taskset=module(TALKS), timeout_s=0.8), eval_tasks=0)
    sampler = SimpleNamespace(version=0, temperature=1.0)
    async with environment.serving():
        playing = environment.play(environment.tasks[0], 1, sampler, group_id=0)
        (rollout,) = [rollout async for rollout in playing]
    assert "StoodStill: the env's code did not return to the event loop" in rollout.error
    assert "interrupting TalkingEnv.run (" in caplog.text and "env talks: the event loop has stood" in caplog.text
