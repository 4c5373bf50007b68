"""A run that goes on: no task is skipped, and none but those in flight is played again."""

import asyncio
import json
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import verifiers.v1 as vf
from orchestrating import Distils, FakeFrozen, FakePool

from prl.algorithms.grpo import GRPOAlgorithm
from prl.algorithms.reward import RewardAlgorithm
from prl.base.checkpoint_folders import STATE, checkpoint_path, steps_of
from prl.base.errors import ConfigError, EngineError, NoSignal, PrlError
from prl.config.schema import CheckpointConfig
from prl.curriculum.pools import TaskCurriculum
from prl.filters.base import Filter
from prl.launch.run import try_to_finish
from prl.monitors.base import Monitor, Monitors
from prl.orchestrator.next_step import NextStep
from prl.orchestrator.state import RunState, decode, encode, load_components
from prl.runs.run_dir import cut_back


class Talk(vf.Task):
    """Rewarded for the length of its reply; the second env of the tests."""

    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) == 1)


class OneByOne(RewardAlgorithm):
    """Lets rollouts go one after the other."""

    async def score_rollout(self, rollout):
        await asyncio.sleep(0.004 * random.random())
        await super().score_rollout(rollout)


class Counts(GRPOAlgorithm):
    """An algorithm that remembers how many groups it has credited."""

    groups = 0

    def score_group(self, group):
        self.groups += 1
        return super().score_group(group)

    def state_dict(self):
        return {"groups": self.groups}

    def load_state_dict(self, state):
        self.groups = state["groups"]


@pytest.fixture
def start(make_orchestrator, make_trainer, pool):
    """`start(envs, state, …)`: the orchestrator of a run or of its next part, a trainer's work, and its lines."""

    def make(envs, state=None, *, steps, every=1, late=0, monitors=None, **options):
        lines, step = [], 0 if state is None else state.step
        monitors = monitors or SimpleNamespace(step=lines.append, status=lambda text: None)
        checkpoint = CheckpointConfig(every=every, keep_last=None)
        orchestrator = make_orchestrator(envs, monitors, steps, checkpoint=checkpoint, state=state, **options)
        pool.version, pool.delay = step, 0.004
        trainer = make_trainer(delay=0.004, stop_after=steps, late=late)
        return orchestrator, lambda: trainer.work(step + 1), lines

    return make


@pytest.fixture
def finished(start, tmp_path):
    """`finished(envs, …)`: a run to its end; the state of its last step."""

    async def run(envs, state=None, *, steps, **options):
        orchestrator, train, _ = start(envs, state, steps=steps, **options)
        async with asyncio.timeout(20):
            await asyncio.gather(orchestrator.run(), train())
        orchestrator.finish()
        return read_state(tmp_path, steps)

    return run


def played(run_dir):
    """(env, task) by group of every recorded rollout; a group is recorded once."""
    found = {}
    for path in sorted((run_dir / "rollouts").glob("step_*.jsonl")):
        for record in map(json.loads, path.read_text().splitlines()):
            place = (record["group"], record["rollout"])
            assert place not in found, "recorded twice"
            found[place] = (record["env"], record["task"])
    groups = {group: played for (group, _), played in found.items()}
    assert all(groups[group] == played for (group, _), played in found.items())
    return groups


def read_state(run_dir, step):
    path = checkpoint_path(run_dir, step) / STATE / "run.msgpack"
    return decode(path.read_bytes(), path)


OPTIONS = [
    {"max_async_level": 0},
    {"max_async_level": 1, "late": 1},
    {"max_async_level": 2, "late": 2, "oversampling_factor": 1.5},
    {"max_async_level": 1, "strict_async_level": True},
]


@pytest.mark.parametrize(("seed", "options"), enumerate(OPTIONS), ids=str)
async def test_tasks_come_in_the_same_order_after_any_crash(start, make_env, tmp_path, monkeypatch, options, seed):
    monkeypatch.setattr("prl.orchestrator.checkpoints.POLL_S", 0.001)  # a step takes milliseconds here

    def envs():
        return [make_env(tasks=13), make_env("talk", task=Talk, tasks=7, weight=0.5, algorithm=OneByOne)]

    chance, steps, state, lines = random.Random(seed), 10, None, []
    while state is None or state.step < steps:
        orchestrator, train, new = start(envs(), state, steps=steps, **options)
        training, running = asyncio.create_task(train()), asyncio.create_task(orchestrator.run())
        goal = min(steps, (state.step if state else 0) + chance.randint(1, 4))
        async with asyncio.timeout(20):
            while orchestrator.steps.trained < goal and not running.done():
                await asyncio.sleep(0.001)
            if goal == steps:
                await asyncio.gather(running, training)
                orchestrator.finish()
        for task in (running, training):  # a crash: nothing is completed in order
            task.cancel()
        ended = await asyncio.gather(running, training, return_exceptions=True)
        assert not [end for end in ended if isinstance(end, Exception)], ended
        await asyncio.sleep(0.005)
        with orchestrator.checkpoints._writing:  # a thread of this process does not go with the crash
            pass
        lines = [line for line in lines if line["step"] not in {line["step"] for line in new}] + new
        done = steps_of(tmp_path)
        if not done:  # it begins again
            state, lines = None, []
            for path in tmp_path.iterdir():
                shutil.rmtree(path)
            continue
        state = read_state(tmp_path, done[-1])
        if state.step < steps:
            cut_back(tmp_path, state.step, first_line=state.first_line, evaluated=state.sync.evaluated)
            shutil.rmtree(tmp_path / "batches", ignore_errors=True)
    found = played(tmp_path)
    # The order in which an uninterrupted run hands out tasks: by the seeded buffers and the envs' shares alone.
    first, second = envs()
    expected, counts = [], {"toy": 0.0, "talk": 0.0}
    for _ in range(max(found) + 1):
        env = min((first, second), key=lambda env: counts[env.name] / env.environment.config.weight)
        counts[env.name] += 4
        expected.append((env.name, env.curriculum.next().data.idx))
    assert all(expected[group] == found[group] for group in found)
    if "oversampling_factor" not in options:
        unfinished = {task.group for task in state.dispatcher.in_flight}
        assert set(found) | unfinished == set(range(max(found) + 1)), "no group is lost"
    assert sorted(line["step"] for line in lines) == list(range(steps + 1)), "every step has its line, once"


class Mine(Monitor):
    def __init__(self):
        self.lines = []

    def step(self, line):
        self.lines.append(line)


class Remembers(Filter):
    seen = 0

    def matches(self, rollout):
        self.seen += 1
        return False

    def state_dict(self):
        return self.seen

    def load_state_dict(self, state):
        self.seen = state


async def test_algorithm_filter_and_pools_go_on_as_they_were(start, finished, make_env):
    def env():
        pre = {"remembers": Remembers()}
        return make_env(tasks=9, algorithm=Counts, pre=pre, curriculum={"easy_threshold": 0.5})

    one, two = env(), env()
    state = await finished([one], steps=3, max_async_level=0)
    start([two], state, steps=6, max_async_level=0)
    assert two.algorithm.groups == one.algorithm.groups > 0
    assert two.filters["pre_batch"]["remembers"].seen == one.filters["pre_batch"]["remembers"].seen > 0
    assert two.curriculum.counts() == one.curriculum.counts() and two.curriculum.counts()["easy"] > 0
    assert [two.curriculum.next().data.idx for _ in range(20)] == [one.curriculum.next().data.idx for _ in range(20)]


class Grades(vf.Task):
    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        return self.grade(trace)

    def grade(self, trace):
        return len(trace.last_reply) / 3


ENDS = {  # whose method fails, and what the run says
    "env": (Grades, "grade", "rollouts of env 'toy' failed, more than orchestrator.max_error_share"),
    "algorithm": (Counts, "score_group", "env 'toy', Counts: "),
    "credit over a batch": (Counts, "score_batch", "env 'toy', Counts: "),
    "filter": (Remembers, "matches", "filters.pre_batch.remembers: Remembers.matches failed: "),
    "next task": (TaskCurriculum, "next", "env 'toy', curriculum: TaskCurriculum failed: "),
    "result of a task": (TaskCurriculum, "update", "env 'toy', curriculum: TaskCurriculum failed: "),
    "metrics of a curriculum": (TaskCurriculum, "take_evicted", "env 'toy', curriculum: TaskCurriculum failed: "),
    "monitor": (Mine, "step", "monitor.mine: Mine.step failed: "),
    "engine": (FakePool, "update_weights", "none here"),
    "slow engine": (FakePool, "generate", r"rollouts after 0\.5 s \(orchestrator\.batch_timeout_s\)"),
    "teacher": (FakeFrozen, "prompt_logprobs", "model 'teacher' at http://teacher was not ready"),
    "disk": (NextStep, "record", "none here"),
}


@pytest.mark.parametrize("end", ENDS)
async def test_failed_run_keeps_its_last_step_and_goes_on(start, make_env, frozen, tmp_path, monkeypatch, end):
    def env():
        algorithm, task = (Distils if end == "teacher" else Counts), Grades
        env = make_env(tasks=200, task=task, algorithm=algorithm, pre={"remembers": Remembers()})
        env.algorithm.pools += [frozen] if end == "teacher" else []
        return env

    def fails(*_, **__):
        if end == "teacher":
            frozen.go_away(0.01)
            raise EngineError("gone", 503)
        if end == "slow engine":
            return asyncio.sleep(60)
        raise OSError(28, "none here")

    owner, method, message = ENDS[end]
    lines = []
    monitors = Monitors({"mine": Mine()})
    monitors.start(tmp_path, max_steps=9, run_config={})
    timeout_s = 0.5 if end == "slow engine" else 20.0
    orchestrator, train, _ = start([env()], steps=9, every=None, monitors=monitors, batch_timeout_s=timeout_s)
    original = getattr(owner, method)

    def breaks(*given, **options):
        return (fails if orchestrator.steps.trained > 2 else original)(*given, **options)

    monkeypatch.setattr(owner, method, breaks)
    training = asyncio.create_task(train())
    with pytest.raises((PrlError, OSError), match=message):
        await asyncio.wait_for(orchestrator.run(), 30)
    last = orchestrator.steps.shipped
    assert last > 2 and orchestrator.unsaved
    orchestrator.end()
    await training
    orchestrator.finish()
    assert steps_of(tmp_path) == [last] and not orchestrator.unsaved

    monkeypatch.setattr(owner, method, original)
    frozen.come_back()
    state = read_state(tmp_path, last)
    lines += [line for line in monitors.monitors["mine"].lines if line["step"] < state.first_line]
    cut_back(tmp_path, last, first_line=state.first_line, evaluated=state.sync.evaluated)
    again, train, new = start([env()], state, steps=last + 2)
    async with asyncio.timeout(20):
        await asyncio.gather(again.run(), train())
    found = played(tmp_path)
    in_flight = {group for group in range(max(found) + 1) if group not in found}
    again.finish()
    left = read_state(tmp_path, last + 2)
    assert in_flight <= {task.group for task in left.dispatcher.in_flight} | {g.id for g in left.batcher.groups}
    curriculum = env().curriculum
    order = [curriculum.next().data.idx for _ in range(max(found) + 1)]
    assert all(order[group] == task for group, (_, task) in found.items()), "none is skipped, none comes twice"
    assert [line["step"] for line in lines + new] == list(range(last + 3))


async def test_finished_groups_come_back_as_they_were(start, finished, make_env, tmp_path):
    await finished([make_env(tasks=9)], steps=4, max_async_level=1, batch_size=12)
    state = next(state for step in (1, 2, 3) if (state := read_state(tmp_path, step)).batcher.groups)
    assert decode(encode(state), "here") == state
    again, _, _ = start([make_env(tasks=9)], state, steps=4, max_async_level=1, batch_size=12)
    for saved, group in zip(state.batcher.groups, again.batcher.groups, strict=True):
        assert (saved.id, saved.start_version) == (group.id, group.start_version)
        for kept, rollout in zip(saved.rollouts, group.rollouts, strict=True):
            assert rollout.samples == kept.samples and rollout.advantages == kept.advantages and rollout.is_active
            assert rollout.task.data is group.task.data
            assert [branch.token_ids for branch in rollout.sample_branches] == [s.token_ids for s in rollout.samples]
            assert rollout.reward == pytest.approx(len(rollout.trace.last_reply) / 3)


@pytest.mark.parametrize(("kind", "trains"), [("post", True), ("pre", False), ("odf", True)])
async def test_run_without_signal_resumes_where_it_ended(start, make_env, tmp_path, zero, caplog, kind, trains):
    """`trains`: its first tasks have a signal."""

    def env():
        slots = {} if kind == "odf" else {kind: {"zero": zero()}}
        tasks = {"tasks": 200, "task": Signals if trains else Nothing}
        return make_env(**tasks, curriculum={"shuffle": False, "online_difficulty_filtering": kind == "odf"}, **slots)

    orchestrator, train, _ = start([env()], steps=9, every=None)
    training = asyncio.create_task(train())
    with pytest.raises(NoSignal, match="in a row .* One reply, with reward "):
        await asyncio.wait_for(orchestrator.run(), 30)
    warned = [record.getMessage() for record in caplog.records if "One reply, with reward 0" in record.getMessage()]
    assert warned, "after the first batch, too"
    orchestrator.end()
    await training
    first = orchestrator.steps.shipped
    assert (first > 0) == trains
    orchestrator.finish()
    assert steps_of(tmp_path) == [first]
    before, state = played(tmp_path), read_state(tmp_path, first)
    assert len(before) >= 2 * 10, "what led to it is recorded"
    cut_back(tmp_path, first, first_line=state.first_line, evaluated=state.sync.evaluated)
    again, train, _ = start([env()], state, steps=9, every=None)
    training = asyncio.create_task(train())
    with pytest.raises(NoSignal):
        await asyncio.wait_for(again.run(), 20)
    training.cancel()
    after = played(tmp_path)
    assert before.items() <= after.items() and len(after) >= len(before) + 2 * 9
    tasks = [task for _, task in after.values()]
    waiting = {group.task.data.idx for group in again.batcher.groups}
    assert len(set(tasks)) == len(tasks), "none is played again"
    assert set(range(max(task for _, task in before.values()))) <= {*tasks, *waiting}, "none is skipped"


class Nothing(vf.Task):
    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        return 0.0


class Signals(vf.Task):
    """Of the first six some have a signal; a batch takes two."""

    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        return len(trace.last_reply) / 4 if self.data.idx < 6 else 0.0


@pytest.mark.parametrize("kind", ["curriculum", "tasks"])
async def test_state_that_does_not_fit_is_refused_by_name(start, finished, make_env, kind):
    state = await finished([make_env(tasks=9)], steps=1, max_async_level=0)
    if kind == "curriculum":
        state.components["toy.curriculum"] = b"\x01"
    with pytest.raises(ConfigError, match=r"toy\.curriculum: TaskCurriculum does not take the state"):
        start([make_env(tasks=9 if kind == "curriculum" else 8)], state, steps=2)


def test_component_refusing_its_state_is_named_with_line(make_env, monkeypatch):
    def refuses(*_):
        raise SystemExit(0)

    monkeypatch.setattr(GRPOAlgorithm, "load_state_dict", refuses)
    message = f"toy.algo: GRPOAlgorithm does not take the state .*: SystemExit.*{Path(__file__).name}, line "
    with pytest.raises(ConfigError, match=message):
        load_components([make_env()], {"toy.algo": b"\xc0"})


def test_a_file_that_is_no_state_is_refused():
    with pytest.raises(ConfigError, match="x/run.msgpack does not hold the state of a run"):
        decode(b"\xc1", "x/run.msgpack")
    assert decode(encode(RunState(3)), "x").step == 3


def test_unwritten_last_checkpoint_hides_no_failure(make_orchestrator, make_env, caplog):
    run = make_orchestrator([make_env()], Monitors({}), 4)

    def full():
        raise OSError(28, "No space left on device", "checkpoints/step_000004")

    run.checkpoints.finish = full
    try_to_finish(run)
    assert "no last checkpoint: checkpoints/step_000004 cannot be written: No space left on device" in caplog.text
    with pytest.raises(OSError, match="No space left"):
        run.finish()
