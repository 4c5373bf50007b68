"""`python -m prl.train` on a real engine with a real trainer."""

import json
import os
import statistics
import subprocess
import sys
import textwrap

import pytest
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.engine

SHORT = ("max_steps=3", "orchestrator.batch_size=64", "orchestrator.eval.every=null")
PROMISED = [
    "step",
    "reward/all/mean",
    "reward/math/mean",
    "loss/mean",
    "mismatch_kl/all/mean",
    "entropy/all/mean",
    "logprob_gap/mean",
    "off_policy/mean",
    "off_policy/max",
    "time/step",
    "time/rollout",
    "time/train",
    "time/update_weights",
    "time/wait_for_batch",
    "time/wait_for_policy",
    "tokens/generated_per_second",
    "tokens/trained_per_second",
]


def test_the_default_run_learns_and_leaves_what_it_promises(tmp_path):
    """Its own engine, from any directory, nothing but steps shortened."""
    argv = [sys.executable, "-m", "prl.train", "max_steps=25", "run.name=first", "monitor=wandb"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "outputs" / "first"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(26))
    rewards = [line["reward/all/mean"] for line in lines[1:]]
    assert statistics.mean(rewards[:2]) < 0.45
    assert statistics.mean(rewards[-5:]) > 0.55
    assert "eval/math/avg@1" in lines[0] and "eval/math/avg@1" in lines[20] and "eval/math/avg@1" in lines[25]
    assert lines[25]["eval/math/avg@1"] > lines[0]["eval/math/avg@1"] + 0.2
    for line in lines[1:]:
        assert not set(PROMISED) - set(line)

    result = json.loads((folder / "result.json").read_text())
    assert (result["status"], result["steps"], result["error"]) == ("completed", 25, None)
    assert result["metrics"]["reward/all/mean"] == rewards[-1]
    saved = OmegaConf.load(folder / "config.yaml")
    assert saved.max_steps == 25 and saved.run.dir == str(folder)
    assert OmegaConf.load(folder / ".hydra" / "overrides.yaml") == argv[3:]
    assert {path.name for path in (folder / "logs").iterdir()} >= {"orchestrator.log", "trainer.log", "inference.log"}
    assert [path.name for path in (folder / "weights").iterdir()] == ["step_000025"]  # older versions are gone
    assert list((folder / "wandb").glob("offline-run-*"))
    assert str(folder) in done.stderr and "completed 25 steps" in done.stderr
    assert "step 7/" not in done.stderr  # quiet when not a terminal

    records = [json.loads(line) for line in (folder / "rollouts" / "step_000024.jsonl").read_text().splitlines()]
    assert len(records) == 256
    assert all(
        (record["outcome"]["stage"] == "trained") == (record["outcome"]["stage"] == "trained") for record in records
    )
    assert [message["role"] for message in records[0]["messages"]] == ["user", "assistant"]
    assert any(
        record["matched"].get("post_batch") == "zero_advantage" and record["outcome"]["stage"] != "trained"
        for record in records
    )

    checkpoint = folder / "checkpoints" / "step_000025"
    AutoTokenizer.from_pretrained(checkpoint)
    assert AutoModelForCausalLM.from_pretrained(checkpoint).config.tie_word_embeddings

    again = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert again.returncode == 2
    assert "already holds a run" in again.stderr and "run.name" in again.stderr
    assert (folder / "metrics.jsonl").read_text().count("\n") == 26


def test_on_eval_sampler_and_trainer_agree_after_every_update(train):
    run = train("experiment=on_policy", "max_steps=8", "orchestrator.eval.every=null")
    assert run.status == 0, run.stderr
    assert all(gap < 1e-5 for gap in run.column("logprob_gap/mean"))
    assert set(run.column("off_policy/max")) == {0.0}
    assert run.column("grad_norm")[0] > 0.1  # the weights did change between those comparisons


@pytest.mark.parametrize(("level", "strict"), [(1, True), (2, False), (2, True)])
def test_staleness_keeps_to_the_async_level(train, level, strict):
    run = train(
        "max_steps=6",
        "orchestrator.batch_size=64",
        "orchestrator.eval.every=null",
        f"orchestrator.max_async_level={level}",
        f"orchestrator.strict_async_level={strict}",
    )
    assert run.status == 0, run.stderr
    worst = run.column("off_policy/max")
    assert all(staleness <= level for staleness in worst)
    if strict:
        assert worst == run.column("off_policy/mean") == [min(step, level) for step in range(6)]


def test_reverse_text_rises(train):
    run = train("env=reverse_text", "max_steps=15", "orchestrator.eval.every=null")
    assert run.status == 0, run.stderr
    rewards = run.column("reward/reverse_text/mean")
    assert statistics.mean(rewards[-3:]) > rewards[0] + 0.2


def test_envs_share_a_run_by_their_weights(train):
    run = train("env=[math,reverse_text]", "envs.math.weight=3", *SHORT)
    assert run.status == 0, run.stderr
    records = [record for step in (1, 2, 3) for record in run.rollouts(step)]
    assert (
        run.dir / "checkpoints" / "step_000003" / "model.safetensors"
    ).exists()  # though no evaluation came after it
    share = sum(record["env"] == "math" for record in records) / len(records)
    assert share == pytest.approx(0.75, abs=0.1)
    assert set(run.steps[-1]) >= {"reward/math/mean", "reward/reverse_text/mean"}


def test_an_env_may_run_its_own_algorithm_and_group_size(train):
    run = train(
        "env=[math,reverse_text]",
        "+algo@envs.math.algo=grpo",
        "envs.math.sampling.temperature=0.7",
        "envs.math.group_size=4",
        *SHORT,
    )
    assert run.status == 0, run.stderr
    sizes = {}
    for record in [record for step in (1, 2, 3) for record in run.rollouts(step)]:
        sizes.setdefault((record["env"], record["group"]), []).append(record)
    assert {env: {len(g) for (e, _), g in sizes.items() if e == env} for env in ("math", "reverse_text")} == {
        "math": {4},
        "reverse_text": {8},
    }


def test_token_batches(train):
    run = train(
        "max_steps=4",
        "orchestrator.batch_size=null",
        "orchestrator.token_batch_size=2000",
        "orchestrator.eval.every=null",
    )
    assert run.status == 0, run.stderr
    assert all(90 <= rollouts <= 140 for rollouts in run.column("rollouts/batch"))


def test_other_losses_train(train, tmp_path):
    assert train("loss=aipo", *SHORT, name="aipo").status == 0
    (tmp_path / "my_losses.py").write_text(
        textwrap.dedent("""
            import torch
            from prl.trainer.loss import LossInputs, LossOutputs

            def ppo_clip_loss(inputs: LossInputs, clip_eps: float) -> LossOutputs:
                ratio = torch.exp(inputs.trainer_logprobs - inputs.inference_logprobs)
                clipped = ratio.clamp(1 - clip_eps, 1 + clip_eps)
                loss = -torch.min(ratio * inputs.advantages, clipped * inputs.advantages)[inputs.loss_mask].sum()
                return LossOutputs(loss, {"clip_frac": (ratio != clipped)[inputs.loss_mask].float().mean()})
        """)
    )
    path = {"PYTHONPATH": str(tmp_path)}
    run = train("loss=custom", "loss._target_=my_losses.ppo_clip_loss", "+loss.clip_eps=0.1", *SHORT, env=path)
    assert run.status == 0, run.stderr
    assert all("clip_frac" in line for line in run.steps[1:])


def test_two_trainer_ranks(train):
    run = train("trainer.num_processes=2", "orchestrator.max_async_level=0", *SHORT)
    assert run.status == 0, run.stderr
    assert all(gap < 1e-5 for gap in run.column("logprob_gap/mean"))


def test_the_other_knobs_are_read(train):
    """Knobs that change how, not what: the run still learns on-policy-exactly."""
    run = train(
        "trainer.gradient_checkpointing=true",
        "trainer.tokens_per_forward=512",
        "trainer.head_chunk=64",
        "trainer.checkpoint_every=2",
        "trainer.schedule.warmup_steps=2",
        "trainer.schedule.decay=cosine",
        "trainer.optim.weight_decay=0.1",
        "orchestrator.keep_batches=true",
        "filters=none",
        "buffer.shuffle=false",
        "sampling.max_tokens=3",
        "orchestrator.max_async_level=0",
        "orchestrator.eval.k=2",
        "renderer=qwen3",
        "orchestrator.eval.sampling.temperature=0",
        "orchestrator.eval.num_tasks=4",
        "orchestrator.eval.every=2",
        "max_steps=3",
        "orchestrator.batch_size=64",
    )
    assert run.status == 0, run.stderr
    assert all(gap < 1e-5 for gap in run.column("logprob_gap/mean"))
    assert run.column("lr") == pytest.approx([5e-4 / 3, 5e-4 * 2 / 3, 5e-4 * 0.1])
    assert run.column("rollouts/trained") == [64.0] * 3  # nothing is filtered
    assert sorted(path.name for path in (run.dir / "checkpoints").iterdir()) == ["step_000002", "step_000003"]
    assert len(list((run.dir / "batches").glob("step_*/rank_0.msgpack"))) == 3
    assert max(record["completion_tokens"] for record in run.rollouts(1)) == 3
    assert [line["step"] for line in run.steps if "eval/math/avg@2" in line] == [0, 2, 3]
    evaluated = (run.dir / "rollouts" / "eval_math_step_000000.jsonl").read_text().splitlines()
    assert len(evaluated) == 8
    texts = [json.loads(line)["messages"][-1]["content"] for line in evaluated]
    assert texts[0::2] == texts[1::2]  # greedy
    tasks = [record["task"] for record in run.rollouts(1)][::8]
    assert tasks == sorted(tasks)  # in the taskset's own order


def test_truncated_samples_are_counted(train):
    run = train("trainer.seq_len=17", *SHORT)
    assert run.status == 0, run.stderr
    assert all(count > 0 for count in run.column("samples/truncated"))
    assert "trainer.seq_len=17" in run.stderr


def test_the_seed_governs_the_run(train):
    """Synchronous runs of one seed see the same tasks and sample the same replies; another seed does not."""
    fixed = ("experiment=on_policy", *SHORT)
    runs = [train(*fixed, f"seed={seed}", name=f"run{i}") for i, seed in enumerate((7, 7, 8))]
    assert all(run.status == 0 for run in runs), runs[0].stderr
    firsts = [
        sorted(
            (record["group"], record["messages"][0]["content"], record["messages"][1]["content"])
            for record in run.rollouts(1)
        )
        for run in runs
    ]
    assert firsts[0] == firsts[1] != firsts[2]
    assert {prompt for _, prompt, _ in firsts[0]} != {prompt for _, prompt, _ in firsts[2]}


def test_a_sweep_is_a_directory_of_runs(command, tmp_path):
    argv, env = command("seed=0,1", "algo=grpo", *SHORT[:1], "orchestrator.batch_size=64", "run.name=sweep")
    argv = [arg for arg in argv if not arg.startswith("run.dir=")]
    argv.insert(argv.index("prl.train") + 1, "-m")
    done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    runs = sorted((tmp_path / "outputs" / "sweep").glob("*/result.json"))
    assert len(runs) == 2
    assert [OmegaConf.load(run.parent / "config.yaml").seed for run in runs] == [0, 1]
    assert all(json.loads(run.read_text())["status"] == "completed" for run in runs)


TASKSET = """
import verifiers.v1 as vf
__all__ = ["SumTaskset"]


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData]):
    {hook}

    @vf.reward
    async def right(self, trace{runtime}) -> float:
        return float(trace.last_reply == {expected})


class SumConfig(vf.TasksetConfig):
    num_tasks: int = 20


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for left in range(self.config.num_tasks):
            yield SumTask(SumData(prompt=f"{{left}}+7=", answer=left + 7), self.config.task)
"""
PLAIN = {"hook": "", "runtime": "", "expected": "str(self.data.answer)"}
PROGRAM = {
    "hook": (
        "async def setup(self, trace, runtime):\n        await runtime.write('key', str(self.data.answer).encode())"
    ),
    "runtime": ", runtime",
    "expected": "(await runtime.read('key')).decode()",
}


@pytest.mark.parametrize(("module", "parts"), [("my_package.sums", PLAIN), ("sums_in_a_box", PROGRAM)])
def test_a_taskset_from_outside(train, tmp_path, module, parts):
    """Named from a conf file of the user's: one that is an answer to a prompt, and one whose tasks use a runtime."""
    file = tmp_path / f"{module.replace('.', '/')}.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(TASKSET.format(**parts))
    conf = tmp_path / "my_conf" / "env" / "sums.yaml"
    conf.parent.mkdir(parents=True)
    conf.write_text(f"# @package envs.sums\ntaskset: {module}\nargs: {{num_tasks: 12}}\neval_args: {{num_tasks: 2}}\n")
    run = train(
        "env=sums",
        f"hydra.searchpath=[file://{tmp_path}/my_conf]",
        "max_steps=2",
        "orchestrator.batch_size=32",
        "orchestrator.max_async_level=0",
        "orchestrator.eval.k=2",
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert run.status == 0, run.stderr
    assert all(gap < 1e-5 for gap in run.column("logprob_gap/mean"))
    assert 0 < statistics.mean(run.column("reward/sums/mean")) < 1
    assert "eval/sums/avg@2" in run.steps[0]
    assert run.column("rollouts/errored") == [0.0, 0.0]
