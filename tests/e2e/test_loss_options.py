"""Options of losses and of grpo in one real run: each env has its own."""

import statistics

import pytest

pytestmark = pytest.mark.slow

MATH = (
    "+loss@envs.math.loss=gspo",
    "envs.math.loss.entropy_coef=0.01",
    "envs.math.loss.clip_ratio_low=0.1",
    "envs.math.loss.clip_ratio_high=0.1",
    "+algo@envs.math.algo=grpo",
    "envs.math.algo.baseline=leave_one_out",
)
REVERSE = (
    "loss.agg_mode=constant",
    "loss.constant_length=16",
    "algo.normalize=std",
    "algo.overlong_penalty.max_tokens=8",
    "algo.overlong_penalty.buffer=4",
)


def test_two_envs_with_options_of_their_own(inline):
    rest = ("max_steps=4", "orchestrator.batch_size=128", "orchestrator.eval.every=null", "trainer.token_export=true")
    run = inline("env=[math,reverse_text]", *MATH, *REVERSE, *rest)
    assert run.status == 0, run.stderr
    assert {"sequence_ratio", "is_clipped", "is_masked"} <= set(run.steps[1]), "gspo's metrics beside default's"
    assert run.column("sequence_ratio")[0] == pytest.approx(1.0, abs=1e-3), "the first step is on-policy"
    assert all(norm > 0 for norm in run.column("grad_norm"))
    shipped = [sum(any(line["mask"]) for line in run.tokens(step)) for step in range(1, 5)]
    assert run.column("samples/rl") == shipped
    check_credit(run)


def check_credit(run):
    """From the records: leave-one-out for math; for reverse_text the deviation of penalised rewards."""
    groups, penalised = {}, 0
    for record in (record for step in (1, 2, 3, 4) for record in run.rollouts(step)):
        if record["outcome"]["stage"] in ("trained", "post_filtered"):
            groups.setdefault((record["env"], record["group"]), []).append(record)
    assert {env for env, _ in groups} == {"math", "reverse_text"}
    for (env, _), group in groups.items():
        rewards = [record["reward"] for record in group]
        if env == "math":
            expected = [r - (sum(rewards) - r) / (len(rewards) - 1) for r in rewards]
        else:
            tokens = [record["completion_tokens"] for record in group]
            penalised += sum(n > 4 for n in tokens)
            shaped = [r - min(max((n - 4) / 4, 0.0), 1.0) for r, n in zip(rewards, tokens, strict=True)]
            expected = [(s - statistics.fmean(shaped)) / (statistics.stdev(shaped) + 1e-6) for s in shaped]
        assert [record["advantage"] for record in group] == pytest.approx(expected, abs=1e-4)
    assert penalised
