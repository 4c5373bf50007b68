"""Evaluation: held-out tasks, k samples each, failures count as 0."""

import json

import pytest
import verifiers.v1 as vf

from prl.algorithms.base import Algorithm
from prl.config.orchestrator import EvalConfig
from prl.orchestrator.evaluate import evaluate


class Distils(Algorithm):
    action_loss_type = "ref_kl"
    reads_reward = False


class Fixed(vf.Task):
    """Earns its own index; the task with index 2 cannot be graded."""

    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        if self.data.idx == 2:
            raise RuntimeError("no grade")
        return float(self.data.idx)

    @vf.metric
    async def correct(self, trace: vf.Trace) -> float:
        return 1.0


async def test_evaluation_counts_failures_as_zero(make_env, tmp_path):
    metrics = await evaluate([make_env(task=Fixed, held_out=4)], EvalConfig(k=3), tmp_path, version=7)
    assert metrics["eval/toy/avg@3"] == pytest.approx((0 + 1 + 0 + 3) / 4)
    # Tasks earn 0, 1, 0 and 3, each three times: squares around 1 of 1, 0, 1, 4, over 3; their root over that of 4.
    assert metrics["eval/toy/stderr"] == pytest.approx(2**0.5 / 2)
    assert metrics["eval/toy/errored"] == pytest.approx(1 / 4) and metrics["eval/toy/truncated"] == 0.0
    assert metrics["eval/toy/correct"] == pytest.approx(3 / 4)
    lines = (tmp_path / "rollouts" / "eval_toy_step_000007.jsonl").read_text().splitlines()
    assert len(lines) == 12
    failed = {"stage": "failed", "reason": "TaskError: task Fixed scoring: RuntimeError: no grade", "source": "env"}
    outcomes = [json.loads(line)["outcome"] for line in lines]
    assert outcomes.count(None) == 9 and outcomes.count(failed) == 3


async def test_evaluation_beside_training_names_the_versions_that_answered(make_env, pool, tmp_path):
    env, answer, pool.version = make_env(task=Fixed, held_out=2), pool.generate, 7

    async def updated(*args, **options):
        completions = await answer(*args, **options)
        pool.version = 9
        return completions

    pool.generate = updated
    metrics = await evaluate([env], EvalConfig(mode="beside"), tmp_path, version=7)
    assert (metrics["eval/toy/version_min"], metrics["eval/toy/version_max"]) == (7, 9)


class Nothing(vf.Task):
    """Earns what its index says below zero, and cannot be graded with index 2."""

    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        if self.data.idx == 2:
            raise RuntimeError("no grade")
        return -float(self.data.idx)


@pytest.mark.parametrize(
    ("task", "version", "algorithm", "warnings"),
    [(Nothing, 0, None, 1), (Nothing, 1, None, 0), (Fixed, 0, None, 0), (Nothing, 0, Distils, 0)],
)
async def test_a_first_evaluation_that_earns_nothing_shows_a_reply(
    make_env, tmp_path, caplog, task, version, algorithm, warnings
):
    """Not of an algorithm that reads no reward."""
    env = make_env(task=task, held_out=4, algorithm=algorithm)
    await evaluate([env], EvalConfig(k=1), tmp_path, version=version)
    assert caplog.text.count("env toy: the first evaluation earned nothing") == warnings
    if warnings:
        first = json.loads((tmp_path / "rollouts" / "eval_toy_step_000000.jsonl").read_text().splitlines()[0])
        assert "Rewards are from -3 to 0; a length limit cut off 0 of 3 replies" in caplog.text
        assert caplog.text.rstrip().endswith(f"with reward 0: {first['messages'][-1]['content']}")


@pytest.mark.parametrize(("asked", "used"), [(None, 1.0), (0.0, 0.0), (0.5, 0.5)])
async def test_evaluation_has_a_temperature_of_its_own(make_env, pool, tmp_path, asked, used, monkeypatch):
    seen = []
    generate = pool.generate

    async def watched(prompt_ids, sampling, **rest):
        seen.append(sampling["temperature"])
        return await generate(prompt_ids, sampling, **rest)

    monkeypatch.setattr(pool, "generate", watched)
    env = make_env(held_out=2)
    env.eval_sampler = env.eval_sampler.changed({} if asked is None else {"temperature": asked})
    await evaluate([env], EvalConfig(), tmp_path, version=0)
    assert seen == [used, used] and env.sampler.temperature == 1.0


async def test_policy_is_evaluated_whoever_generates_the_rollouts(make_imitating, pool, frozen, tmp_path):
    env = make_imitating(frozen, task=Fixed, held_out=2)
    frozen.go_away()  # an evaluation needs no reference
    pool.version = 5
    metrics = await evaluate([env], EvalConfig(k=3), tmp_path, version=5)
    assert metrics["eval/imitating/avg@3"] == 0.5 and metrics["eval/imitating/errored"] == 0.0
    assert len(pool.requests) == 2 and not frozen.requests
    lines = (tmp_path / "rollouts" / "eval_imitating_step_000005.jsonl").read_text().splitlines()
    assert {(entry["start_version"], entry["end_version"]) for entry in map(json.loads, lines)} == {(5, 5)}
