"""`python -m prl.train` on a real engine with a real trainer."""

import json
import os
import re
import statistics
import subprocess
import sys

import pytest
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, AutoTokenizer

from prl.tools.report.shares import read_spans, shares

PROMISED = """step reward/all/mean reward/math/mean loss/mean mismatch_kl/all/mean entropy/all/mean logprob_gap/mean
    off_policy/mean off_policy/max time/step time/rollout time/train time/update_weights time/wait_for_batch
    time/wait_for_policy idle/engine tokens/generated_per_second tokens/trained_per_second"""


@pytest.mark.engine
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
        # An update that ends with the next step is on that one's line.
        assert set(PROMISED.split()) - set(line) <= {"time/update_weights"}
    assert sum("time/update_weights" in line for line in lines) > 20

    result = json.loads((folder / "result.json").read_text())
    assert (result["status"], result["steps"], result["error"]) == ("completed", 25, None)
    assert result["metrics"]["reward/all/mean"] == rewards[-1]
    saved = OmegaConf.load(folder / "config.yaml")
    assert saved.max_steps == 25
    assert OmegaConf.load(folder / ".hydra" / "overrides.yaml") == argv[3:]
    assert {path.name for path in (folder / "logs").iterdir()} >= {"orchestrator.log", "trainer.log", "engine.log"}
    assert [path.name for path in (folder / "weights").iterdir()] == ["step_000025"]  # older versions are gone
    assert list((folder / "wandb").glob("offline-run-*"))
    assert str(folder) in done.stderr and "completed 25 steps" in done.stderr
    log = (folder / "logs" / "orchestrator.log").read_text()
    for step in range(26):  # a line a step off a terminal, and the same in the log
        (line,) = [line for line in done.stderr.splitlines() if f"  step {step}/25  " in line]
        assert line.split("  ", 1)[1] in log
    known = re.compile(
        r"starting engine, trainer; |\d+:\d\d  |run dir|completed|look at"
        r"|starting Weights & Biases|held-out reward \d\.\d\d to \d\.\d\d$"
        r"|engine \d+ % busy \(\d+ % loading weights\), trainer \d+ %: "
    )
    others = [line for line in done.stderr.splitlines() if not known.match(line)]
    assert not others, "nothing else is said"
    provenance = json.loads((folder / "provenance.json").read_text())
    assert provenance["command"].endswith("-m prl.train max_steps=25 run.name=first monitor=wandb")
    assert provenance["data"]["math"]["train"]["tasks"] == 10000

    records = [json.loads(line) for line in (folder / "rollouts" / "step_000024.jsonl").read_text().splitlines()]
    assert len(records) == 256
    assert [message["role"] for message in records[0]["messages"]] == ["user", "assistant"]
    assert any(
        record["matched"].get("post_batch") == "zero_advantage" and record["outcome"]["stage"] != "trained"
        for record in records
    )

    problems = []
    spans = read_spans(folder, problems)
    busy = shares(spans)
    assert not problems and busy.sentence in done.stderr
    assert [name for name in busy.did if name != "evaluation"] == ["orchestrator", "engine", "trainer"]
    evaluated = [span.step for span in spans if span.what == "evaluating"]
    assert evaluated == [line["step"] for line in lines if "eval/math/avg@1" in line]

    exported = sorted(path.name for path in (folder / "tokens").iterdir())
    assert len(exported) == 8 and exported[0] == "step_000001" and exported[-1] == "step_000025"
    lines = [json.loads(line) for line in (folder / "tokens/step_000025/rank_0.jsonl").read_text().splitlines()]
    records = [json.loads(line) for line in (folder / "rollouts/step_000025.jsonl").read_text().splitlines()]
    replies = {(record["group"], record["rollout"]): record["messages"][1]["content"] for record in records}
    assert len(lines) == 32
    for line in lines:
        reply = "".join(text for text, sampled in zip(line["text"], line["mask"], strict=True) if sampled)
        assert reply.removesuffix("<|im_end|>") == replies[line["group"], line["rollout"]]
    page = (folder / "report.html").read_text()
    assert "Completed 25 steps" in page and "Example groups" in page and '"log-ratio"' in page

    checkpoint = folder / "checkpoints" / "step_000025"
    AutoTokenizer.from_pretrained(checkpoint)
    assert AutoModelForCausalLM.from_pretrained(checkpoint).config.tie_word_embeddings

    again = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert again.returncode == 2
    assert "already holds a run" in again.stderr and "run.name" in again.stderr
    assert (folder / "metrics.jsonl").read_text().count("\n") == 26


@pytest.mark.slow
def test_the_other_options_are_read(inline):
    """Options that change how, not what, two trainer ranks among them: the run still learns on-policy-exactly."""
    run = inline(
        "launcher=local",
        "trainer.num_processes=2",
        "trainer.gradient_checkpointing=full",
        "trainer.tokens_per_forward=512",
        "trainer.head_chunk=64",
        "checkpoint.every=2",
        "trainer.schedule.warmup_steps=2",
        "schedule=cosine",
        "trainer.optim.weight_decay=0.1",
        "filters=none",
        "curriculum.shuffle=false",
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
    assert run.column("lr") == pytest.approx([4e-4 / 3, 4e-4 * 2 / 3, 4e-4 * 0.1])
    assert run.column("rollouts/trained") == [64.0] * 3  # nothing is filtered
    assert sorted(path.name for path in (run.dir / "checkpoints").iterdir()) == ["step_000002", "step_000003"]
    assert max(record["completion_tokens"] for record in run.rollouts(1)) == 3
    assert [line["step"] for line in run.steps if "eval/math/avg@2" in line] == [0, 2, 3]
    evaluated = (run.dir / "rollouts" / "eval_math_step_000000.jsonl").read_text().splitlines()
    assert len(evaluated) == 8
    texts = [json.loads(line)["messages"][-1]["content"] for line in evaluated]
    assert texts[0::2] == texts[1::2]  # greedy
    tasks = [record["task"] for record in run.rollouts(1)][::8]
    assert tasks == sorted(tasks)  # in the taskset's own order


TASKSET = """
import verifiers.v1 as vf
__all__ = ["SumTaskset"]


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData]):
    async def setup(self, trace, runtime):
        await runtime.write("key", str(self.data.answer).encode())

    @vf.reward
    async def right(self, trace, runtime) -> float:
        return float(trace.last_reply == (await runtime.read("key")).decode())


class SumConfig(vf.TasksetConfig):
    num_tasks: int = 20


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for left in range(self.config.num_tasks):
            yield SumTask(SumData(prompt=f"{left}+7=", answer=left + 7), self.config.task)
"""


@pytest.mark.engine
def test_a_taskset_of_the_users_whose_tasks_use_a_runtime(train, tmp_path):
    """Named from a conf file of the user's. Played by verifiers' harness, which asks an engine over HTTP.

    One that is an answer to a prompt is in prl/EXTENDING.md, trained there.
    """
    (tmp_path / "sums_in_a_box.py").write_text(TASKSET)
    conf = tmp_path / "my_conf" / "env" / "sums.yaml"
    conf.parent.mkdir(parents=True)
    conf.write_text("# @package envs.sums\ntaskset: sums_in_a_box\nargs: {num_tasks: 12}\neval_args: {num_tasks: 2}\n")
    run = train(
        "env=sums",
        f"hydra.searchpath=[file://{tmp_path}/my_conf]",
        "max_steps=2",
        "orchestrator.batch_size=16",
        "orchestrator.max_async_level=0",
        "orchestrator.eval.k=2",
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert run.status == 0, run.stderr
    assert all(gap < 1e-5 for gap in run.column("logprob_gap/mean"))
    assert 0 < statistics.mean(run.column("reward/sums/mean")) < 1
    assert "eval/sums/avg@2" in run.steps[0]
    assert run.column("rollouts/errored") == [0.0, 0.0]


@pytest.mark.slow
def test_graders_in_workers_start_without_a_word(inline_command):
    argv, env = inline_command(
        "max_steps=1", "orchestrator.batch_size=16", "orchestrator.eval.every=null", "envs.math.in_process=false"
    )
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr
