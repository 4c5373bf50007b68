"""Every algorithm trains for real, in the direction it promises, and its tokens feed the component it declares."""

import json
import statistics
import subprocess
from collections import Counter

import pytest

pytestmark = pytest.mark.slow

EXPORT = ("trainer.token_export=true", "orchestrator.eval.every=null")


def uses(run, step, env=None):
    """What became of the tokens that the model sampled, and of all others."""
    sampled, others = set(), set()
    for line in run.tokens(step):
        if env in (None, line["env"]):
            for use, mask in zip(line["use"], line["mask"], strict=True):
                (sampled if mask else others).add(use)
    return sampled, others


def rise(values, ends=3):
    return statistics.mean(values[-ends:]) - statistics.mean(values[:ends])


def test_two_envs_train_with_their_own_algorithms_weights_and_group_sizes(inline):
    run = inline(
        "env=[math,reverse_text]",
        "algo=max_rl",
        "envs.math.weight=2",
        "envs.math.group_size=4",
        "orchestrator.group_size=8",
        "+algo@envs.reverse_text.algo=reward",
        "max_steps=10",
        "orchestrator.batch_size=128",
        *EXPORT,
    )
    assert run.status == 0, run.stderr
    assert rise(run.column("reward/math/mean")) > 0.1
    assert rise(run.column("reward/reverse_text/mean")) > 0.1
    assert (run.dir / "checkpoints" / "step_000010" / "model.safetensors").exists()  # though nothing is evaluated
    sampled, others = uses(run, 1)
    assert sampled == {"rl kept"} and others == {"context"}
    lines = run.tokens(1)
    assert all(line[key] is None for line in lines for key in ("rl_weights", "ce_weights", "ref_kl_weights"))
    records = [record for step in range(1, 11) for record in run.rollouts(step)]
    assert sum(record["env"] == "math" for record in records) / len(records) == pytest.approx(2 / 3, abs=0.05)
    sizes = Counter((record["env"], record["group"]) for record in records)
    assert {(env, size) for (env, _), size in sizes.items()} == {("math", 4), ("reverse_text", 8)}
    # reward has no baseline: the credit is the reward
    credit = {a for line in lines if line["env"] == "reverse_text" for a in line["advantages"]}
    assert credit <= {0.0, *(record["reward"] for record in run.rollouts(1) if record["env"] == "reverse_text")}


def test_opd_pulls_the_policy_to_its_teacher(inline):
    run = inline("algo=opd", "max_steps=8", "orchestrator.batch_size=128", *EXPORT)
    assert run.status == 0, run.stderr
    assert rise(run.column("reward/all/mean")) > 0.1
    assert rise(run.column("ref_kl")) > 0.3, "minus the divergence"
    assert all(value > 0 for value in run.column("time/scoring"))
    sampled, others = uses(run, 1)
    assert sampled <= {"ref_kl kept", "ref_kl dropped"} and others == {"context"}
    for line in run.tokens(1):
        assert line["advantages"] is None and set(line["rl_weights"]) == {0.0}
        assert all(ref < 0 for ref, mask in zip(line["ref_logprobs"], line["mask"], strict=True) if mask)
    records = run.rollouts(1)
    assert all((record["outcome"]["stage"] == "trained") and record["advantage"] is None for record in records), (
        "no filter reads what is not there"
    )


def test_the_kl_to_the_initial_model_keeps_the_policy_near_it(inline):
    """The same run with next to no weight on the KL, which then only measures it, and with much."""
    short = ("max_steps=8", "orchestrator.max_async_level=0", "orchestrator.batch_size=64", "trainer.optim.lr=2e-4")
    free, held = (
        inline("algo=grpo", f"algo.kl.coef={coef}", *short, *EXPORT, name=f"coef{coef}") for coef in ("1e-6", "1")
    )
    kl = {}
    for name, run in (("free", free), ("held", held)):
        assert run.status == 0, run.stderr
        kl[name] = [-value for value in run.column("ref_kl")]  # k1, which may be negative
        assert abs(kl[name][0]) < 1e-5, "the trainer is the reference until its first update"
        assert not list((run.dir / "logs").glob("*teacher*")) and not (run.dir / "logs" / "engine.log").exists()
        assert uses(run, 1) == ({"rl kept+ref_kl kept"}, {"context"})
    assert rise(kl["free"]) > 0.05, "the policy leaves"
    assert statistics.mean(map(abs, kl["held"][-3:])) < statistics.mean(kl["free"][-3:]) / 2
    for line in held.tokens(8):
        filled = [ref for ref, on in zip(line["ref_logprobs"], line["mask"], strict=True) if on]
        assert all(ref < 0 for ref in filled) and set(line["ref_kl_weights"]) == {0.0, 1.0}


def test_sft_imitates_rollouts_of_the_teacher(inline):
    run = inline(
        "algo=sft",
        "max_steps=12",
        "orchestrator.batch_size=128",
        "trainer.token_export=true",
        "orchestrator.eval.every=12",
    )
    assert run.status == 0, run.stderr
    assert min(run.column("reward/all/mean")) > 0.8, "the teacher's, not the policy's"
    evaluated = [line["eval/math/avg@1"] for line in run.steps if "eval/math/avg@1" in line]
    assert evaluated[0] < 0.5 and evaluated[-1] > evaluated[0] + 0.15, "evaluation asks the policy"
    assert rise(run.column("nll"), ends=5) < -0.03
    sampled, others = uses(run, 1)
    assert (sampled, others) == ({"ce"}, {"context"})
    assert all(set(line["inference_logprobs"]) == {0.0} for line in run.tokens(1)), "nobody asked the teacher for them"
    assert {record["start_version"] for record in run.rollouts(9)} == {None}
    assert set(run.column("off_policy/max")) == {0.0} and set(run.column("off_policy/dropped")) == {0.0}


def test_opsd_distils_from_the_policy_shown_a_demonstration(inline):
    vetted = ("orchestrator.group_size=1", "trainer.optim.lr=2e-4")
    few = ("max_steps=8", "orchestrator.batch_size=64", "algo.max_concurrent=16")
    run = inline("algo=opsd", *few, *vetted, *EXPORT)
    assert run.status == 0, run.stderr
    assert rise(run.column("ref_kl"), ends=3) > 0.1, "minus the divergence"
    sampled, others = uses(run, 1)
    assert sampled <= {"ref_kl kept", "ref_kl dropped"} and others == {"context"}


def test_two_envs_with_two_algorithms_share_batches(inline):
    run = inline("experiment=mixed_grpo_opd", "max_steps=9", "orchestrator.batch_size=128", *EXPORT)
    assert run.status == 0, run.stderr
    for env in ("math", "reverse_text"):
        key = f"reward/{env}/mean"
        assert rise([line[key] for line in run.steps if key in line]) > 0.05, env
    mixed = [step for step in range(1, 10) if {line["env"] for line in run.tokens(step)} == {"math", "reverse_text"}]
    assert len(mixed) >= 6
    step = mixed[-1]
    assert uses(run, step, "math")[0] <= {"rl kept", "rl dropped"}
    assert uses(run, step, "reverse_text")[0] <= {"ref_kl kept", "ref_kl dropped"}
    line = run.steps[step]
    counted = {"rl": 0, "ref_kl": 0}
    for exported in run.tokens(step):
        for use in exported["use"]:
            for name in counted:
                counted[name] += use.startswith(f"{name} ")
    assert (line["tokens/rl"], line["tokens/ref_kl"], line["tokens/ce"]) == (counted["rl"], counted["ref_kl"], 0)
    assert max(run.column("logprob_gap/mean")) < 0.2


@pytest.mark.engine
def test_the_launcher_hosts_a_teacher_without_being_told(inline_command, tmp_path):
    """Nothing but `algo=opd`: a server of its own beside the trainer, and an engine in the run's process."""
    argv, env = inline_command("algo=opd", "teacher=local", "launcher=local", "max_steps=1", name="hosted")
    argv += ["orchestrator.batch_size=16", "orchestrator.eval.every=null"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "hosted"
    assert {path.name for path in (folder / "logs").iterdir()} >= {"teacher.log", "trainer.log"}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(line["tokens/ref_kl"] > 0 for line in lines[1:])
    assert "base_url: null" in (folder / "config.yaml").read_text(), "the address of a hosted model is of one run only"
