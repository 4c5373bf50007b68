"""Runs on tiny models with chat templates of other people's shapes, which know the replies before they are trained."""

import json

import pytest
import template_shapes
from template_shapes import SHAPES, TAUGHT, teach, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.name in TAUGHT], ids=lambda shape: shape.name)
def test_a_model_that_knows_the_replies_earns_the_reward_for_them(inline, tmp_path, shape):
    """At the first step, with its end of a turn and without the thought that its prompt opens."""
    asked = [(f"Say number {number}.", str(number)) for number in range(10)]
    tokenizer = tiny_tokenizer(shape)
    model = tiny_model(tokenizer)
    teach(model, tokenizer, [(question, f"{shape.thinks}{reply}{shape.end_of_turn}") for question, reply in asked])
    folder = template_shapes.save(tmp_path / "model", shape, tokenizer, model)
    data = tmp_path / "say.jsonl"
    data.write_text("".join(json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in asked))
    run = inline(
        "model=hf",
        f"model.path={folder}",
        "model.max_model_len=256",
        "env=jsonl",
        f"envs.jsonl.args.path={data}",
        "envs.jsonl.args.eval_fraction=0",
        "envs.jsonl.eval_args=null",
        "algo=reward",
        "orchestrator.batch_size=40",
        "orchestrator.group_size=4",
        "orchestrator.eval.every=null",
        "orchestrator.max_async_level=0",
        "sampling.max_tokens=24",
        "max_steps=2",
    )
    assert run.status == 0, run.stderr
    assert run.column("reward/all/mean")[0] > 0.9
    assert max(run.column("logprob_gap/mean")) < 1e-5
    assert [rollout["outcome"]["stage"] for rollout in run.rollouts(1)] == ["trained"] * 40
