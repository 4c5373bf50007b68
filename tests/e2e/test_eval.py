"""`python -m prl.eval` and `python -m prl.tools.chat` on the shared engines, against the evaluation of training."""

import json
from statistics import fmean

import pytest

K, TASKS = 4, 16
IN_PROCESS = ("engine=transformers", "launcher=inline")


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def prl(run_command, tmp_path, monkeypatch):
    """`prl(module, *arguments, typed="")`: a command; it has to succeed."""
    monkeypatch.setenv("COLUMNS", "150")

    def run(module, *arguments, typed=""):
        done = run_command(tmp_path, module, *arguments, typed=typed, timeout=200)
        assert done.returncode == 0, done.stderr
        return done

    return run


@pytest.mark.slow
def test_the_base_a_checkpoint_and_another_model_on_one_engine(inline, prl, tmp_path):
    evaluated = [f"orchestrator.eval.k={K}", f"orchestrator.eval.num_tasks={TASKS}"]
    run = inline("max_steps=2", "orchestrator.batch_size=64", "trainer.optim.lr=1e-3", *evaluated)
    asked = [*IN_PROCESS, f"k={K}", f"num_tasks={TASKS}", "run.name=it"]
    done = prl("prl.eval", "tiny", "run", "tiny-teacher", *asked)
    assert "run/step_000002" in done.stdout and f"{TASKS} tasks, {K} samples each" in done.stdout
    folder = tmp_path / "outputs" / "it"
    base, trained, teacher = json.loads((folder / "result.json").read_text())["targets"]
    # The same weights, tasks, seeds and code as in training: the same rollouts.
    for step, version, target in ((0, 0, base), (1, 2, trained)):
        ours = records(folder / "rollouts" / f"eval_math_step_{step:06d}.jsonl")
        theirs = records(run.dir / "rollouts" / f"eval_math_step_{version:06d}.jsonl")
        same = [a["messages"] == b["messages"] for a, b in zip(ours, theirs, strict=True)]
        assert len(same) == K * TASKS and fmean(same) > 0.95, "but for the rounding of batches of another composition"
        expected = next(line for line in run.steps if line["step"] == version)[f"eval/math/avg@{K}"]
        assert target["envs"][0]["avg"]["mean"] == pytest.approx(expected, abs=0.03)
    found = teacher["envs"][0]
    assert found["avg"]["mean"] > 0.8 and found["difference"]["low"] > 0.2, "the teacher is better, beyond its interval"
    assert (found["tasks"], found["k"], found["errored"]) == (TASKS, K, 0.0)


@pytest.mark.engine
def test_an_endpoint_of_a_game_and_a_chat(prl, engine, teacher_url, monkeypatch):
    monkeypatch.setenv("PRL_TOKEN", engine.token)
    endpoint = [teacher_url, "endpoint.api_key_var=PRL_TOKEN"]
    played = [*endpoint, "env=kuhn_poker", "k=2", "num_tasks=4", "run.name=game"]
    done = prl("prl.eval", *played)
    assert "kuhn_poker" in done.stdout and "avg@2" in done.stdout
    typed = "12+34=\n/reset\n15+26=\n"
    done = prl("prl.tools.chat", *endpoint, "sampling.temperature=0", typed=typed)
    assert done.stdout == "46\n41\n"
