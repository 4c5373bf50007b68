"""An event loop that stands still is told, with the env and the function, while it does."""

import asyncio
import logging
import threading
import time

import pytest
import verifiers.v1 as vf

from prl.config.schema import EnvConfig
from prl.episodes.environment import Environment
from prl.episodes.grading import grade
from prl.episodes.loop_monitor import watching
from prl.episodes.turn import AGENT, trace_task

SLOW = """
import time
class Slow(vf.Task):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        time.sleep(1.8)
        return 1.0
class Taskset(vf.Taskset[Slow, vf.TasksetConfig]):
    IN_PROCESS = True
    def load(self):
        yield Slow(vf.TaskData(prompt="?"))
__all__ = ["Taskset"]
"""


async def test_a_grader_that_blocks_is_named_while_it_blocks(module, caplog):
    environment = Environment("lazy", EnvConfig(taskset=module(SLOW)), eval_tasks=0)
    (task,) = environment.tasks
    with caplog.at_level(logging.INFO, logger="prl"):
        async with environment.serving():
            await asyncio.sleep(0.3)
            said = []
            threading.Timer(1.7, lambda: said.append(caplog.text)).start()
            await grade(task, vf.Trace(task=trace_task(task), agent=AGENT))
            await asyncio.sleep(0.5)
    (told,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert told in said[0], "before it returned"
    assert told.startswith("env lazy: the event loop has stood still for more than 1 s in Slow.right (")
    assert "tasks.py, line 7)" in told and "envs.lazy.in_process=false" in told
    (after,) = [record.getMessage() for record in caplog.records if "stood still for 1." in record.getMessage()]
    assert float(after.split(" for ")[1].split()[0]) == pytest.approx(1.8, abs=0.5)


async def test_the_same_place_is_told_once_and_other_code_without_an_env(caplog):
    def wait():
        time.sleep(1.6)

    with caplog.at_level(logging.WARNING, logger="prl"), watching("other", {"elsewhere"}) as monitor:
        for _ in range(2):
            await asyncio.sleep(0.25)
            wait()
        await asyncio.sleep(0.3)
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("the event loop has stood still for more than 1 s in ") and ".wait (" in told
    assert list(monitor.standstills.values()) == [2]
    assert not monitor._thread.is_alive()


async def test_a_loop_that_is_busy_but_turns_is_not_told(caplog):
    with caplog.at_level(logging.INFO, logger="prl"), watching("busy", set()):
        end = time.monotonic() + 1.6
        while time.monotonic() < end:
            time.sleep(0.1)  # noqa: ASYNC251
            await asyncio.sleep(0)
    assert not caplog.records
