"""Two envs of one run that differ in all six: algorithm, sampling, loss, filters, renderer and curriculum.

Options of losses and of grpo are read on the way.
"""

import pytest

pytestmark = pytest.mark.slow

ENVS = ("math", "reverse_text")
SIX = (
    "env=[math,reverse_text]",
    "+algo@envs.math.algo=grpo",
    "envs.math.algo.baseline=leave_one_out",
    "+loss@envs.math.loss=gspo",
    "envs.math.loss.entropy_coef=0.01",
    "+algo@envs.reverse_text.algo=max_rl",
    "envs.reverse_text.sampling.temperature=0.8",
    "envs.reverse_text.sampling.max_tokens=12",
    "+loss@envs.reverse_text.loss=aipo",
    "+filters@envs.reverse_text.filters=none",
    "+renderer@envs.reverse_text.renderer=qwen3",
    "+envs.reverse_text.renderer.enable_thinking=false",
    "+curriculum@envs.reverse_text.curriculum=pools",
    "envs.reverse_text.args.num_tasks=40",
)


def test_two_envs_of_one_run_differ_in_all_six(inline, tokenizer):
    strict = ("orchestrator.max_async_level=2", "orchestrator.strict_async_level=true")
    rest = ("orchestrator.batch_size=128", "orchestrator.eval.every=null", "trainer.token_export=true")
    run = inline(*SIX, "max_steps=4", *strict, *rest)
    assert run.status == 0, run.stderr
    assert run.column("off_policy/max") == run.column("off_policy/mean") == [0, 1, 2, 2], "exactly so many versions old"
    check_sampling_and_renderer(run, tokenizer)
    check_algorithm_and_loss(run)
    check_filters_and_buffer(run)


def check_sampling_and_renderer(run, tokenizer):
    lines = {env: [line for line in run.tokens(1) if line["env"] == env] for env in ENVS}
    assert all(lines.values())
    temperatures = {env: {t for line in found for t in line["temperature"]} for env, found in lines.items()}
    assert temperatures == {"math": {1.0}, "reverse_text": {1.0, 0.8}}, "of the prompt, and of what was sampled"
    assert all(sum(line["mask"]) <= 12 for line in lines["reverse_text"])
    thinking = {env: {"<think>" in tokenizer.decode(line["token_ids"]) for line in lines[env]} for env in ENVS}
    assert thinking == {"math": {False}, "reverse_text": {True}}, "the empty thinking block of its own renderer"


def check_algorithm_and_loss(run):
    """max_rl divides by the group's mean reward, grpo leaves each one out of its mean; each loss has its metrics."""
    assert {"clipped_importance_ratio", "sequence_ratio"} <= set(run.steps[1]), "aipo's, and gspo's"
    assert run.column("sequence_ratio")[0] == pytest.approx(1.0, abs=1e-3), "the first step is on-policy"
    groups = {}
    for record in run.rollouts(1):
        groups.setdefault((record["env"], record["group"]), []).append(record)
    checked = set()
    for (env, _), group in groups.items():
        rewards = [record["reward"] for record in group]
        mean = sum(rewards) / len(rewards)
        if len(set(rewards)) > 1 and not any(record["outcome"]["stage"] == "failed" for record in group):
            checked.add(env)
            for record in group:
                others = (sum(rewards) - record["reward"]) / (len(rewards) - 1)
                expected = record["reward"] - others if env == "math" else (record["reward"] - mean) / mean
                assert record["advantage"] == pytest.approx(expected, abs=1e-5)
    assert checked == set(ENVS)


def check_filters_and_buffer(run):
    records = [record for step in (1, 2, 3) for record in run.rollouts(step)]
    assert not any(record["matched"] for record in records if record["env"] == "reverse_text"), "it has no filters"
    shown = {key for key in run.steps[1] if key.endswith("/zero_advantage")}
    assert shown >= {"filters/math/zero_advantage", "pre_filters/math/zero_advantage"}
    assert not any("reverse_text" in key for key in shown)
    pools = {env: {record["difficulty_pool"] for record in records if record["env"] == env} for env in ENVS}
    assert pools["math"] == {None}
    assert pools["reverse_text"] and pools["reverse_text"] <= {"easy", "normal", "hard"}
    assert "pool/reverse_text/normal" in run.steps[1] and "pool/math/normal" not in run.steps[1]
