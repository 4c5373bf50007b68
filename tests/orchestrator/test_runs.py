"""Whole runs, with a pool that answers after random delays and a trainer that only announces."""

import asyncio
import json
import math
import time
from itertools import pairwise

import pytest
import verifiers.v1 as vf
from patience import patient

from prl.algorithms.base import Algorithm
from prl.algorithms.grpo import GRPOAlgorithm
from prl.algorithms.reward import RewardAlgorithm
from prl.base.checkpoint_folders import verify
from prl.base.errors import PrlError
from prl.config.orchestrator import EvalConfig, StopConfig
from prl.curriculum.pools import TaskCurriculum
from prl.filters.base import Filter
from prl.orchestrator.batcher import MAX_EMPTY_BATCHES
from prl.tools.report.shares import read_spans, union, within
from prl.transport.events import CUTTING, PACKING, RECORDING, SHIPPING, Track

ODF = {"online_difficulty_filtering": True}
POOLS = {"easy_threshold": 1.0, "hard_threshold": 0.0}


class Flat(vf.Task):
    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        return 0.1


class Easy(vf.Task):
    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        return 1.0


class Graded(vf.Task):
    """By its number's remainder by 3: always right (0), never (1), or rewarded for the length of the reply."""

    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        kind = self.data.idx % 3
        return 1.0 - kind if kind < 2 else len(trace.last_reply) / 4


@pytest.mark.parametrize("k", [0, 2])
async def test_every_step_has_its_batch_line_and_records(train, make_env, k):
    run = await train([make_env()], steps=10, max_async_level=k, max_off_policy_steps=k)
    assert [line["step"] for line in run.all_lines] == list(range(11)), "once and in order"
    assert run.sizes == [8] * 10 and run.orchestrator.weight_sync.pool.version == 10
    assert {(line["rollouts/batch"], line["rollouts/trained"], line["loss/mean"]) for line in run.lines} == {
        (8, 8, 0.1)
    }
    assert max(line["off_policy/max"] for line in run.lines) <= k and run.total("off_policy/dropped") == 0
    groups = [(record["group"], record["task"]) for record in run.trained()]
    assert len(groups) == 80 and len(set(groups)) == 20, "a group trains in one step only"
    for step in range(1, 11):
        for record in run.records(step):
            assert step - 1 - k <= record["start_version"] <= record["end_version"] <= step - 1


@pytest.mark.parametrize("keep", [False, True])
async def test_batches_are_kept_if_asked_and_old_weights_never(train, make_env, tmp_path, keep):
    await train([make_env()], steps=3, keep_batches=keep)
    batches = sorted(path.name for path in (tmp_path / "batches").iterdir())
    assert batches == [f"step_00000{step}" for step in (1, 2, 3) if keep]
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["step_000003"]


async def test_spans_are_recorded_and_give_the_idle_share(train, make_env, pool, tmp_path):
    track = Track("orchestrator", tmp_path)
    pool.traffic.record(track)
    options = {"track": track, "eval": EvalConfig(every=2), "max_async_level": 0}
    run = await train([make_env()], steps=4, delay=0.02, **options)
    track.close()
    problems = []
    spans = read_spans(tmp_path, problems)
    assert not problems and {span.process for span in spans} == {"orchestrator", "engine", "evaluation"}
    own = [span for span in spans if span.process == "orchestrator"]
    assert all(before.stop <= after.start for before, after in pairwise(own))
    kinds = (CUTTING, RECORDING, PACKING, SHIPPING)
    work = [(span.step, span.what) for span in own if span.what in kinds]
    assert work == [(step, what) for step in range(1, 5) for what in kinds]
    assert [span.step for span in spans if span.what == "evaluating"] == [0, 2, 4]
    assert [span.step for span in spans if span.what == "loading weights"] == [1, 2, 3, 4]
    wall = sum(line["time/step"] for line in run.lines)
    busy = sum((1 - line["idle/engine"]) * line["time/step"] for line in run.lines)
    began = min(span.start for span in own if span.step == 1)
    requests = union([(span.start, span.stop) for span in spans if span.process == "engine"])
    assert busy == pytest.approx(sum(within(*each, began, began + wall) for each in requests), abs=0.02)


# --- deadlines and failures -------------------------------------------------------------------------------------------


DEADLINES = [  # seconds that the engine takes over a request, by its number; when the trainer stops; the message
    (None, 2, {"policy_timeout_s": 0.2}, r"step 3: no policy newer than version 2 .* 0\.2 s \(orchestrator\.policy"),
    (None, 3, {"policy_timeout_s": 0.2}, "step 4: no policy newer than version 3 "),  # after the last batch
    # A straggler plays: with the rest of six groups both steps that a rollout of version 0 is meant for were shipped.
    (
        lambda request: 60.0 if request == 1 else 0.002,
        0,
        {"oversampling_factor": 1.5, "policy_timeout_s": 0.2},
        "step 3: no policy newer than version 0 ",
    ),
    (lambda _: 1e6, 9, {"batch_timeout_s": 0.2}, r"step 1: 0 rollouts after 0\.2 s \(orchestrator\.batch.*of env toy"),
]


@pytest.mark.parametrize(("takes_s", "stop_after", "options", "message"), DEADLINES)
async def test_who_is_late_ends_the_run_at_the_deadline(train, make_env, pool, takes_s, stop_after, options, message):
    if takes_s is not None:
        pool.delay_of = lambda n: takes_s(len(pool.requests))
    with pytest.raises(PrlError, match=message):
        await train([make_env(timeout_s=1e6)], steps=4, stop_after=stop_after, **options)


async def test_rollouts_may_take_longer_than_the_policy_timeout(train, make_env, pool):
    pool.delay = patient(0.4)
    run = await train([make_env()], steps=2, max_async_level=0, policy_timeout_s=patient(0.3))
    assert len(run.sizes) == 2


async def test_long_evaluation_counts_against_no_deadline(make_env, train, monkeypatch):
    async def slow(envs, config, run_dir, version):
        await asyncio.sleep(patient(0.8))
        return {"eval/toy/avg@1": 0.0}

    monkeypatch.setattr("prl.orchestrator.evaluate.evaluate", slow)
    deadlines = {"policy_timeout_s": patient(0.4), "batch_timeout_s": patient(0.4)}
    run = await train([make_env(held_out=2)], steps=2, eval=EvalConfig(every=1), **deadlines)
    assert [line["step"] for line in run.all_lines] == [0, 1, 2]


async def test_frozen_model_that_is_away_counts_against_no_deadline(train, make_imitating, frozen, pool, monkeypatch):
    limit_s, update = patient(0.3), pool.update_weights

    async def update_and_leave(version, *args):
        await update(version, *args)
        if version == 2:
            frozen.go_away()
            asyncio.get_running_loop().call_later(2 * limit_s, frozen.come_back)

    monkeypatch.setattr(pool, "update_weights", update_and_leave)
    started = time.monotonic()
    run = await train([make_imitating(frozen)], steps=5, batch_timeout_s=limit_s, policy_timeout_s=limit_s)
    assert len(run.sizes) == 5 and time.monotonic() - started > 1.75 * limit_s


# --- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("filtered", "options", "reason"),
    [(True, {}, "filter zero"), (False, {"seq_len": 2}, "nothing of it within trainer.seq_len feeds a loss")],
)
async def test_ten_empty_batches_in_a_row_end_the_run(train, make_env, zero, tmp_path, filtered, options, reason):
    env = make_env(task=Flat, post={"zero": zero()}) if filtered else make_env()
    with pytest.raises(PrlError, match=f"{MAX_EMPTY_BATCHES} batches in a row.*{reason}: 8"):
        await train([env], **options)
    records = [json.loads(line) for line in (tmp_path / "rollouts" / "step_000001.jsonl").read_text().splitlines()]
    assert len(records) == 8 * MAX_EMPTY_BATCHES and {record["outcome"]["reason"] for record in records} == {reason}
    assert not (tmp_path / "batches").exists()


class AfterTheFirst(Filter):
    """Matches what would be two batches of eight, after the first one."""

    seen = 0

    def matches(self, rollout):
        self.seen += 1
        return 8 < self.seen <= 24


async def test_rollouts_of_empty_batches_count_in_the_next_line(train, make_env):
    env = make_env(post={"first": AfterTheFirst(enforce=True)})
    run = await train([env], steps=3, max_async_level=0)
    assert [line["rollouts/batch"] for line in run.lines] == [8.0, 24.0, 8.0]
    assert [line["rollouts/filtered"] for line in run.lines] == [0.0, 16.0, 0.0]
    assert [line["rollouts/trained"] for line in run.lines] == [8.0] * 3
    assert run.lines[1]["filters/all/first"] == run.lines[1]["filters/toy/is_filtered"] == pytest.approx(16 / 24)
    assert [len(run.trained(step)) for step in (1, 2, 3)] == [8] * 3


async def test_pre_filtered_rollouts_take_no_place_in_batch(train, make_env, zero):
    envs = [make_env("toy", pre={"zero": zero()}), make_env("flat", task=Flat, pre={"zero": zero()})]
    run = await train(envs, steps=4)
    assert {(line["rollouts/batch"], line["rollouts/trained"]) for line in run.lines} == {(8.0, 8.0)}
    assert {record["env"] for record in run.trained()} == {"toy"} and len(run.trained()) == 32
    assert all(record["matched"] == {"pre_batch": "zero"} for record in run.untrained())
    for step, line in enumerate(run.lines, 1):
        records, dropped = run.records(step), run.untrained(step)
        assert line["reward/all/mean"] == pytest.approx(sum(record["reward"] for record in records) / len(records))
        assert line["pre_filters/all/zero"] == pytest.approx(len(dropped) / len(records))


class Everything(Filter):
    def matches(self, rollout):
        return True


async def test_evaluation_is_never_filtered(train, make_env, tmp_path):
    env = make_env(held_out=3, pre={"a": Everything()}, post={"b": Everything()})
    run = await train([env], steps=1, eval=EvalConfig(every=1, num_tasks=3))
    assert all(record["matched"] == {"pre_batch": "a", "post_batch": "b"} for record in run.records(1))
    lines = (tmp_path / "rollouts" / "eval_toy_step_000001.jsonl").read_text().splitlines()
    assert [(json.loads(line)["matched"], json.loads(line)["outcome"]) for line in lines] == [({}, None)] * 3


async def test_algorithm_sees_each_batch_and_credits_it_before_filters(train, make_env, zero):
    class ByBatch(Algorithm):
        scored, observed, steps = [], [], []

        def score_batch(self, groups):
            self.steps.append((self.step, self.max_steps))
            self.scored.append(sum(len(group) for group in groups))
            for rollout in [rollout for group in groups for rollout in group]:
                rollout.assign_advantages((7.0 + self.scored[-1]) * (rollout.index > 0))

        def observe_batch(self, rollouts):
            self.observed.append([rollout.stage for rollout in rollouts])

    run = await train([make_env(algorithm=ByBatch, post={"zero": zero()})], steps=2)
    assert ByBatch.steps == [(1, 2), (2, 2)]
    assert ByBatch.scored == [8, 8] and ByBatch.observed == [["post_filtered", *["trained"] * 3] * 2] * 2
    assert {credit for rows in run.rows for row in rows for credit in row.advantages} == {0.0, 15.0}


@pytest.mark.parametrize(("algorithm", "size"), [(GRPOAlgorithm, 4), (RewardAlgorithm, 1)])
async def test_algorithm_and_curriculum_see_each_group_once_it_is_credited(
    train, make_env, monkeypatch, algorithm, size
):
    """Whether filters drop it or not; rollouts that enter batches one by one are seen one by one."""
    seen = {algorithm: [], TaskCurriculum: []}
    for cls, groups in seen.items():
        monkeypatch.setattr(cls, "observe", lambda _, group, groups=groups: groups.append(list(group)))
    await train([make_env(algorithm=algorithm, pre={"all": Everything()})], steps=1, oversampling_factor=1.0)
    assert seen[algorithm] == seen[TaskCurriculum] != []
    assert {len(group) for group in seen[algorithm]} == {size}
    assert all(rollout.advantages is not None for group in seen[algorithm] for rollout in group)


async def test_frozen_models_rollouts_have_no_version_logprob_or_age(train, make_imitating, frozen):
    frozen.delay = 0.03  # far longer than a step takes
    run = await train([make_imitating(frozen)], steps=6, max_off_policy_steps=1, delay=0.001)
    ages = {(line["off_policy/mean"], line["off_policy/max"], line["off_policy/dropped"]) for line in run.lines}
    assert ages == {(0.0, 0.0, 0.0)} and len(run.trained()) == 48
    assert {(record["start_version"], record["end_version"]) for record in run.records()} == {(None, None)}
    for row in [row for rows in run.rows for row in rows]:
        assert not any(row.logprobs) and any(row.ce_weights) and row.advantages is None


# --- curriculum -------------------------------------------------------------------------------------------------------


async def test_retired_tasks_are_not_sampled_again(train, make_env):
    run = await train([make_env(task=Graded, tasks=8, curriculum=POOLS)], steps=12, max_async_level=0)
    assert run.sizes == [8] * 12 and run.ended_because is None
    for remainder, pool in ((0, "easy"), (1, "hard")):
        records = [record for record in run.records() if record["task"] % 3 == remainder]
        assert len(records) == 3 * 4, "each of the three tasks once"
        assert {record["difficulty_pool"] for record in records} == {pool}
        assert run.total(f"evicted_examples/toy/{pool}") == 3
    assert [run.lines[-1][f"pool/toy/{pool}"] for pool in ("easy", "normal", "hard")] == [3 / 8, 2 / 8, 3 / 8]


async def test_curriculum_knows_step_version_and_evaluation(train, make_env):
    env, seen = make_env(held_out=2), []
    env.curriculum.weight = lambda context: seen.append(context) or 1.0
    run = await train([env], steps=5, max_async_level=0, eval=EvalConfig(every=2))
    rewards = {line["step"]: line["eval/toy/avg@1"] for line in run.all_lines if "eval/toy/avg@1" in line}
    assert {(context.step, context.version) for context in seen} == {(step, step - 1) for step in range(1, 6)}
    expected = [rewards[2 * ((context.step - 1) // 2)] for context in seen]
    assert [context.evaluation["eval/toy/avg@1"] for context in seen] == expected


async def test_env_without_weight_is_evaluated_and_never_trained_on(train, make_env):
    envs = [make_env("kept", held_out=2, weight=0.0), make_env("learnt", held_out=2)]
    run = await train(envs, steps=4, eval=EvalConfig(every=2))
    assert run.sizes == [8] * 4 and {record["env"] for record in run.records()} == {"learnt"}
    for name in ("kept", "learnt"):
        assert [line["step"] for line in run.all_lines if f"eval/{name}/avg@1" in line] == [0, 2, 4]


async def test_env_that_ends_leaves_the_other_to_train_on(train, make_env, caplog):
    small = make_env("small", task=Easy, tasks=3, weight=3.0, curriculum=POOLS)
    run = await train([small, make_env("large", curriculum=POOLS)], steps=10, max_async_level=0)
    assert run.sizes == [8] * 10 and run.ended_because is None
    assert caplog.text.count("env small has no task left (3 easy, 0 hard of 3)") == 1
    envs = [{record["env"] for record in run.records(step)} for step in range(1, 11)]
    assert "small" in envs[0] and set().union(*envs[4:]) == {"large"}


@pytest.mark.parametrize("k", [0, 2])
async def test_run_ends_in_order_when_every_env_has_ended(train, make_env, k):
    """Everything is retired at first sight."""
    envs = [make_env(name, tasks=5, curriculum={"easy_threshold": 0.0}) for name in "ab"]
    run = await train(envs, steps=50, max_async_level=k)
    assert len(run.sizes) == run.orchestrator.steps.shipped == len(run.lines) < 12
    assert sum(run.sizes) == len(run.trained()) == len(run.records()) >= 40
    assert run.sizes[:-1] == [8] * (len(run.sizes) - 1)
    assert {(record["env"], record["task"]) for record in run.records()} == {(e, i) for e in "ab" for i in range(5)}
    assert run.ended_because == "every env has run out of tasks (a: 5 easy, 0 hard of 5, b: 5 easy, 0 hard of 5)"
    assert run.lines[-1]["step"] == len(run.sizes) and run.lines[-1]["pool/a/easy"] == 1.0


@pytest.mark.parametrize("k", [0, 1])
async def test_last_batch_is_as_large_as_what_is_left(train, make_env, k):
    """Of three tasks one has a signal; all are retired the first time they are seen."""
    curriculum = {"easy_threshold": 0.1, "hard_threshold": 0.0, **ODF}
    run = await train([make_env(task=Graded, tasks=3, curriculum=curriculum)], batch_size=32, max_async_level=k)
    (size,) = run.sizes
    assert 4 <= size < 32 and size % 4 == 0 and {record["task"] for record in run.trained()} == {2}
    assert run.total("tokens/generated") == sum(record["completion_tokens"] for record in run.records())


async def test_run_of_which_nothing_trains_ends_without_a_step(train, make_env):
    """More of it than ten batches, and yet no error: it has an end."""
    tasks = 4 * MAX_EMPTY_BATCHES
    run = await train([make_env(task=Easy, tasks=tasks, held_out=2, curriculum=POOLS | ODF)], eval=EvalConfig(every=5))
    assert (run.sizes, run.lines) == ([], [])
    last = run.all_lines[-1]
    assert last["step"] == 0 and last["filtered_rollouts/toy/easy"] == len(run.records(0)) >= 4 * tasks
    assert "eval/toy/avg@1" not in last, "version 0 has been evaluated"
    assert {path.name for path in (run.run_dir / "checkpoints").iterdir()} == {"step_000000"}


class AtFirst(vf.Task):
    """The first four have a signal, what follows has none."""

    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        return len(trace.last_reply) / 4 if self.data.idx < 4 else 1.0


@pytest.mark.parametrize(("tasks", "steps"), [(4, [1, 2]), (6, [1, 2, 2])])
async def test_last_version_is_evaluated_once(train, make_env, tasks, steps):
    """With six tasks it is known to be the last only after its line was written."""
    curriculum = {"easy_threshold": 0.1, "shuffle": False, **ODF}
    env = make_env(task=AtFirst, tasks=tasks, held_out=2, curriculum=curriculum)
    run = await train([env], max_async_level=0, eval=EvalConfig(every=5))
    assert run.sizes == [8, 8] and [line["step"] for line in run.lines] == steps
    assert ["eval/toy/avg@1" in line for line in run.lines] == [False] * (len(steps) - 1) + [True]


async def test_pools_are_saved_with_each_checkpoint(train, make_env):
    env = make_env(task=Graded, tasks=9, curriculum=POOLS)
    run = await train([env, make_env("plain")], steps=7, every=3)
    folders = sorted((run.run_dir / "checkpoints").iterdir())
    assert [folder.name for folder in folders] == ["step_000003", "step_000006"]
    for folder in folders:
        assert verify(folder) == int(folder.name[-6:])
        for remainder, pool in enumerate(("easy", "hard")):
            entries = [json.loads(line) for line in (folder / f"{pool}_examples.jsonl").open()]
            assert {(entry["env"], entry["task"]["idx"] % 3) for entry in entries} <= {("toy", remainder)}
            assert folder is folders[0] or entries


async def test_surplus_is_recorded_with_its_step(train, make_env, pool):
    pool.delay_of = lambda n: 0.0  # three groups for a batch of two, which finish together whatever else the CPU does
    run = await train([make_env()], steps=3, max_async_level=0, oversampling_factor=1.5)
    assert [len(run.records(step)) for step in (1, 2, 3)] == [12] * 3
    assert [line["rollouts/surplus"] for line in run.lines] == [4.0] * 3


# --- early stopping ---------------------------------------------------------------------------------------------------


async def test_run_whose_base_model_is_good_enough_trains_nothing(train, make_env):
    run = await train([make_env(held_out=2)], eval=EvalConfig(every=2), stop=StopConfig(target=-math.inf))
    assert run.sizes == [] and run.ended_because.startswith("version 0 has a held-out reward of ")
    assert run.messages == [f"the run ends after step 0 of 8: {run.ended_because}"]
    (line,) = run.all_lines
    assert line["step"] == 0 and "eval/toy/avg@1" in line


@pytest.mark.parametrize("k", [0, 2])
async def test_run_that_no_longer_improves_ends_in_order(train, make_env, k):
    env = make_env(held_out=2, curriculum=ODF)
    run = await train([env], steps=30, max_async_level=k, eval=EvalConfig(every=2), stop=StopConfig(patience=2))
    last = run.orchestrator.steps.shipped
    assert 4 <= last == len(run.sizes) == run.orchestrator.weight_sync.pool.version < 30
    assert "2 evaluations in a row had no better held-out reward" in run.ended_because
    assert [line["step"] for line in run.all_lines] == [*range(last + 1)], "a line a step"
    assert {"loss/mean", "reward/all/mean", "time/step", "eval/toy/avg@1"} <= {*run.lines[-1]}
    assert run.total("tokens/generated") == sum(record["completion_tokens"] for record in run.records())
    surplus = [record for record in run.records() if record["outcome"]["stage"] == "surplus"]
    assert {record["outcome"]["reason"] for record in surplus} <= {"the run ended early (orchestrator.stop)"}
