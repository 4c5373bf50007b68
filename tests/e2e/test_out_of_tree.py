"""A package of somebody else's: modules, and conf files that name them. EXTENDING trains the other kinds of parts."""

import textwrap

import pytest

pytestmark = pytest.mark.slow

PACKAGE = {
    "ours/__init__.py": "",
    "ours/algorithm.py": '''
        """Only the best of a group is reinforced."""
        from dataclasses import dataclass
        from prl.algorithms.base import Algorithm

        @dataclass(kw_only=True)
        class BestAlgorithm(Algorithm):
            group_relative = True
            scale: float = 1.0

            def score_group(self, group):
                best = max(rollout.reward for rollout in group)
                for rollout in group:
                    rollout.assign_advantages(self.scale * (rollout.reward == best))
    ''',
    "ours/filter.py": """
        from prl.filters.base import Filter

        class Longer(Filter):  # an ordinary class, which passes on what it does not know
            def __init__(self, tokens, **options):
                super().__init__(**options)
                self.tokens = tokens

            def matches(self, rollout):
                return rollout.num_completion_tokens > self.tokens
    """,
    "ours/weights.py": """
        from prl.weights.files import FileWeights

        class CountingWeights(FileWeights):
            def __init__(self, prefix="sent"):
                super().__init__()
                self.prefix = prefix

            async def load(self, engine, version, timeout_s):
                await super().load(engine, version, timeout_s)
                with (self.transport.run_dir / f"{self.prefix}.txt").open("a") as log:
                    log.write(f"{version}\\n")
    """,
    "ours/optimiser.py": """
        import torch
        from prl.trainer.trainer import Trainer

        class SlowSGD(torch.optim.SGD):
            def __init__(self, params, lr, slowness=1.0):
                super().__init__(params, lr=lr / slowness)

        class CountingTrainer(Trainer):
            def __init__(self, *, label="x", **rest):
                super().__init__(**rest)
                self.label = label

            def train_step(self, batch):
                return super().train_step(batch) | {f"counted/{self.label}": float(len(batch.micro_batches))}
    """,
    "ours/conf/__init__.py": "",
    "ours/conf/algo/best.yaml": "{_target_: ours.algorithm.BestAlgorithm, scale: 0.5}",
    "ours/conf/filters/longer.yaml": "post_batch: {longer: {_target_: ours.filter.Longer, enforce: true, tokens: 2}}",
    "ours/conf/weights/counting.yaml": "{_target_: ours.weights.CountingWeights, prefix: loaded}",
}
CHOSEN = (
    "hydra.searchpath=[pkg://ours.conf]",
    "algo=best",
    "filters=longer",
    "weights=counting",
    "optim=custom",
    "trainer.optim._target_=ours.optimiser.SlowSGD",
    "+trainer.optim.slowness=10.0",
    "trainer._target_=ours.optimiser.CountingTrainer",
    "+trainer.label=rows",
)


def test_parts_from_a_package_of_ones_own(inline, tmp_path):
    for name, text in PACKAGE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip("\n"))
    rest = ("max_steps=2", "orchestrator.batch_size=64", "orchestrator.group_size=8", "orchestrator.eval.every=null")
    run = inline(*CHOSEN, *rest)
    assert run.status == 0, run.stderr
    records = run.rollouts(1)
    for record in records:
        assert (record["outcome"]["stage"] == "trained") == (record["completion_tokens"] <= 2)
        assert record["advantage"] in (0.0, 0.5), "the algorithm"
    assert any(record["matched"] == {"post_batch": "longer"} for record in records), "the filter"
    assert (run.dir / "loaded.txt").read_text().split()[-1] == "2", "the weights"
    assert all(count >= 1 for count in run.column("counted/rows")), "the trainer"
