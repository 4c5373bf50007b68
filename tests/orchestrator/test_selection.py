"""Choosing what to learn from, over whole runs: tasks that end, groups that are dropped, rollouts that are too many."""

import asyncio
import json
import math

import pytest
import verifiers.v1 as vf
from patience import patient

from prl.config.schema import CheckpointConfig
from prl.orchestrator.batcher import MAX_EMPTY_BATCHES
from prl.orchestrator.collector import Collector
from prl.orchestrator.config import EvalConfig, StopConfig
from prl.wire.checkpoints import STATE, part_path, verify
from prl.wire.files import FileTransport


class Graded(vf.Task):
    """By its number's remainder by 3: everybody's (0), nobody's (1), or rewarded for the length of the reply."""

    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        kind = self.data.idx % 3
        return 1.0 - kind if kind < 2 else len(trace.last_reply) / 4


class Easy(vf.Task):
    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        return 1.0


class Trainer:
    """Publishes a version for each batch until there is no other, and then writes its part of a checkpoint."""

    def __init__(self, run_dir):
        self.run_dir, self.transport = run_dir, FileTransport(run_dir)
        self.sizes = []

    async def work(self):
        while True:
            step = len(self.sizes) + 1
            while (batch := self.transport.receive_batch(step, 0)) is None:
                if (last := self.transport.receive_end()) is not None and last < step:
                    return self.checkpoint(last)
                await asyncio.sleep(0.001)
            self.sizes.append(sum(len(row.sequence_lengths) for row in batch.micro_batches))
            self.transport.publish(step, {"tokens/trained": 60.0})
            if batch.checkpoint:
                self.checkpoint(step)

    def checkpoint(self, step):
        (part_path(self.run_dir, step) / STATE).mkdir(parents=True)


def was_trained(record):
    return record["outcome"]["stage"] == "trained"


class Result:
    """What a run left behind."""

    def __init__(self, orchestrator, ended_because, trainer, lines):
        self.orchestrator, self.ended_because, self.sizes = orchestrator, ended_because, trainer.sizes
        self.last_step = orchestrator.weight_sync.shipped
        self.every = lines
        self.lines = [line for line in lines if line["step"] > 0]
        self.last_word = lines[-1] if ended_because else None
        self.run_dir = orchestrator.run_dir

    def total(self, key):
        return sum(line.get(key, 0.0) for line in self.every)

    def records(self, step):
        path = self.run_dir / "rollouts" / f"step_{step:06d}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    @property
    def all_records(self):
        paths = sorted((self.run_dir / "rollouts").glob("step_*.jsonl"))
        return [json.loads(line) for path in paths for line in path.read_text().splitlines()]

    def reasons(self):
        return {record["outcome"]["reason"] for record in self.all_records}


@pytest.fixture
def train(make_orchestrator, tmp_path, pool):
    async def run(envs, *, steps=8, checkpoint_every=None, limit=10.0, **knobs):
        knobs = {"eval": EvalConfig(every=None)} | knobs
        lines, trainer = [], Trainer(tmp_path)
        said = []
        monitor = type("Monitor", (), {"step": staticmethod(lines.append), "status": staticmethod(said.append)})
        checkpoint = CheckpointConfig(every=checkpoint_every, keep_last=None)
        orchestrator = make_orchestrator(envs, monitor, steps, checkpoint=checkpoint, **knobs)
        pool.delay = pool.delay or 0.004
        training = asyncio.create_task(trainer.work())
        try:
            async with asyncio.timeout(patient(limit)):
                ended_because = await orchestrator.run()
                if ended_because:
                    await training
        finally:
            training.cancel()
        orchestrator.finish()
        result = Result(orchestrator, ended_because, trainer, lines)
        result.said = said
        return result

    return run


ODF = {"online_difficulty_filtering": True}
POOLS = {"easy_threshold": 1.0, "hard_threshold": 0.0}


# --- online difficulty filtering --------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 1])
async def test_only_groups_with_a_signal_train_and_the_others_are_recorded_and_counted(train, make_env, k):
    run = await train([make_env(task=Graded, buffer=ODF)], steps=6, max_async_level=k)
    assert run.sizes == [8] * 6 and {line["rollouts/batch"] for line in run.lines} == {8.0}
    trained = [record for record in run.all_records if was_trained(record)]
    assert {record["task"] % 3 for record in trained} == {2} and len(trained) == 48
    dropped = [record for record in run.all_records if not was_trained(record)]
    assert {(record["task"] % 3, record["outcome"]["reason"]) for record in dropped} == {
        (0, "online difficulty filtering: mean reward 1"),
        (1, "online difficulty filtering: mean reward 0"),
    }
    assert {record["difficulty_pool"] for record in run.all_records} == {None}
    for kind, remainder in (("easy", 0), ("hard", 1)):
        found = sum(record["task"] % 3 == remainder for record in dropped)
        assert run.total(f"filtered_rollouts/toy/{kind}") == found > 0


async def test_the_numbers_of_a_step_cover_what_was_dropped_and_those_of_its_batch_do_not(train, make_env):
    run = await train([make_env(task=Graded, buffer=ODF)], steps=6, max_async_level=0)
    for line in run.lines:
        records = run.records(int(line["step"]))
        trained = [record["reward"] for record in records if was_trained(record)]
        assert line["reward/all/mean"] == pytest.approx(sum(trained) / 8)
        arrived = sum(record["reward"] for record in records) / len(records)
        assert line["reward/all/arrived"] == line["reward/toy/arrived"] == pytest.approx(arrived)
        assert line["tokens/generated"] == sum(record["completion_tokens"] for record in records)
    assert any(line["reward/all/arrived"] != pytest.approx(line["reward/all/mean"]) for line in run.lines)


# --- pools ------------------------------------------------------------------------------------------------------------


async def test_retired_tasks_are_not_sampled_again(train, make_env):
    run = await train([make_env(task=Graded, tasks=8, buffer=POOLS)], steps=12, max_async_level=0)
    assert run.sizes == [8] * 12 and run.ended_because is None
    for remainder, pool in ((0, "easy"), (1, "hard")):
        records = [record for record in run.all_records if record["task"] % 3 == remainder]
        assert len(records) == 3 * 4, "each of the three tasks once"
        assert {record["difficulty_pool"] for record in records} == {pool}
        assert run.total(f"evicted_examples/toy/{pool}") == 3
    last = run.lines[-1]
    assert [last[f"pool/toy/{pool}"] for pool in ("easy", "normal", "hard")] == [3 / 8, 2 / 8, 3 / 8]
    assert {record["difficulty_pool"] for record in run.all_records if record["task"] % 3 == 2} == {"normal"}


async def test_an_env_that_ends_leaves_the_other_to_train_on(train, make_env, caplog):
    small = make_env("small", task=Easy, tasks=3, weight=3.0, buffer=POOLS)
    run = await train([small, make_env("large", buffer=POOLS)], steps=10, max_async_level=0)
    assert run.sizes == [8] * 10 and run.ended_because is None
    assert caplog.text.count("env small has no task left (3 easy, 0 hard of 3)") == 1
    assert run.lines[-1]["pool/small/easy"] == 1.0 and run.lines[-1]["pool/large/normal"] == 1.0
    envs = [[record["env"] for record in run.records(step)] for step in range(1, 11)]
    assert "small" in envs[0] and set().union(*envs[4:]) == {"large"}


@pytest.mark.parametrize("k", [0, 1, 2])
async def test_when_every_env_has_ended_what_is_there_is_trained_and_the_run_ends(train, make_env, caplog, k):
    """Everything is retired at first sight."""
    buffer = {"easy_threshold": 0.0}
    run = await train([make_env(name, tasks=5, buffer=buffer) for name in "ab"], steps=50, max_async_level=k)
    assert len(run.sizes) == run.last_step == run.orchestrator.pool.version == len(run.lines) < 12
    assert sum(run.sizes) == len(run.all_records) >= 40 and all(was_trained(record) for record in run.all_records)
    assert run.sizes[:-1] == [8] * (len(run.sizes) - 1)
    assert {(record["env"], record["task"]) for record in run.all_records} == {(e, i) for e in "ab" for i in range(5)}
    assert run.ended_because == "every env has run out of tasks (a: 5 easy, 0 hard of 5, b: 5 easy, 0 hard of 5)"
    assert f"the run ends after step {len(run.sizes)} of 50: every env has run out of tasks" in caplog.text
    assert max(line["off_policy/max"] for line in run.lines) <= k
    assert run.last_word["step"] == len(run.sizes) and run.last_word["pool/a/easy"] == 1.0


@pytest.mark.parametrize("k", [0, 1])
async def test_the_last_batch_is_as_large_as_what_is_left(train, make_env, k):
    """Of three tasks one has a signal; all go the first time they are seen."""
    buffer = {"easy_threshold": 0.1, "hard_threshold": 0.0, **ODF}
    run = await train([make_env(task=Graded, tasks=3, buffer=buffer)], batch_size=32, max_async_level=k)
    (size,) = run.sizes
    assert 4 <= size < 32 and size % 4 == 0 and run.last_step == 1
    assert {record["task"] for record in run.all_records if was_trained(record)} == {2}
    assert run.total("tokens/generated") == sum(record["completion_tokens"] for record in run.all_records)


@pytest.mark.parametrize("k", [0, 1])
async def test_a_run_of_which_nothing_can_be_trained_has_no_step_and_still_ends_in_order(train, make_env, k):
    """More of it than ten batches, and yet no error: it has an end."""
    tasks = 4 * MAX_EMPTY_BATCHES
    env = make_env(task=Easy, tasks=tasks, held_out=2, buffer=POOLS | ODF)
    run = await train([env], max_async_level=k, eval=EvalConfig(every=5))
    assert (run.sizes, run.lines, run.last_step) == ([], [], 0)
    assert run.last_word["step"] == 0 and run.last_word["filtered_rollouts/toy/easy"] >= 4 * tasks
    assert "eval/toy/avg@1" not in run.last_word, "version 0 has been evaluated"
    assert {path.name for path in (run.run_dir / "checkpoints").iterdir()} == {"step_000000"}
    assert len(run.records(0)) == run.last_word["filtered_rollouts/toy/easy"]


class AtFirst(vf.Task):
    """The first four have a signal, what follows has none."""

    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        return len(trace.last_reply) / 4 if self.data.idx < 4 else 1.0


@pytest.mark.parametrize(("tasks", "late"), [(4, False), (6, True)])
async def test_the_last_version_is_evaluated_once_whether_or_not_it_was_known_to_be_the_last(
    train, make_env, tasks, late
):
    """`late`: two groups that are dropped come in when the version that turns out to be the last is loaded already."""
    buffer = {"easy_threshold": 0.1, "shuffle": False, **ODF}
    env = make_env(task=AtFirst, tasks=tasks, held_out=2, buffer=buffer)
    run = await train([env], max_async_level=0, eval=EvalConfig(every=5))
    assert run.sizes == [8, 8] and run.last_step == 2
    evaluated = [line["step"] for line in run.lines if "eval/toy/avg@1" in line]
    assert evaluated == [2] and "eval/toy/avg@1" in run.last_word
    assert [line["step"] for line in run.lines] == [1, 2, 2] if late else [1, 2], "late: its line was out already"


async def test_a_last_batch_without_a_signal_is_not_shipped(train, make_env, zero):
    env = make_env(task=Easy, tasks=3, buffer=POOLS, post={"zero_advantage": zero()})
    run = await train([env], batch_size=64)
    assert run.sizes == [] and run.last_step == 0
    assert run.reasons() == {"filter zero_advantage"}


@pytest.mark.parametrize("k", [0, 1])
async def test_with_refill_a_run_has_its_full_length(train, make_env, caplog, k):
    caplog.set_level("INFO")
    buffer = {"easy_threshold": 0.0, "refill": True}
    run = await train([make_env(tasks=3, buffer=buffer)], steps=9, max_async_level=k)
    assert run.sizes == [8] * 9 and run.ended_because is None
    assert "no normal task left (3 easy, 0 hard of 3); all are sampled again" in caplog.text


@pytest.mark.parametrize("k", [0, 1])
async def test_pools_are_saved_with_each_checkpoint_and_with_the_last(train, make_env, k):
    env = make_env(task=Graded, tasks=9, buffer=POOLS)
    run = await train([env, make_env("plain")], steps=7, checkpoint_every=3, max_async_level=k)
    folders = sorted((run.run_dir / "checkpoints").iterdir())
    assert [folder.name for folder in folders] == ["step_000003", "step_000006"]
    sizes = []
    for folder in folders:
        assert verify(folder) == int(folder.name[-6:])
        files = {path.name for path in folder.iterdir() if path.is_file()}
        assert files == {"easy_examples.jsonl", "hard_examples.jsonl", "manifest.json"}
        easy, hard = (
            [json.loads(line) for line in (folder / f"{name}_examples.jsonl").open()] for name in ("easy", "hard")
        )
        assert {entry["task"]["idx"] % 3 for entry in easy} <= {0} and {entry["task"]["idx"] % 3 for entry in hard} <= {
            1
        }
        assert {entry["env"] for entry in easy + hard} == {"toy"}
        sizes.append(len(easy) + len(hard))
    assert 0 < sizes[0] <= sizes[1] <= 6


async def test_without_pools_a_checkpoint_is_the_trainers_alone(train, make_env):
    run = await train([make_env(buffer=ODF)], steps=3, checkpoint_every=1)
    folders = list((run.run_dir / "checkpoints").iterdir())
    assert folders and not [path for folder in folders for path in folder.glob("*.jsonl")]


# --- oversampling -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 1])
@pytest.mark.parametrize(("factor", "most"), [(1.0, 8), (1.5, 12), (2.0, 16)])
async def test_so_many_times_the_rollouts_are_under_way(train, make_env, monkeypatch, k, factor, most):
    seen = []
    start = Collector.fill

    def fill(self):
        filled = start(self)
        seen.append(self.dispatcher.rollouts_in_flight + self.batcher.rollouts)
        return filled

    monkeypatch.setattr(Collector, "fill", fill)
    run = await train([make_env()], steps=6, max_async_level=k, max_off_policy_steps=k, oversampling_factor=factor)
    assert max(seen) == most * (k + 1) and run.sizes == [8] * 6


@pytest.mark.parametrize("k", [0, 1])
async def test_what_is_too_many_and_too_old_is_discarded_and_batches_stay_as_large_as_they_are(train, make_env, k):
    run = await train([make_env()], steps=10, max_async_level=k, max_off_policy_steps=k, oversampling_factor=1.5)
    assert run.sizes == [8] * 10 and {line["rollouts/batch"] for line in run.lines} == {8.0}
    assert max(line["off_policy/max"] for line in run.lines) <= k
    assert run.total("rollouts/surplus") > 0 and run.total("off_policy/dropped") == 0
    recorded = [record for record in run.all_records if not was_trained(record)]
    assert {record["outcome"]["reason"] for record in recorded} <= {
        "the batch was full (orchestrator.oversampling_factor)"
    }
    assert len(recorded) <= run.total("rollouts/surplus"), "what was cancelled on the way has no record"
    for line in run.lines:
        for record in run.records(int(line["step"])):
            assert not was_trained(record) or record["start_version"] >= line["step"] - 1 - k
    assert not run.orchestrator.batcher.groups and not run.orchestrator.dispatcher.in_flight


async def test_a_finished_group_that_a_full_batch_has_no_place_for_is_recorded_with_that_step(train, make_env, pool):
    pool.delay_of = lambda n: 0.0  # three groups for a batch of two, which finish together whatever else the CPU does
    run = await train([make_env()], steps=3, max_async_level=0, oversampling_factor=1.5)
    assert [len(run.records(step)) for step in (1, 2, 3)] == [12] * 3
    assert [line["rollouts/surplus"] for line in run.lines] == [4.0] * 3
    assert run.total("tokens/generated") == sum(record["completion_tokens"] for record in run.all_records)


@pytest.mark.parametrize(("factor", "waits"), [(1.0, True), (1.5, False)])
async def test_a_straggler_is_waited_for_only_where_nothing_can_take_its_place(train, make_env, pool, factor, waits):
    straggler_s = 0.6 if waits else 60.0
    pool.delay_of = lambda n: straggler_s if pool.requests == 1 else 0.002
    started = asyncio.get_running_loop().time()
    run = await train([make_env(timeout_s=90.0)], steps=3, max_async_level=0, oversampling_factor=factor)
    took = asyncio.get_running_loop().time() - started
    assert (straggler_s > took) is not waits and run.sizes == [8] * 3
    assert ("rollouts/surplus" in run.lines[0]) is not waits


@pytest.mark.parametrize("k", [0, 1, 2])
async def test_a_run_that_is_good_enough_trains_what_was_shipped_and_ends(train, make_env, k):
    env = make_env(held_out=2)
    run = await train([env], steps=30, max_async_level=k, eval=EvalConfig(every=2), stop=StopConfig(target=-math.inf))
    assert run.last_step == 0 and run.sizes == []  # the base model is good enough
    assert run.ended_because.startswith("version 0 has a held-out reward of ")
    assert run.said == [f"the run ends after step 0 of 30: {run.ended_because}"]
    (line,) = run.every
    assert line["step"] == 0 and "eval/toy/avg@1" in line


@pytest.mark.parametrize("k", [0, 1, 2])
async def test_a_run_that_no_longer_improves_ends(train, make_env, caplog, k):
    caplog.set_level("WARNING")  # whatever a test before has made it
    run = await train(
        [make_env(held_out=2, buffer=ODF)],
        steps=30,
        max_async_level=k,
        eval=EvalConfig(every=2),
        stop=StopConfig(patience=2),
    )
    assert 4 <= run.last_step == len(run.sizes) == len(run.lines) == run.orchestrator.pool.version < 30
    assert "2 evaluations in a row had no better held-out reward" in run.ended_because
    assert run.said == [f"the run ends after step {run.last_step} of 30: {run.ended_because}"]
    assert not caplog.records, "the user has asked for it"
    assert [line["step"] for line in run.every] == [*range(run.last_step + 1)], "a line a step"
    assert {"loss/mean", "reward/all/mean", "time/step"} & {*run.last_word} and run.last_word == run.lines[-1]
    assert run.total("tokens/generated") == sum(record["completion_tokens"] for record in run.all_records)
    assert all(record["outcome"] for record in run.all_records)
    surplus = [record for record in run.all_records if record["outcome"]["stage"] == "surplus"]
    assert {record["outcome"]["reason"] for record in surplus} <= {"the run ended early (orchestrator.stop)"}
    assert any(key.startswith("eval/") for key in {**run.lines[-1], **run.last_word})  # the last version is evaluated
