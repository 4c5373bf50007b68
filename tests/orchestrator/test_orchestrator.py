"""The asynchronous rules, with a pool that answers after random delays and a trainer that only announces."""

import asyncio
import json
import math
import random
import shutil
import time
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace

import pytest
import verifiers.v1 as vf
from patience import patient

from prl.config.model_reference import FrozenModelConfig
from prl.config.schema import ModelConfig
from prl.errors import EngineError, PrlError
from prl.inference.frozen import FrozenPool
from prl.models import model_path
from prl.orchestrator.algo.base import Algorithm
from prl.orchestrator.batcher import MAX_EMPTY_BATCHES
from prl.orchestrator.config import EvalConfig
from prl.orchestrator.filters.base import Filter
from prl.orchestrator.intake import LEAST
from prl.orchestrator.orchestrator import Orchestrator
from prl.report.shares import read_spans, union, within
from prl.wire.events import OWN_WORK, Lane
from prl.wire.files import FileTransport


class FakeMonitor:
    """Keeps the lines."""

    def __init__(self):
        self.lines = []

    def step(self, line):
        self.lines.append(line)


class FakeTrainer:
    """Receives each batch, takes its time, and publishes the next policy version."""

    def __init__(self, transport, *, delay=0.0, stop_after=10**9, ranks=1, seed=0):
        self.transport, self.delay, self.stop_after, self.ranks = transport, delay, stop_after, ranks
        self.random = random.Random(seed)
        self.batches = []

    async def work(self):
        for step in range(1, self.stop_after + 1):
            while (batch := self.transport.receive_batch(step, self.ranks - 1)) is None:
                await asyncio.sleep(0.001)
            self.batches.append([self.transport.receive_batch(step, rank) for rank in range(self.ranks)])
            assert batch.step == step
            await asyncio.sleep(self.delay * self.random.random())
            self.transport.publish(step, {"loss/mean": 0.1, "tokens/trained": 60.0})
        await asyncio.Event().wait()


class Flat(vf.Task):
    """Every reply earns the same."""

    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        return 0.1


class Ungradable(vf.Task):
    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        raise RuntimeError("no grade for anyone")


@pytest.fixture
def transport(tmp_path):
    return FileTransport(tmp_path)


@pytest.fixture
def train(tmp_path, pool, transport):
    """Run `steps` steps to the end; gives back the orchestrator, the trainer and the lines."""

    async def run(envs, *, steps=8, trainer=None, delay=0.004, ranks=1, limit=10.0, seq_len=64, lane=None, **knobs):
        knobs = {"batch_size": 8, "group_size": 4, "eval": EvalConfig(every=None)} | knobs
        monitor = FakeMonitor()
        orchestrator = Orchestrator(
            envs=envs,
            pool=pool,
            transport=transport,
            monitors=monitor,
            run_dir=tmp_path,
            model=ModelConfig(path=model_path("tiny")),
            max_steps=steps,
            seq_len=seq_len,
            trainer_ranks=ranks,
            update_timeout_s=5.0,
            lane=lane,
            **knobs,
        )
        if lane is not None:
            pool.traffic.record(lane)
        trainer = trainer or FakeTrainer(transport, delay=delay, ranks=ranks)
        pool.delay = pool.delay or delay
        training = asyncio.create_task(trainer.work())
        try:
            async with asyncio.timeout(patient(limit)):
                await orchestrator.run()
        finally:
            if training.done():
                training.result()
            training.cancel()
        return orchestrator, trainer, monitor.lines

    return run


def was_trained(record):
    return record["outcome"] is not None and record["outcome"]["stage"] == "trained"


def records(run_dir, step):
    return [json.loads(line) for line in (run_dir / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("slow", ["trainer", "sampler", "neither"])
@pytest.mark.parametrize("k", [0, 1, 2])
async def test_where_the_limit_is_the_async_level_no_rollout_is_older(train, make_env, pool, tmp_path, k, slow):
    pool.delay = 0.02 if slow == "sampler" else 0.003
    _, trainer, lines = await train(
        [make_env()], steps=10, max_async_level=k, max_off_policy_steps=k, delay=0.02 if slow == "trainer" else 0.003
    )
    assert [line["step"] for line in lines] == list(range(11)), "every step has its line, once and in order"
    assert max(line["off_policy/max"] for line in lines[1:]) <= k
    assert len(trainer.batches) == 10 and pool.version == 10
    assert {line["rollouts/batch"] for line in lines[1:]} == {8.0}
    assert sum(line["off_policy/dropped"] for line in lines[1:]) == 0
    tasks = [(r["group"], r["task"]) for step in range(1, 11) for r in records(tmp_path, step)]
    assert len(tasks) == 80 and len(set(tasks)) == 20, "a group trains in one step only"
    for step in range(1, 11):
        for r in records(tmp_path, step):
            assert step - 1 - k <= r["start_version"] <= r["end_version"] <= step - 1 and was_trained(r)


@pytest.mark.parametrize("k", [0, 1, 2])
async def test_strict_rollouts_start_exactly_max_async_level_versions_back(train, make_env, k):
    _, _, lines = await train([make_env()], steps=7, max_async_level=k, strict_async_level=True)
    staleness = [(line["off_policy/mean"], line["off_policy/max"]) for line in lines[1:]]
    assert staleness == [(min(k, step - 1),) * 2 for step in range(1, 8)]


@pytest.mark.parametrize("k", [0, 1])
async def test_token_batches_reach_their_size_and_stay_within_max_async_level(train, make_env, k):
    _, trainer, lines = await train(
        [make_env()], steps=8, max_async_level=k, batch_size=None, token_batch_size=150, max_off_policy_steps=k
    )
    tokens = [sum(sum(row.sequence_lengths) for row in ranks[0].micro_batches) for ranks in trainer.batches]
    assert len(tokens) == 8 and min(tokens) >= 150 and max(tokens) < 450
    assert max(line["off_policy/max"] for line in lines[1:]) <= k


async def test_a_straggler_trains_later_up_to_the_limit_and_is_then_cancelled(train, make_env, pool):
    """The 1st request takes three steps, the 4th longer than the run; no step waits for either."""
    pool.held = {1: 3, 4: 100}
    envs = [make_env(timeout_s=90.0)]
    _, trainer, lines = await train(envs, steps=30, max_async_level=1, max_off_policy_steps=20, delay=0.02)
    assert len(trainer.batches) == 30
    assert 3 <= max(line["off_policy/max"] for line in lines[1:]) <= 20
    assert [line["off_policy/dropped"] for line in lines[1:] if line["off_policy/dropped"]] == [4.0]


async def test_each_rank_gets_its_batch_and_the_same_number_of_rows(train, make_env):
    _, trainer, _ = await train([make_env()], steps=3, ranks=3, seq_len=32)
    for ranks in trainer.batches:
        assert len({len(batch.micro_batches) for batch in ranks}) == 1
        assert sum(len(row.sequence_lengths) for batch in ranks for row in batch.micro_batches) == 8


async def test_batches_and_old_weights_are_removed_unless_they_are_to_be_kept(train, make_env, tmp_path):
    await train([make_env()], steps=3)
    assert list((tmp_path / "batches").iterdir()) == []
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["step_000003"]


async def test_kept_batches_stay(train, make_env, tmp_path):
    await train([make_env()], steps=3, keep_batches=True)
    assert sorted(path.name for path in (tmp_path / "batches").iterdir()) == [f"step_00000{n}" for n in (1, 2, 3)]


async def test_what_it_does_is_recorded_and_idle_shares_are_of_the_steps(train, make_env, tmp_path):
    lane = Lane("orchestrator", tmp_path)
    _, _, lines = await train([make_env()], steps=4, lane=lane, delay=0.02, eval=EvalConfig(every=2), max_async_level=0)
    lane.close()
    problems = []
    spans = read_spans(tmp_path, problems, steps=4)
    assert not problems and {span.process for span in spans} == {"orchestrator", "engine", "evaluation"}
    own = [span for span in spans if span.process == "orchestrator"]
    assert all(before.stop <= after.start for before, after in pairwise(own))
    work = [(span.step, span.what) for span in own if span.what in OWN_WORK]
    assert work == [(step, what) for step in range(1, 5) for what in OWN_WORK]
    assert {"waiting for rollouts", "waiting for the trainer"} <= {span.what for span in own}
    assert [span.step for span in spans if span.what == "evaluating"] == [0, 2, 4]
    assert [span.step for span in spans if span.what == "loading weights"] == [1, 2, 3, 4]
    steps = [line for line in lines if line["step"] > 0]
    wall = sum(line["time/step"] for line in steps)
    busy = sum((1 - line["idle/engine"]) * line["time/step"] for line in steps)
    began = min(span.start for span in own if span.step == 1)
    made = union([(span.start, span.stop) for span in spans if span.process == "engine"])
    assert busy == pytest.approx(within(began, began + wall, made), abs=0.02)
    assert all(0.0 <= line["idle/engine"] < 1.0 for line in steps)


async def test_evaluation_comes_first_last_and_every_so_many_steps(train, make_env):
    _, _, lines = await train([make_env(held_out=3)], steps=5, eval=EvalConfig(every=2), max_async_level=0)
    assert [line["step"] for line in lines if "eval/toy/avg@1" in line] == [0, 2, 4, 5]


async def test_the_trainers_metrics_are_in_the_line_of_their_step(train, make_env):
    _, _, lines = await train([make_env()], steps=3)
    for line in lines[1:]:
        assert line["loss/mean"] == 0.1
        assert {
            "time/step",
            "time/rollout",
            "time/wait_for_policy",
            "reward/all/mean",
            "tokens/generated_per_second",
        } <= set(line)


async def test_a_trainer_that_stops_ends_the_run_within_the_policy_timeout(train, make_env, transport):
    started = time.monotonic()
    trainer = FakeTrainer(transport, stop_after=2)
    with pytest.raises(PrlError, match=r"no policy newer than version 2 .* 0\.2 s \(orchestrator\.policy_timeout_s\)"):
        await train([make_env()], steps=8, trainer=trainer, max_async_level=1, policy_timeout_s=0.2)
    assert time.monotonic() - started < patient(5)


async def test_a_trainer_that_stops_after_the_last_batch_is_not_waited_for_for_ever(train, make_env, transport):
    trainer = FakeTrainer(transport, stop_after=3)
    with pytest.raises(PrlError, match=r"step 4: no policy newer than version 3 .*policy_timeout_s"):
        await train([make_env()], steps=4, trainer=trainer, policy_timeout_s=0.2, limit=5.0)


async def test_a_trainer_that_stops_is_named_although_a_straggler_is_still_on_its_way(train, make_env, pool, transport):
    """With the rest of six groups both steps that a rollout of version 0 is meant for were shipped."""
    pool.delay_of = lambda n: 60.0 if pool.requests == 1 else 0.002
    with pytest.raises(PrlError, match=r"step 3: no policy newer than version 0 .*policy_timeout_s"):
        await train(
            [make_env(timeout_s=90.0)],
            trainer=FakeTrainer(transport, stop_after=0),
            oversampling_factor=1.5,
            policy_timeout_s=0.2,
            batch_timeout_s=60.0,
        )


async def test_rollouts_may_take_longer_than_the_policy_timeout(train, make_env, pool):
    pool.delay = patient(0.4)
    _, trainer, _ = await train([make_env()], steps=2, max_async_level=0, policy_timeout_s=patient(0.3))
    assert len(trainer.batches) == 2


async def test_rollouts_that_do_not_come_end_the_run_within_the_batch_timeout(train, make_env, pool):
    pool.delay = 1e6
    with pytest.raises(
        PrlError, match=r"step 1: 0 rollouts after 0\.2 s \(orchestrator\.batch_timeout_s\).*of env slow"
    ):
        await train([make_env("slow", timeout_s=1e6)], batch_timeout_s=0.2, limit=5.0)


async def test_ten_batches_in_a_row_without_a_signal_end_the_run_and_say_why(train, make_env, zero, tmp_path):
    with pytest.raises(PrlError, match=f"{MAX_EMPTY_BATCHES} batches in a row.*filter zero_advantage: 8"):
        await train([make_env(task=Flat, post={"zero_advantage": zero()})])
    lines = records(tmp_path, 1)
    assert len(lines) == 8 * MAX_EMPTY_BATCHES and not any(was_trained(line) for line in lines)
    assert not (tmp_path / "batches").exists()


async def test_rollouts_of_a_batch_that_does_not_ship_are_not_recorded_as_trained(train, make_env, tmp_path, pool):
    class Nothing(Algorithm):
        def score_group(self, group):
            for rollout in group:
                for sample in rollout.samples:
                    sample.rl_weights = [0.0] * len(sample.mask)

    with pytest.raises(PrlError, match="nothing to train .*nothing of it within trainer.seq_len feeds a loss: 8"):
        await train([make_env(algorithm=Nothing)])
    assert {(r["outcome"]["stage"], r["outcome"]["reason"]) for r in records(tmp_path, 1)} == {
        ("unlearnable", "nothing of it within trainer.seq_len feeds a loss")
    }


async def test_batches_that_truncation_empties_end_the_run_like_other_empty_ones(train, make_env, tmp_path):
    with pytest.raises(PrlError, match=f"{MAX_EMPTY_BATCHES} batches in a row had nothing to train .*trainer.seq_len"):
        await train([make_env()], seq_len=2)  # a prompt is longer than that
    assert {(r["outcome"]["stage"], r["outcome"]["reason"]) for r in records(tmp_path, 1)} == {
        ("unlearnable", "nothing of it within trainer.seq_len feeds a loss")
    }


class AfterTheFirst(Filter):
    """Matches what would be two batches of eight, after the first one."""

    seen = 0

    def matches(self, rollout):
        self.seen += 1
        return 8 < self.seen <= 24


async def test_rollouts_of_batches_that_did_not_ship_count_in_the_next_line(train, make_env, make_filter, tmp_path):
    first = make_filter(AfterTheFirst, enforce=True)
    _, _, lines = await train([make_env(post={"first": first})], steps=3, max_async_level=0)
    assert [line["rollouts/batch"] for line in lines[1:]] == [8.0, 24.0, 8.0]
    assert [line["rollouts/filtered"] for line in lines[1:]] == [0.0, 16.0, 0.0]
    assert [line["rollouts/trained"] for line in lines[1:]] == [8.0] * 3
    assert lines[2]["filters/all/first"] == lines[2]["filters/toy/is_filtered"] == pytest.approx(16 / 24)
    assert [sum(was_trained(r) for r in records(tmp_path, step)) for step in (1, 2, 3)] == [8] * 3


async def test_filtered_rollouts_are_recorded_and_not_shipped(train, make_env, zero, tmp_path):
    post = {"zero_advantage": zero()}
    envs = [make_env("toy", post=post), make_env("flat", task=Flat, post=post)]
    _, trainer, lines = await train(envs, steps=4)
    shipped = [name for (batch,) in trainer.batches for row in batch.micro_batches for name in row.env_names]
    assert shipped and set(shipped) == {"toy"}
    assert {line["filters/flat/is_filtered"] for line in lines[1:] if "filters/flat/is_filtered" in line} == {1.0}
    flat = [r for step in range(1, 5) for r in records(tmp_path, step) if r["env"] == "flat"]
    assert flat and {r["outcome"]["reason"] for r in flat} == {"filter zero_advantage"}
    assert {r["reward"] for r in flat} == {0.1}


class Longest(Filter):
    """Matches the replies of three digits, which the pool gives now and then."""

    def matches(self, rollout):
        return rollout.num_completion_tokens == 4


async def test_a_group_dropped_before_the_batch_takes_no_place_in_it(train, make_env, zero, tmp_path):
    pre = {"zero": zero()}
    envs = [make_env("toy", pre=pre), make_env("flat", task=Flat, pre=pre)]
    _, _, lines = await train(envs, steps=4)
    assert {line["rollouts/batch"] for line in lines[1:]} == {line["rollouts/trained"] for line in lines[1:]} == {8.0}
    taken = [r for step in range(1, 5) for r in records(tmp_path, step)]
    flat = [r for r in taken if r["env"] == "flat"]
    assert flat and {r["outcome"]["reason"] for r in flat} == {"filter zero"}
    assert all(r["matched"] == {"pre_batch": "zero"} for r in flat)
    assert sum(was_trained(r) for r in taken) == 32 and {r["env"] for r in taken if was_trained(r)} == {"toy"}
    told = [line for line in lines[1:] if "reward/flat/mean" in line]
    assert told and all(line["reward/flat/mean"] == pytest.approx(0.1) for line in told)
    assert all(line["pre_filters/flat/zero"] == line["pre_filters/flat/is_filtered"] == 1.0 for line in told)
    assert not any("filters/flat/is_filtered" in line for line in lines)
    for step, line in enumerate(lines[1:], 1):
        of_step = records(tmp_path, step)
        assert line["reward/all/mean"] == pytest.approx(sum(r["reward"] for r in of_step) / len(of_step))
        dropped = [r for r in of_step if r["outcome"]["stage"] == "pre_filtered"]
        assert line["pre_filters/all/zero"] == pytest.approx(len(dropped) / len(of_step))


async def test_the_rest_of_a_group_trains_and_what_was_dropped_is_recorded_with_it(
    train, make_env, make_filter, tmp_path
):
    _, _, lines = await train([make_env(pre={"longest": make_filter(Longest, enforce=True)})], steps=4)
    assert all(line["rollouts/batch"] >= 8 for line in lines[1:]), "a batch is of what is left"
    together = False
    for step in range(1, 5):
        taken = records(tmp_path, step)
        assert all(was_trained(r) == (r["completion_tokens"] < 4) for r in taken)
        assert all(r["advantage"] is not None for r in taken), "the group's credit counts them all"
        together |= any({was_trained(r) for r in taken if r["group"] == group} == {True, False} for group in range(99))
    assert together
    assert 0 < sum(line["pre_filters/toy/longest"] for line in lines[1:]) < 4


@dataclass(kw_only=True)
class AllButFirst(Filter):
    """Matches all but the first `of`th of the rollouts it is asked about."""

    of: float
    asked: int = 0

    def matches(self, rollout):
        self.asked += 1
        return self.asked % self.of != 1


@pytest.mark.parametrize(("size", "warns"), [(20, True), (10, True), (9, False)])
async def test_a_batch_of_which_a_tenth_or_less_trains_is_warned_about(
    train, make_env, make_filter, caplog, size, warns
):
    most = make_filter(AllButFirst, enforce=True, of=size)
    with caplog.at_level("WARNING"):
        await train([make_env(group_size=1, post={"most": most})], steps=2, batch_size=size, group_size=1)
    said = [record.getMessage() for record in caplog.records if "rollouts train" in record.getMessage()]
    step = f"only 1 of {size} rollouts train: filter most: {size - 1}"
    assert said == ([f"step 1: {step}", f"step 2: {step}"] if warns else [])


async def test_evaluation_is_never_filtered(train, make_env, make_filter, tmp_path):
    everything = make_filter(AllButFirst, of=math.inf)
    env = make_env(held_out=3, pre={"a": everything}, post={"b": everything})
    _, _, lines = await train([env], steps=2, eval=EvalConfig(every=1, num_tasks=3), max_async_level=0)
    assert all(r["matched"] == {"pre_batch": "a", "post_batch": "b"} for r in records(tmp_path, 2))
    for version in range(3):
        path = tmp_path / "rollouts" / f"eval_toy_step_{version:06d}.jsonl"
        entries = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(entries) == 3 and all(r["matched"] == {} and r["outcome"] is None for r in entries)
        rewards = [r["reward"] for r in entries]
        assert lines[version]["eval/toy/avg@1"] == pytest.approx(sum(rewards) / 3)


async def test_when_every_group_fails_the_run_ends_with_the_reason(train, make_env):
    with pytest.raises(
        PrlError, match=r"step 1: (\d+) of the last \1 rollouts of env .toy. failed.*no grade for anyone"
    ):
        await train([make_env(task=Ungradable)])


async def test_a_failed_weight_update_ends_the_run(train, make_env, pool, monkeypatch):
    async def broken(version, path, timeout_s):
        raise TimeoutError("http://engine did not load policy version 1")

    monkeypatch.setattr(pool, "update_weights", broken)
    with pytest.raises(TimeoutError, match="policy version 1"):
        await train([make_env()], limit=5.0)


async def test_setup_of_every_algorithm_runs_before_the_first_request(train, make_env, pool):
    seen = []

    class Connecting(Algorithm):
        async def setup(self):
            seen.append(pool.requests)

        def score_group(self, group):
            for rollout in group:
                rollout.assign_advantages(1.0)

    envs = [make_env(name, algorithm=Connecting) for name in ("a", "b")]
    await train(envs, steps=1)
    assert seen == [0, 0]


async def test_a_long_evaluation_is_nobodys_delay(make_env, pool, train, tmp_path, monkeypatch):
    """Longer than both deadlines: generation rests meanwhile, and that is not the trainer's fault or the rollouts'."""

    async def slow(envs, config, run_dir, version):
        await asyncio.sleep(patient(0.6))
        return {"eval/toy/avg@1": 0.0}

    monkeypatch.setattr("prl.orchestrator.weight_sync.evaluate", slow)
    for level in (0, 1):
        _, _, lines = await train(
            [make_env(held_out=2)],
            steps=3,
            max_async_level=level,
            eval=EvalConfig(every=1),
            policy_timeout_s=patient(0.3),
            batch_timeout_s=patient(0.3),
        )
        assert [line["step"] for line in lines] == [0, 1, 2, 3]
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        pool.version = 0


# --- frozen models ----------------------------------------------------------------------------------------------------


def all_records(run_dir, steps):
    return [record for step in range(1, steps + 1) for record in records(run_dir, step)]


def count(entries):
    """Trained rollouts of each env."""
    names = [entry["env"] for entry in entries if was_trained(entry)]
    return {name: names.count(name) for name in names}


@pytest.fixture
def at_version(pool, monkeypatch):
    """`at_version(version, act)`: calls `act` when the policy reaches that version."""
    acts = {}
    update = pool.update_weights

    async def watched(version, path, timeout_s):
        await update(version, path, timeout_s)
        for due in [due for due in acts if due <= version]:
            acts.pop(due)()

    monkeypatch.setattr(pool, "update_weights", watched)
    return acts.__setitem__


@pytest.mark.parametrize("k", [0, 1])
async def test_rollouts_of_a_frozen_model_have_no_version_no_logprobs_and_no_age(
    train, make_imitating, frozen, tmp_path, k
):
    frozen.delay = 0.03  # far longer than a step takes
    _, trainer, lines = await train(
        [make_imitating(frozen)], steps=6, max_async_level=k, max_off_policy_steps=k, delay=0.001
    )
    for line in lines[1:]:
        assert (line["off_policy/mean"], line["off_policy/max"], line["off_policy/dropped"]) == (0.0, 0.0, 0.0)
    entries = all_records(tmp_path, 6)
    assert len(entries) == 48 and all(was_trained(entry) for entry in entries)
    assert {(entry["start_version"], entry["end_version"]) for entry in entries} == {(None, None)}
    for (batch,) in trainer.batches:
        for row in batch.micro_batches:
            assert not any(row.logprobs) and any(row.ce_weights) and row.advantages is None


async def test_ages_are_those_of_the_policys_own_rollouts(train, make_env, make_imitating, frozen, pool, tmp_path):
    """A frozen model's would pull the mean down, or, taken for version 0, up without end."""
    _, _, lines = await train(
        [make_env("live"), make_imitating(frozen)], steps=10, max_async_level=1, strict_async_level=True
    )
    for line in lines[1:]:
        live = [r for r in records(tmp_path, int(line["step"])) if r["env"] == "live" and was_trained(r)]
        ages = [line["step"] - 1 - r["start_version"] for r in live]
        assert line["off_policy/mean"] == (sum(ages) / len(ages) if ages else 0.0)
        assert line["off_policy/max"] == max(ages, default=0)
    assert any(line["off_policy/max"] == 1 for line in lines[1:]), "the point of the test"


async def nothing(*args):
    pass


async def test_when_every_env_waits_for_its_model_the_run_waits_longer_than_for_a_batch(
    train, make_imitating, make_distilling, frozen, at_version
):
    def leave():
        frozen.go_away()
        asyncio.get_running_loop().call_later(patient(0.8), frozen.come_back)

    at_version(2, leave)
    started, limit_s = time.monotonic(), patient(0.4)
    _, trainer, _ = await train(
        [make_imitating(frozen), make_distilling(frozen)], steps=5, batch_timeout_s=limit_s, policy_timeout_s=limit_s
    )
    assert len(trainer.batches) == 5 and time.monotonic() - started > 1.75 * limit_s


@pytest.fixture
def short_pauses(monkeypatch):
    monkeypatch.setattr("prl.orchestrator.collector.PAUSE_S", 0.002)


async def test_groups_that_fail_because_their_model_is_away_do_not_end_the_run(
    train, make_imitating, frozen, short_pauses, tmp_path
):
    """It answers whoever looks for it, and goes away at the next request: far more often than groups may fail."""
    failures = 3 * LEAST
    returns = []

    def check():
        if frozen.requests < failures:
            frozen.go_away()
            for earlier in returns:
                earlier.cancel()
            returns.append(asyncio.get_running_loop().call_later(0.02, frozen.come_back))
            raise EngineError("http://teacher is gone", 503)

    frozen._check = check
    frozen.wait_ready = nothing
    _, trainer, _ = await train([make_imitating(frozen)], steps=2)
    assert len(trainer.batches) == 2
    lost = [r for r in records(tmp_path, 1) if not was_trained(r)]
    assert len(lost) > 4 * 2 * LEAST
    assert {r["outcome"]["reason"] for r in lost} == {"EngineError: http://teacher is gone"}


async def test_groups_that_their_model_refuses_end_the_run(train, make_distilling, frozen):
    """It is there, and has no answer: then waiting is of no use."""

    async def refuse(token_ids):
        raise EngineError("http://teacher/v1/completions answered HTTP 400: no prompt_logprobs here", 400)

    frozen.prompt_logprobs = refuse
    with pytest.raises(
        PrlError,
        match=r"(\d+) of the last \1 rollouts of env 'distilling' failed.*reference: \1.*no prompt_logprobs here",
    ):
        await train([make_distilling(frozen)])


async def test_a_reference_without_an_answer_costs_rollouts_and_not_steps(train, make_distilling, frozen, tmp_path):
    score = frozen.prompt_logprobs

    async def moody(token_ids):
        if frozen.scored % 5 == 4:
            frozen.scored += 1
            raise EngineError("http://teacher answered HTTP 400: not this one", 400)
        return await score(token_ids)

    frozen.prompt_logprobs = moody
    _, trainer, lines = await train([make_distilling(frozen)], steps=6)
    lost = [r for r in all_records(tmp_path, 6) if not was_trained(r)]
    assert {r["outcome"]["reason"] for r in lost} == {"EngineError: http://teacher answered HTTP 400: not this one"}
    assert sum(line["rollouts/errored"] for line in lines[1:]) == len(lost) > 0
    assert all(line["rollouts/trained"] >= 8 for line in lines[1:])
    for (batch,) in trainer.batches:
        for row in batch.micro_batches:
            assert all(ref < 0 for ref, w in zip(row.ref_logprobs, row.ref_kl_weights, strict=True) if w)


async def test_the_time_that_scoring_takes_is_measured(train, make_distilling, frozen):
    frozen.delay, frozen.random = 0.02, SimpleNamespace(random=lambda: 1.0)
    _, _, lines = await train([make_distilling(frozen)], steps=2)
    assert all(0.015 < line["time/scoring"] < 1 for line in lines[1:])


# --- and with the real client -----------------------------------------------------------------------------------------


@pytest.fixture
async def endpoint(server, renderer):
    """The URL of a model that answers every request with four times the same."""
    tokens = [*renderer._tokenizer.encode("12", add_special_tokens=False), renderer._tokenizer.eos_token_id]
    choices = [{"index": i, "token_ids": tokens, "finish_reason": "stop"} for i in range(4)]
    server.replies |= {"/v1/completions": {"choices": choices}, "/v1/models": {"data": [{"id": "teacher"}]}}
    return server.url


def teacher_at(url, timeout_s=5.0):
    return FrozenPool(FrozenModelConfig(name="teacher", base_url=f"{url}/v1", timeout_s=timeout_s))


async def test_a_server_that_is_restarted_costs_its_groups_and_not_the_run(
    train, make_env, make_imitating, server, endpoint, at_version, tmp_path
):
    async def restart():
        await server.stop()
        await asyncio.sleep(0.3)
        await server.start()

    restarts = []
    at_version(3, lambda: restarts.append(asyncio.ensure_future(restart())))
    envs = [make_env("live"), make_imitating(teacher_at(endpoint))]
    await train(envs, steps=200, limit=20.0)
    await restarts[0]
    entries = all_records(tmp_path, 200)
    lost = {r["outcome"]["source"] for r in entries if not was_trained(r)}
    assert lost <= {"engine"}
    last = count(records(tmp_path, 199) + records(tmp_path, 200))
    assert last["imitating"] >= 4 and last["live"] >= 4
