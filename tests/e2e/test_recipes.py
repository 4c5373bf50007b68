"""Two steps of each recipe."""

import pytest

NAMES = ("dapo", "dr_grpo", "rloo", "gspo", "cispo", "tis", "gkd", "sdft", "reinforce_pp")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_trains(inline, name):
    run = inline(f"experiment={name}", "debug=fast", "max_steps=2")
    assert run.status == 0, run.stderr
    assert [line["step"] for line in run.steps] == [0, 1, 2]
    assert all(norm > 0 for norm in run.column("grad_norm"))
    if name == "dapo":
        assert run.column("rollouts/trained") == run.column("rollouts/batch"), "no group of equal rewards has a place"
