"""Env code in processes of its own: what it does there costs its own call, with its reason, and nobody else's."""

import asyncio
import gc
import logging
import multiprocessing
import os
import re
import resource
import subprocess
import sys
import time

import pytest
import verifiers.v1 as vf

from prl.config.schema import EnvConfig
from prl.episodes.calls import EnvProcessEnded
from prl.episodes.environment import Environment
from prl.episodes.grading import PLACE, Grader, Place, give_places, grade
from prl.episodes.turn import AGENT, trace_task
from prl.episodes.workers import Workers
from prl.reaper import fork

LIMIT_S = 1.0


class Misdeed(vf.TaskData):
    kind: str


class Deeds(vf.Task[Misdeed]):
    """Its grader does what its data says."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return await getattr(self, self.data.kind, self.fine)(trace)

    @vf.metric
    def process(self, trace: vf.Trace) -> float:
        return float(os.getpid())

    async def fine(self, trace):
        return 1.0

    async def reads(self, trace):
        trace.info["seen"] = [trace.last_reply, trace.agent.name, len(trace.nodes[-1].token_ids)]
        return trace.nodes[-1].logprobs[0]

    async def spins(self, trace):
        while True:
            pass

    async def blocks(self, trace):
        time.sleep(60)  # noqa: ASYNC251

    async def swallows(self, trace):
        while True:
            try:
                await asyncio.sleep(60)
            except BaseException:
                continue

    async def waits(self, trace):
        await asyncio.sleep(0.3)
        return 1.0

    async def os_exit(self, trace):
        os._exit(3)

    async def sys_exit(self, trace):
        raise SystemExit(3)

    async def interrupts(self, trace):
        raise KeyboardInterrupt

    async def interrupts_in_a_task_of_its_own(self, trace):
        await asyncio.gather(self.interrupts(trace))

    async def cancels(self, trace):
        raise asyncio.CancelledError

    async def crashes(self, trace):
        os.kill(os.getpid(), 11)

    async def hoards(self, trace):
        hoard = []
        while True:
            hoard.append(bytearray(1 << 26))

    async def talks(self, trace):
        while True:
            print("talk " * 1000)

    async def says(self, trace):
        print("a word")
        return 1.0

    async def says_too_much(self, trace):
        raise ValueError("x" * (200 << 20))

    async def cancels_all(self, trace):
        for each in asyncio.all_tasks():
            each.cancel()
        await self.waits(trace)

    async def stops_the_loop(self, trace):
        asyncio.get_running_loop().stop()
        await self.waits(trace)

    async def has_no_time_left(self, trace):
        resource.setrlimit(resource.RLIMIT_CPU, (1, 1))
        await self.spins(trace)

    async def forks(self, trace):
        os.fork()
        return 1.0

    async def forks_in_a_task_of_its_own(self, trace):
        return (await asyncio.gather(self.forks_and_waits(trace)))[0]

    async def forks_and_waits(self, trace):
        os.fork()
        return await self.waits(trace)

    async def forks_in_a_callback(self, trace):
        asyncio.get_running_loop().call_soon(os.fork)
        return await self.waits(trace)

    async def forks_what_raises(self, trace):
        if os.fork() == 0:
            raise ValueError("in the child")
        return 1.0

    async def forks_what_exits(self, trace):
        if os.fork() == 0:
            sys.exit(0)
        return 1.0

    async def has_processes(self, trace):
        child = multiprocessing.get_context("fork").Process(target=lambda: asyncio.run(asyncio.sleep(0.01)))
        child.start()
        child.join()
        ran = subprocess.run(["true"], preexec_fn=lambda: None)  # noqa: ASYNC221
        awaited = await asyncio.create_subprocess_exec("true")
        if (pid := os.fork()) == 0:
            os._exit(7)
        statuses = [child.exitcode, ran.returncode, await awaited.wait()]
        trace.info["statuses"] = [*statuses, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]  # noqa: ASYNC222
        return 1.0

    async def recurses(self, trace):
        return await self.recurses(trace)

    async def returns_a_function(self, trace):
        return lambda: 1.0

    async def records_an_object(self, trace):
        trace.info["object"] = object()
        return 1.0

    async def records_too_much(self, trace):
        trace.info["much"] = "x" * (20 << 20)
        return 1.0

    async def raises(self, trace):
        raise ValueError("\x1b[2Jno such answer")


KINDS = [name for name in vars(Deeds) if not name.startswith("_") and name not in ("right", "process")]


@pytest.fixture(scope="module")
def tasks():
    """The tasks of an env with workers, by what they do."""
    made = [Deeds(Misdeed(kind=kind, prompt="?")) for kind in KINDS]
    workers = Workers("deeds", Grader(made), memory_gb=0.5)
    give_places(made, workers)
    yield dict(zip(KINDS, made, strict=True))
    workers.close()


async def graded(task, limit_s=LIMIT_S):
    """The graded trace, or what grading raised."""
    trace = vf.Trace(task=trace_task(task), agent=AGENT)
    try:
        async with asyncio.timeout(limit_s):
            await grade(task, trace)
    except Exception as error:
        return error
    return trace


async def test_a_grader_runs_elsewhere_and_its_numbers_come_back(tasks):
    trace = await graded(tasks["fine"])
    assert trace.reward == 1.0 and trace.metrics["process"] not in (0.0, float(os.getpid()))


ENDS = {
    "os_exit": "EnvProcessEnded: the env's code ended its process with exit status 3",
    "sys_exit": "TaskError: task Deeds scoring: RuntimeError: the env's code let SystemExit escape: 3",
    "interrupts": "TaskError: task Deeds scoring: RuntimeError: the env's code let KeyboardInterrupt escape",
    "interrupts_in_a_task_of_its_own": "RuntimeError: the env's code let KeyboardInterrupt escape",
    "cancels": "RuntimeError: the env's code let CancelledError escape",
    "cancels_all": "RuntimeError: the env's code let CancelledError escape",
    "stops_the_loop": "RuntimeError: the env's code let RuntimeError escape: Event loop stopped before",
    "says_too_much": "TaskError: task Deeds scoring: ValueError: xxxx",
    "has_no_time_left": "EnvProcessEnded: the env's code left its process without an answer: SIGKILL (out of memory or",
    "crashes": "EnvProcessEnded: the env's code ended its process: SIGSEGV",
    "hoards": "TaskError: task Deeds scoring: MemoryError: ",
    "talks": "EnvProcessEnded: the env's code printed more than 1 MiB",
    "recurses": "TaskError: task Deeds scoring: RecursionError: maximum recursion depth exceeded",
    "returns_a_function": "TaskError: task Deeds scoring: TypeError: float() argument must be a string",
    "records_an_object": "RuntimeError: what it recorded is no plain data: Encoding objects of type object",
    "records_too_much": "RuntimeError: what it recorded has 20 MiB, more than 16",
    "raises": "TaskError: task Deeds scoring: ValueError: \x1b[2Jno such answer",
    "spins": "TimeoutError",
    "blocks": "TimeoutError",
    "swallows": "TimeoutError",
}


async def test_each_misdeed_costs_its_own_call_while_others_go_on(tasks):
    """All at once, with harmless calls among them."""
    found = dict.fromkeys(ENDS)

    async def look(kind):
        found[kind] = await graded(
            tasks[kind], limit_s=12.0 if kind not in ("spins", "blocks", "swallows") else LIMIT_S
        )

    ticks, started = 0, time.monotonic()

    async def tick():
        nonlocal ticks
        while True:
            await asyncio.sleep(0.05)
            ticks += 1

    ticking = asyncio.create_task(tick())
    fine = [asyncio.create_task(graded(tasks["fine"], limit_s=12.0)) for _ in range(20)]
    await asyncio.gather(*map(look, ENDS))
    assert [trace.reward for trace in await asyncio.gather(*fine)] == [1.0] * 20
    ticking.cancel()
    assert ticks > 0.5 * (time.monotonic() - started) / 0.05, "the event loop went on"
    for kind, end in ENDS.items():
        said = f"{type(found[kind]).__name__}: {found[kind]}"
        unheard = kind == "hoards" and "out of memory" in said  # there may be none left to say so
        assert said.startswith(end) or unheard, (kind, said)


async def test_calls_that_wait_share_workers(tasks):
    started = time.monotonic()
    traces = await asyncio.gather(*(graded(tasks["waits"], limit_s=20.0) for _ in range(60)))
    assert all(trace.reward == 1.0 for trace in traces)
    assert time.monotonic() - started < 5.0, "one after the other in two processes, they would take nine seconds"


async def test_a_call_that_shares_a_worker_survives_what_another_does_to_it(tasks):
    waiting = [asyncio.create_task(graded(tasks["waits"], limit_s=10.0)) for _ in range(12)]
    await asyncio.sleep(0.1)
    ended = await asyncio.gather(*(graded(tasks["os_exit"], limit_s=10.0) for _ in range(4)))
    assert all(isinstance(error, EnvProcessEnded) for error in ended)
    assert [trace.reward for trace in await asyncio.gather(*waiting)] == [1.0] * 12


@pytest.mark.parametrize("misdeed", ["cancels_all", "stops_the_loop"])
async def test_what_a_call_does_to_all_tasks_of_its_worker_is_its_own_failure(tasks, misdeed):
    waiting = [asyncio.create_task(graded(tasks["waits"], limit_s=10.0)) for _ in range(12)]
    await asyncio.sleep(0.1)
    ended = await asyncio.gather(*(graded(tasks[misdeed], limit_s=10.0) for _ in range(4)))
    assert all(ENDS[misdeed] in f"{type(error).__name__}: {error}" for error in ended)
    assert [trace.reward for trace in await asyncio.gather(*waiting)] == [1.0] * 12


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("forks")])
async def test_a_child_that_comes_back_from_a_grader_answers_nobody(tasks, kind):
    waiting = [asyncio.create_task(graded(tasks["waits"], limit_s=10.0)) for _ in range(12)]
    await asyncio.sleep(0.1)
    forked = await asyncio.gather(*(graded(tasks[kind], limit_s=10.0) for _ in range(4)))
    found = [*forked, *await asyncio.gather(*waiting)]
    found += [await graded(tasks["fine"], limit_s=10.0) for _ in range(60)]
    assert [trace.reward for trace in found] == [1.0] * 76


async def test_a_grader_may_have_processes_of_its_own(tasks):
    trace = await graded(tasks["has_processes"], limit_s=20.0)
    assert trace.reward == 1.0 and trace.info["statuses"] == [0, 0, 0, 7]


async def test_workers_that_spin_are_replaced_before_their_deadline(tasks, monkeypatch):
    """As many as there are workers, and more: the calls behind them do not wait for the end of the spinning."""
    monkeypatch.setattr("prl.episodes.workers.HELD_S", 0.3)
    monkeypatch.setattr("prl.episodes.workers.LOOK_S", 0.1)
    spinning = [asyncio.create_task(graded(tasks["spins"], limit_s=8.0)) for _ in range(2)]
    await asyncio.sleep(0.1)
    workers = vars(tasks["fine"])[PLACE].workers
    spinning += [asyncio.create_task(graded(tasks["spins"], limit_s=8.0)) for _ in workers._workers]
    started = time.monotonic()
    assert (await graded(tasks["fine"], limit_s=7.0)).reward == 1.0
    assert time.monotonic() - started < 6.0
    for each in spinning:
        each.cancel()
    assert len(spinning) == len(await asyncio.gather(*spinning, return_exceptions=True))


async def test_a_cancelled_call_frees_its_worker(tasks, gone):
    workers = vars(tasks["spins"])[PLACE].workers
    call = asyncio.create_task(graded(tasks["spins"], limit_s=60))
    await asyncio.sleep(0.3)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    async with asyncio.timeout(5):
        while any(worker.calls for worker in workers._workers.values()):
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("kind", "said"),
    [("says", "a word"), ("forks", "a process that the env's code forked was ended where it came back")],
)
async def test_what_a_grader_and_its_children_print_is_logged(caplog, kind, said):
    task = Deeds(Misdeed(kind=kind, prompt="?"))
    workers = Workers("speaks", Grader([task]), memory_gb=0.5)
    give_places([task], workers)
    with caplog.at_level(logging.INFO, logger="prl"):
        await graded(task)
        async with asyncio.timeout(5):
            while said not in caplog.text:
                await asyncio.sleep(0.02)
    assert f"env speaks printed: {said}" in caplog.text
    workers.close()


async def test_a_copy_of_a_task_is_graded_by_its_own_data(tasks):
    assert (await graded(tasks["raises"].with_data(kind="fine"))).reward == 1.0


async def test_workers_are_replaced_after_many_calls(tasks, monkeypatch):
    monkeypatch.setattr("prl.episodes.calls.MAX_CALLS", 3)
    monkeypatch.setattr("prl.episodes.workers.MAX_CALLS", 3)
    processes = [(await graded(tasks["fine"], limit_s=10)).metrics["process"] for _ in range(12)]
    assert len(set(processes)) >= 3


def test_nothing_is_left_when_an_env_is_dropped(gone):
    task = Deeds(Misdeed(kind="fine", prompt="?"))
    workers = Workers("dropped", Grader([task]), memory_gb=0.5)
    give_places([task], workers)
    process = int(asyncio.run(graded(task)).metrics["process"])
    template = workers.template
    assert not gone(process)
    del workers, task
    gc.collect()
    deadline = time.monotonic() + 5
    while not (gone(process) and gone(template)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_nothing_is_left_of_a_run_that_is_killed_while_a_grader_spins(tmp_path, gone):
    task = Deeds(Misdeed(kind="spins", prompt="?"))

    def run():
        workers = Workers("killed", Grader([task]), memory_gb=0.5)
        give_places([task], workers)

        async def spin():
            call = asyncio.create_task(graded(task, limit_s=60))
            await asyncio.sleep(0.3)
            family = [workers.template, *children(workers.template)]
            (tmp_path / "family.part").write_text(" ".join(map(str, family)))
            (tmp_path / "family.part").rename(tmp_path / "family")
            await call

        asyncio.run(spin())

    pid, deadline = fork(run), time.monotonic() + 20
    while not (tmp_path / "family").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    template, worker = map(int, (tmp_path / "family").read_text().split())
    assert not gone(template) and not gone(worker)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    while not (gone(template) and gone(worker)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(each) for each in file.read().split()]


async def test_an_env_whose_template_is_killed_fails_its_calls_with_the_reason():
    task = Deeds(Misdeed(kind="fine", prompt="?"))
    workers = Workers("orphans", Grader([task]), memory_gb=0.5)
    give_places([task], workers)
    assert (await graded(task)).reward == 1.0
    os.kill(workers.template, 9)
    error = await graded(task, limit_s=8)
    while not isinstance(error, EnvProcessEnded) or "gone" not in str(error):  # the first may meet a dying worker
        error = await graded(task, limit_s=8)
    assert "the processes of env 'orphans' are gone" in str(error)
    workers.close()


async def test_a_stopped_worker_costs_its_call_alone():
    task = Deeds(Misdeed(kind="spins", prompt="?"))
    workers = Workers("stopped", Grader([task]), memory_gb=0.5)
    give_places([task], workers)
    spinning = asyncio.create_task(graded(task, limit_s=30))
    deadline = time.monotonic() + 5
    while not children(workers.template):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    [worker] = children(workers.template)
    os.kill(worker, 19)
    error = await asyncio.wait_for(spinning, 5)
    assert isinstance(error, EnvProcessEnded) and "killed from outside" in str(error)
    workers.close()


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
        ("IN_PROCESS = False", None, True),
        ("IN_PROCESS = True", False, True),
        ("pass", True, False),
    ],
)
def test_who_does_not_say_that_he_is_quick_runs_elsewhere(module, says, in_process, elsewhere):
    config = EnvConfig(taskset=module(SOURCE.format(name="Own", says=says)), in_process=in_process)
    environment = Environment("mine", config, eval_tasks=0)
    assert (environment.workers is not None) == elsewhere
    assert isinstance(vars(environment.tasks[0]).get(PLACE), Place) == elsewhere


def test_an_environment_says_how_the_process_ended_that_its_graders_are_forked_from(module):
    config = EnvConfig(taskset=module(SOURCE.format(name="Own", says="pass")))
    killed, closed = (Environment("mine", config, eval_tasks=0) for _ in range(2))
    assert killed.cause_of_end() is None and closed.cause_of_end() is None
    template = killed.workers.template
    os.kill(template, 15)
    deadline = time.monotonic() + 5
    while killed.cause_of_end() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    said = f"process {template}, which the graders of env 'mine' are forked from, was killed by SIGTERM"
    assert killed.cause_of_end() == said == killed.cause_of_end()
    for environment in (killed, closed):
        environment.workers.close()
        assert environment.cause_of_end() is None


def test_a_promise_is_not_inherited_from_another_module(module):
    source = "from prl.envs.math import MathTaskset\nclass Mine(MathTaskset):\n    pass\n__all__ = ['Mine']\n"
    assert Environment("mine", EnvConfig(taskset=module(source)), eval_tasks=0).workers is not None


@pytest.mark.parametrize(("grader", "elsewhere"), [("exact", False), ("prl.envs.graders.numeric", True)])
def test_a_grader_of_ones_own_in_jsonl_runs_elsewhere(tmp_path, grader, elsewhere):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    args = {"path": str(tmp_path / "rows.jsonl"), "grader": grader, "eval_fraction": 0.0}
    environment = Environment("e", EnvConfig(taskset="prl.envs.jsonl", args=args), eval_tasks=0)
    assert (environment.workers is not None) == elsewhere


@pytest.mark.parametrize("name", ["math", "guess", "alphabet_sort", "reverse_text", "kuhn_poker", "calculator"])
def test_prls_own_envs_are_quick(name):
    args = {} if name == "kuhn_poker" else {"num_tasks": 2}
    environment = Environment(name, EnvConfig(taskset=f"prl.envs.{name}", args=args), eval_tasks=0)
    assert environment.workers is None
    assert re.match(r"prl\.envs", type(environment.taskset).__module__)
