"""tiny_vl learns from rewards to say what it sees, and learns nothing from pictures that belong to other questions."""

import pytest

pytestmark = pytest.mark.slow

COLOURS = (
    "model=tiny_vl",
    "model.lr=4e-4",
    "env=shapes",
    "envs.shapes.args.kinds=[colour]",
    "envs.shapes.args.num_tasks=1500",
)
SHORT = ("max_steps=12", "orchestrator.eval.every=12", "orchestrator.eval.num_tasks=100", "sampling.max_tokens=12")


@pytest.mark.parametrize(("shuffled", "low", "high"), [("false", 0.45, 1.0), ("true", 0.05, 0.35)])
def test_colours_are_learnt_from_the_pictures(inline, shuffled, low, high):
    """Held-out tasks have their own pictures in both runs."""
    own = "envs.shapes.eval_args.shuffled=false"
    run = inline(*COLOURS, *SHORT, f"envs.shapes.args.shuffled={shuffled}", f"+{own}")
    assert run.status == 0, run.stderr
    before, after = (line["eval/shapes/avg@1"] for line in run.steps if "eval/shapes/avg@1" in line)
    assert 0.05 < before < 0.35
    assert low < after < high
