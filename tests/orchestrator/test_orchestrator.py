"""The asynchronous rules, with a pool that answers after random delays and a trainer that only announces."""

import asyncio
import json
import random
import shutil
import time

import pytest
import verifiers.v1 as vf

from prl.config.errors import PrlError
from prl.orchestrator.algo.base import Algorithm
from prl.orchestrator.config import EvalConfig, OrchestratorConfig
from prl.orchestrator.filters import FilterSlot
from prl.orchestrator.filters.zero_advantage import ZeroAdvantageConfig
from prl.orchestrator.orchestrator import MAX_EMPTY_BATCHES, Orchestrator
from prl.wire import files


class FakeMonitor:
    """Keeps the lines."""

    def __init__(self):
        self.lines = []

    def step(self, line):
        self.lines.append(line)


class FakeTrainer:
    """Reads each batch of the run directory, takes its time, and announces the next policy version."""

    def __init__(self, run_dir, *, delay=0.0, stop_after=10**9, ranks=1, seed=0):
        self.run_dir, self.delay, self.stop_after, self.ranks = run_dir, delay, stop_after, ranks
        self.random = random.Random(seed)
        self.batches = []

    async def work(self):
        for step in range(1, self.stop_after + 1):
            while (batch := files.read_batch(self.run_dir, step, self.ranks - 1)) is None:
                await asyncio.sleep(0.001)
            self.batches.append([files.read_batch(self.run_dir, step, rank) for rank in range(self.ranks)])
            assert batch.step == step
            await asyncio.sleep(self.delay * self.random.random())
            made = self.run_dir / "weights" / ".making"
            made.mkdir(parents=True)
            (made / "metrics.json").write_text(json.dumps({"loss/mean": 0.1, "tokens/trained": 60.0}))
            files.announce(made, files.weights_path(self.run_dir, step))
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


class Moody(vf.Task):
    """Cannot grade the longest replies; fails for whole groups and for parts of them."""

    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        if len(trace.last_reply) == 3:
            raise RuntimeError("too long for me")
        return float(len(trace.last_reply))


class Buggy(Algorithm):
    def score_group(self, group):
        raise ZeroDivisionError("a bug of the algorithm")


@pytest.fixture
def train(tmp_path, pool):
    """Run `steps` steps to the end; gives back the orchestrator, the trainer and the lines."""

    async def run(envs, *, steps=8, filters=None, trainer=None, delay=0.004, ranks=1, limit=10.0, seq_len=64, **config):
        config = {"batch_size": 8, "group_size": 4, "eval": EvalConfig(every=None)} | config
        monitor = FakeMonitor()
        orchestrator = Orchestrator(
            OrchestratorConfig(**config), envs, pool, FilterSlot(filters or {}, "filters.post_batch"), monitor,
            run_dir=tmp_path, max_steps=steps, seq_len=seq_len, trainer_ranks=ranks, update_timeout_s=5.0,
        )  # fmt: skip
        trainer = trainer or FakeTrainer(tmp_path, delay=delay, ranks=ranks)
        pool.delay = pool.delay or delay
        training = asyncio.create_task(trainer.work())
        try:
            async with asyncio.timeout(limit):
                await orchestrator.run()
        finally:
            if training.done():
                training.result()
            training.cancel()
        return orchestrator, trainer, monitor.lines

    return run


def records(run_dir, step):
    return [json.loads(line) for line in (run_dir / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("slow", ["trainer", "sampler", "neither"])
@pytest.mark.parametrize("k", [0, 1, 2])
async def test_no_rollout_is_older_than_max_async_level(train, make_env, pool, tmp_path, k, slow):
    pool.delay = 0.02 if slow == "sampler" else 0.003
    _, trainer, lines = await train(
        [make_env()], steps=10, max_async_level=k, max_off_policy_steps=99, delay=0.02 if slow == "trainer" else 0.003
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
            assert step - 1 - k <= r["start_version"] <= r["end_version"] <= step - 1 and r["trained"]


@pytest.mark.parametrize("k", [0, 1, 2])
async def test_strict_rollouts_start_exactly_max_async_level_versions_back(train, make_env, k):
    _, _, lines = await train([make_env()], steps=7, max_async_level=k, strict_async_level=True)
    staleness = [(line["off_policy/mean"], line["off_policy/max"]) for line in lines[1:]]
    assert staleness == [(min(k, step - 1),) * 2 for step in range(1, 8)]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("k", [0, 1, 2])
async def test_partial_groups_do_not_leave_rollouts_that_grow_too_old(train, make_env, k, strict):
    _, trainer, lines = await train(
        [make_env(task=Moody)], steps=12, max_async_level=k, strict_async_level=strict, max_off_policy_steps=99
    )
    assert any(line["rollouts/errored"] for line in lines[1:]), "the point of the test"
    assert max(line["off_policy/max"] for line in lines[1:]) <= k
    assert all(line["rollouts/batch"] >= 8 for line in lines[1:]) and len(trainer.batches) == 12


@pytest.mark.parametrize("k", [0, 1])
async def test_group_sizes_that_do_not_add_up_do_not_leave_rollouts_that_grow_too_old(
    train, make_env, pool, k
):
    pool.delay_of = lambda n: 0.01 if n == 2 else 0.001  # the small group, started first, comes in last
    envs = [make_env("small", group_size=2), make_env("large", group_size=8)]
    _, _, lines = await train(envs, steps=10, max_async_level=k, max_off_policy_steps=99)
    assert max(line["off_policy/max"] for line in lines[1:]) <= k
    assert all(8 <= line["rollouts/batch"] < 24 for line in lines[1:])


@pytest.mark.parametrize("k", [0, 1])
async def test_token_batches_reach_their_size_and_stay_within_max_async_level(train, make_env, k):
    orchestrator, trainer, lines = await train(
        [make_env()], steps=8, max_async_level=k, batch_size=None, token_batch_size=150, max_off_policy_steps=99
    )
    tokens = [sum(sum(row.sequence_lengths) for row in ranks[0].micro_batches) for ranks in trainer.batches]
    assert len(tokens) == 8 and min(tokens) >= 150 and max(tokens) < 450
    assert max(line["off_policy/max"] for line in lines[1:]) <= k


async def test_rollouts_that_span_too_many_updates_are_dropped(train, make_env, pool):
    pool.delay = 0.06
    _, trainer, lines = await train([make_env()], steps=8, max_async_level=2, max_off_policy_steps=0, delay=0.001)
    assert sum(line["off_policy/dropped"] for line in lines[1:]) > 0
    assert max(line["off_policy/max"] for line in lines[1:]) <= 2 and len(trainer.batches) == 8


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


async def test_evaluation_comes_first_last_and_every_so_many_steps(train, make_env):
    _, _, lines = await train([make_env(held_out=3)], steps=5, eval=EvalConfig(every=2), max_async_level=0)
    assert [line["step"] for line in lines if "eval/toy/avg@1" in line] == [0, 2, 4, 5]


async def test_the_trainers_metrics_are_in_the_line_of_their_step(train, make_env):
    _, _, lines = await train([make_env()], steps=3)
    for line in lines[1:]:
        assert line["loss/mean"] == 0.1
        assert {"time/step", "time/rollout", "time/wait_for_policy", "reward/all/mean", "tokens/generated_per_second"} <= set(line)  # fmt: skip


async def test_a_trainer_that_stops_ends_the_run_within_the_policy_timeout(train, make_env, tmp_path):
    started = time.monotonic()
    trainer = FakeTrainer(tmp_path, stop_after=2)
    with pytest.raises(PrlError, match=r"no policy newer than version 2 .* 0\.2 s \(orchestrator\.policy_timeout_s\)"):
        await train([make_env()], steps=8, trainer=trainer, max_async_level=1, policy_timeout_s=0.2)
    assert time.monotonic() - started < 5


async def test_a_trainer_that_stops_after_the_last_batch_is_not_waited_for_for_ever(train, make_env, tmp_path):
    trainer = FakeTrainer(tmp_path, stop_after=3)
    with pytest.raises(PrlError, match=r"step 4: no policy newer than version 3 .*policy_timeout_s"):
        await train([make_env()], steps=4, trainer=trainer, policy_timeout_s=0.2, limit=5.0)


async def test_rollouts_may_take_longer_than_the_policy_timeout(train, make_env, pool):
    pool.delay = 0.4
    _, trainer, _ = await train([make_env()], steps=2, max_async_level=0, policy_timeout_s=0.3)
    assert len(trainer.batches) == 2


async def test_rollouts_that_do_not_come_end_the_run_within_the_batch_timeout(train, make_env, pool):
    pool.delay = 1e6
    with pytest.raises(PrlError, match=r"step 1: 0 rollouts after 0\.2 s \(orchestrator\.batch_timeout_s\).*of env slow"):
        await train([make_env("slow", timeout_s=1e6)], batch_timeout_s=0.2, limit=5.0)


async def test_ten_batches_in_a_row_without_a_signal_end_the_run_and_say_why(train, make_env, tmp_path):
    zero = {"zero_advantage": ZeroAdvantageConfig()}
    with pytest.raises(PrlError, match=f"{MAX_EMPTY_BATCHES} batches in a row.*filter zero_advantage: 8"):
        await train([make_env(task=Flat)], filters=zero)
    lines = records(tmp_path, 1)
    assert len(lines) == 8 * MAX_EMPTY_BATCHES and not any(line["trained"] for line in lines)
    assert not (tmp_path / "batches").exists()


async def test_rollouts_of_a_batch_that_does_not_ship_are_not_recorded_as_trained(train, make_env, tmp_path, pool):
    class Nothing(Algorithm):
        def score_group(self, group):
            for rollout in group:
                for sample in rollout.samples:
                    sample.rl_weights = [0.0] * len(sample.mask)

    with pytest.raises(PrlError, match="nothing to train .*no trainable token: 8"):
        await train([make_env(algorithm=Nothing(None, policy_pool=pool))])
    assert {(r["trained"], r["not_trained_because"]) for r in records(tmp_path, 1)} == {
        (False, "the batch had nothing to train")
    }


async def test_filtered_rollouts_are_recorded_and_not_shipped(train, make_env, tmp_path):
    envs = [make_env("toy"), make_env("flat", task=Flat)]
    _, trainer, lines = await train(envs, steps=4, filters={"zero_advantage": ZeroAdvantageConfig()})
    shipped = [name for (batch,) in trainer.batches for row in batch.micro_batches for name in row.env_names]
    assert shipped and set(shipped) == {"toy"}
    assert {line["filters/flat/is_filtered"] for line in lines[1:] if "filters/flat/is_filtered" in line} == {1.0}
    flat = [r for step in range(1, 5) for r in records(tmp_path, step) if r["env"] == "flat"]
    assert flat and {r["not_trained_because"] for r in flat} == {"filter zero_advantage"}
    assert {r["reward"] for r in flat} == {0.1}


async def test_when_every_group_fails_the_run_ends_with_the_reason(train, make_env):
    with pytest.raises(PrlError, match=r"step 1: \d+ groups in a row failed.*no grade for anyone"):
        await train([make_env(task=Ungradable)])


async def test_an_exception_of_the_algorithm_ends_the_run_at_once(train, make_env, pool):
    with pytest.raises(PrlError, match="a bug of the algorithm"):
        await train([make_env(algorithm=Buggy(None, policy_pool=pool))], limit=5.0)


async def test_missing_advantages_end_the_run_naming_the_env(train, make_env, pool):
    with pytest.raises(PrlError, match="'forgetful'.*no advantages"):
        await train([make_env("forgetful", algorithm=Algorithm(None, policy_pool=pool))], limit=5.0)


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

    envs = [make_env(name, algorithm=Connecting(None, policy_pool=pool)) for name in ("a", "b")]
    await train(envs, steps=1)
    assert seen == [0, 0]


async def test_a_long_evaluation_is_nobodys_delay(make_env, pool, train, tmp_path, monkeypatch):
    """Longer than both deadlines: generation rests meanwhile, and that is not the trainer's fault or the rollouts'."""

    async def slow(envs, config, run_dir, version):
        await asyncio.sleep(0.6)
        return {"eval/toy/avg@1": 0.0}

    monkeypatch.setattr("prl.orchestrator.orchestrator.evaluate", slow)
    for level in (0, 1):
        _, _, lines = await train(
            [make_env(held_out=2)], steps=3, max_async_level=level, eval=EvalConfig(every=1), policy_timeout_s=0.3,
            batch_timeout_s=0.3,
        )  # fmt: skip
        assert [line["step"] for line in lines] == [0, 1, 2, 3]
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        pool.version = 0
