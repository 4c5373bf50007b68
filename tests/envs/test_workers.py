"""Graders in processes of their own: what one does there costs its own call, with its reason, and nobody else's."""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time

import misdeeds
import psutil
import pytest
import verifiers.v1 as vf
from graded_tasks import graded, new_trace

from prl.base.errors import ConfigError
from prl.config.schema import EnvConfig
from prl.envs.environment import Environment
from prl.envs.grading import give_to_workers, grade
from prl.envs.workers import LocalWorkers

LIMIT_S = 60.0
"""For what takes a moment, on a busy machine."""
ENDLESS_S = 1.0


@contextlib.asynccontextmanager
async def working(*kinds):
    """Tasks with workers, which do these things."""
    tasks = [misdeeds.task(kind) for kind in kinds]
    workers = LocalWorkers("mine", ["prl.envs.grading"], memory_gb=0.5, count=8)
    give_to_workers(tasks, workers)
    async with workers.serving():
        yield tasks


ENDS = {
    "os_exit": "EnvProcessEnded: the env's code ended its process: exit status 3",
    "crashes": "EnvProcessEnded: the env's code ended its process: SIGSEGV",
    "is_killed": "EnvProcessEnded: the env's code ended its process: SIGKILL",
    "sys_exit": "TaskError: task Misdeeds scoring: RuntimeError: the env's code let SystemExit escape: 3",
    "exits_in_a_task": "RuntimeError: 3",
    "interrupts": "TaskError: task Misdeeds scoring: RuntimeError: the env's code let KeyboardInterrupt escape",
    "cancels": "RuntimeError: CancelledError",
    "hoards": "TaskError: task Misdeeds scoring: MemoryError",
    "recurses": "TaskError: task Misdeeds scoring: RecursionError: maximum recursion depth exceeded",
    "returns_a_function": "TaskError: task Misdeeds scoring: TypeError: float() argument must be a string",
    "records_an_object": "RuntimeError: Encoding objects of type object",
    "raises": "TaskError: task Misdeeds scoring: ValueError: \x1b[2Jno such answer",
    "raises_much": "TaskError: task Misdeeds scoring: ValueError: xxxx",
    "spins": "TimeoutError",
    "backtracks": "TimeoutError",
    "blocks": "TimeoutError",
    "swallows": "TimeoutError",
}


async def test_each_misdeed_costs_only_its_own_call():
    async with working("fine", *ENDS) as (fine, *wild):
        ticks, started = 0, time.monotonic()

        async def tick():
            nonlocal ticks
            while True:
                await asyncio.sleep(0.05)
                ticks += 1

        ticking = asyncio.create_task(tick())
        harmless = [asyncio.create_task(graded(fine, LIMIT_S)) for _ in range(20)]
        endless = [kind for kind, end in ENDS.items() if end == "TimeoutError"]
        ends = await asyncio.gather(
            *(graded(task, ENDLESS_S if task.data.kind in endless else LIMIT_S) for task in wild)
        )
        assert [trace.reward for trace in await asyncio.gather(*harmless)] == [1.0] * 20
        assert [(await graded(fine, LIMIT_S)).reward for _ in range(3)] == [1.0] * 3
        ticking.cancel()
    assert ticks > 0.3 * (time.monotonic() - started) / 0.05, "the event loop went on"
    for (kind, expected), end in zip(ENDS.items(), ends, strict=True):
        assert f"{type(end).__name__}: {end}".startswith(expected), kind


async def test_numbers_and_info_come_back_from_another_process(trace_with_reply):
    async with working("reads") as (task,):
        trace = trace_with_reply(task)
        await grade(task, trace)
    assert trace.reward == pytest.approx(-0.25) and trace.info["seen"] == ["four", "agent", 2]
    assert trace.metrics["process"] not in (0.0, float(os.getpid()))


@pytest.fixture
def trace_with_reply():
    from verifiers.v1 import graph

    def make(task):
        trace = new_trace(task)
        reply = vf.AssistantMessage(content="four")
        trace.nodes.append(
            graph.MessageNode(message=reply, sampled=True, token_ids=[1, 2], mask=[True] * 2, logprobs=[-0.25, -0.5])
        )
        return trace

    return make


async def test_a_grader_may_have_processes_of_its_own():
    async with working("has_processes") as (task,):
        trace = await graded(task, LIMIT_S)
    assert trace.reward == 1.0 and trace.info["statuses"] == [0, 0, 0]


async def test_printed_text_is_logged_and_never_reaches_the_terminal(caplog, capfd):
    async with working("prints", "prints_much") as (few, many):
        with caplog.at_level(logging.INFO, logger="prl"):
            assert (await graded(few, LIMIT_S)).reward == (await graded(many, LIMIT_S)).reward == 1.0
    assert "env mine printed: a word" in caplog.text
    assert len(caplog.text) < 50_000
    out, err = capfd.readouterr()
    assert "word" not in out + err and "of a child" not in out + err


async def test_workers_come_back_after_all_of_them_were_killed():
    async with working("fine") as (task,):
        await graded(task, LIMIT_S)
        for worker in workers_of(os.getpid()):
            worker.kill()
        async with asyncio.timeout(LIMIT_S):
            while not isinstance(await graded(task, LIMIT_S), vf.Trace):
                await asyncio.sleep(0.1)


async def test_nothing_is_left_once_an_env_is_served():
    before = workers_of(os.getpid())
    async with working("spins") as (task,):
        await graded(task, 0.5)
        during = workers_of(os.getpid())
    assert len(during) > len(before) and set(workers_of(os.getpid())) <= set(before)


def workers_of(pid):
    """Below the fork server."""
    return [each for each in psutil.Process(pid).children(recursive=True) if each.nice() > psutil.Process().nice()]


RUN = """
import asyncio, sys
import misdeeds
from prl.envs.grading import give_to_workers, grade
from prl.envs.turn import AGENT, trace_task
from prl.envs.workers import LocalWorkers
import verifiers.v1 as vf

async def run():
    task = misdeeds.task(sys.argv[1])
    workers = LocalWorkers("mine", ["prl.envs.grading"], memory_gb=0.5, count=8)
    give_to_workers([task], workers)
    async with workers.serving():
        print("serves", flush=True)
        await grade(task, vf.Trace(task=trace_task(task), agent=AGENT))

if __name__ == "__main__":
    asyncio.run(run())
"""


@pytest.mark.slow
def test_nothing_is_left_of_a_run_that_is_killed(tmp_path):
    (tmp_path / "run.py").write_text(RUN)
    path = os.pathsep.join(filter(None, sys.path))
    run = subprocess.Popen(
        [sys.executable, tmp_path / "run.py", "backtracks"],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert run.stdout.readline() == b"serves\n"
    time.sleep(0.5)
    below = psutil.Process(run.pid).children(recursive=True)
    assert len(below) > 3
    run.send_signal(signal.SIGKILL)
    run.wait()
    _, left = psutil.wait_procs(below, timeout=20)
    assert not left


# --- in an environment ------------------------------------------------------------------------------------------------

SOURCE = """
class Quiet(vf.Task):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return 1.0
class {name}(vf.Taskset[Quiet, vf.TasksetConfig]):
    {says}
    def load(self):
        yield Quiet(vf.TaskData(prompt="?"))
__all__ = ["{name}"]
"""


@pytest.mark.parametrize(
    ("says", "in_process", "elsewhere"),
    [
        ("pass", None, True),
        ("IN_PROCESS = True", None, False),
        ("IN_PROCESS = True", False, True),
        ("pass", True, False),
    ],
)
def test_graders_run_elsewhere_unless_promised_quick(module, says, in_process, elsewhere):
    config = EnvConfig(taskset=module(SOURCE.format(name="Own", says=says)), in_process=in_process)
    environment = Environment("mine", config, eval_tasks=0)
    assert (environment.workers is not None) == elsewhere


def test_tasks_that_cannot_be_sent_are_refused(module):
    source = SOURCE.format(name="Own", says="pass").replace("yield Quiet(", "task = Quiet(")
    source = source.replace("__all__", "        task.key_of = lambda: 0\n        yield task\n__all__")
    with pytest.raises(ConfigError, match="envs.mine.in_process=true"):
        Environment("mine", EnvConfig(taskset=module(source)), eval_tasks=0)


@pytest.mark.parametrize(("grader", "elsewhere"), [("exact", False), ("prl.envs.tasksets.graders.numeric", True)])
async def test_a_grader_of_ones_own_in_jsonl_runs_elsewhere(tmp_path, grader, elsewhere):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    args = {"path": str(tmp_path / "rows.jsonl"), "grader": grader, "eval_fraction": 0.0}
    environment = Environment("e", EnvConfig(taskset="prl.envs.tasksets.jsonl", args=args), eval_tasks=0)
    async with environment.serving():
        assert (await graded(environment.tasks[0], LIMIT_S)).reward == 0.0
        assert (environment.workers is not None) == elsewhere
