"""A package of somebody else's adds one of everything: a module each, and a conf file for a name."""

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.slow

PACKAGE = {
    "pyproject.toml": """
        [build-system]
        requires = ["hatchling"]
        build-backend = "hatchling.build"
        [project]
        name = "ours"
        version = "1"
        [tool.hatch.build.targets.wheel]
        packages = ["ours"]
    """,
    "ours/__init__.py": "",
    "ours/algorithm.py": '''
        """Only the best of a group is reinforced."""
        from dataclasses import dataclass
        from prl.orchestrator.algo.base import Algorithm

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
        from prl.orchestrator.filters.base import Filter

        class Longer(Filter):  # an ordinary class, which passes on what it does not know
            def __init__(self, tokens, **knobs):
                super().__init__(**knobs)
                self.tokens = tokens

            def matches(self, rollout):
                return rollout.num_completion_tokens > self.tokens
    """,
    "ours/loss.py": """
        from prl.trainer.loss import LossInputs, LossOutputs

        def reinforce(inputs: LossInputs, scale: float) -> LossOutputs:
            terms = -scale * inputs.trainer_logprobs * inputs.advantages
            return LossOutputs(terms[inputs.loss_mask].sum(), {"scale": inputs.advantages.new_tensor(scale)})
    """,
    "ours/env.py": """
        import verifiers.v1 as vf
        __all__ = ["ShoutTaskset"]

        class ShoutTask(vf.Task):
            @vf.reward
            async def answer(self, trace: vf.Trace) -> float:
                return min(len(trace.last_reply), 5) / 5

        class ShoutConfig(vf.TasksetConfig):
            num_tasks: int = 10

        class ShoutTaskset(vf.Taskset[ShoutTask, ShoutConfig]):
            def load(self):
                for number in range(self.config.num_tasks):
                    yield ShoutTask(vf.TaskData(prompt=f"{number}+{number}="))
    """,
    "ours/buffer.py": """
        from dataclasses import dataclass
        from prl.orchestrator.buffer.task_buffer import TaskBuffer

        @dataclass(kw_only=True)
        class FirstTasks(TaskBuffer):
            first: int = 1

            def load(self, tasks, **where):
                super().load(tasks[: self.first], **where)
    """,
    "ours/monitor.py": """
        from dataclasses import dataclass
        from prl.monitors.base import Monitor

        @dataclass(kw_only=True)
        class Notebook(Monitor):
            file: str = "notes.txt"

            def start(self, run_dir, **_):
                self.path = run_dir / self.file

            def step(self, line):
                with self.path.open("a") as notes:
                    notes.write(f"{line['step']}\\n")
    """,
    "ours/launcher.py": """
        import os
        from dataclasses import dataclass
        from prl.launch.local import LocalLauncher

        @dataclass(kw_only=True)
        class NiceLauncher(LocalLauncher):
            nice: int = 0

            def start_trainer(self, spec):
                (spec.run_dir / "launcher.txt").write_text(f"nice {self.nice}, {spec.num_processes} rank")
                super().start_trainer(spec)
    """,
    "ours/transport.py": """
        from prl.wire.files import FileTransport

        class CountingTransport(FileTransport):
            def __init__(self, run_dir, prefix="sent"):
                super().__init__(run_dir)
                self.log = run_dir / f"{prefix}.txt"

            def send_batch(self, batch, rank):
                super().send_batch(batch, rank)
                with self.log.open("a") as log:
                    log.write(f"{batch.step}\\n")
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
    "ours/conf/algo/best.yaml": """
        _target_: ours.algorithm.BestAlgorithm
        scale: 0.5
    """,
    "ours/conf/filters/longer.yaml": """
        post_batch:
          longer: {_target_: ours.filter.Longer, enforce: true, tokens: 2}
    """,
    "ours/conf/loss/reinforce.yaml": """
        _target_: ours.loss.reinforce
        _partial_: true
        scale: 2.0
    """,
    "ours/conf/env/shout.yaml": """
        # @package envs.shout
        taskset: ours.env
        args: {num_tasks: 7}
    """,
    "ours/conf/buffer/first.yaml": """
        _target_: ours.buffer.FirstTasks
        first: 3
    """,
    "ours/conf/monitor/notebook.yaml": """
        # @package monitor.notebook
        _target_: ours.monitor.Notebook
    """,
    "ours/conf/launcher/nice.yaml": """
        _target_: ours.launcher.NiceLauncher
        nice: 7
    """,
    "ours/conf/transport/counting.yaml": """
        _target_: ours.transport.CountingTransport
        prefix: shipped
    """,
}
CHOSEN = (
    "hydra.searchpath=[pkg://ours.conf]",
    "algo=best",
    "filters=longer",
    "loss=reinforce",
    "env=shout",
    "buffer=first",
    "monitor=notebook",
    "launcher=nice",
    "transport=counting",
    "trainer.optim._target_=ours.optimiser.SlowSGD",
    "+trainer.optim.slowness=10.0",
    "trainer._target_=ours.optimiser.CountingTrainer",
    "+trainer.label=rows",
)


@pytest.fixture
def command(inline_command):
    """Of `train`: its engine is in its process, its trainer the launcher's."""

    def make(*overrides, **options):
        argv, env = inline_command(*overrides, **options)
        argv.remove("launcher=inline")
        return argv, env

    return make


def test_one_of_each_kind_from_a_package_of_ones_own(train, tmp_path):
    source, site = tmp_path / "source", tmp_path / "site"
    for name, text in PACKAGE.items():
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip("\n"))
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", str(site)]
    subprocess.run([*install, str(source)], check=True, capture_output=True)
    run = train(
        *CHOSEN,
        "max_steps=2",
        "orchestrator.batch_size=64",
        "orchestrator.group_size=8",
        "orchestrator.eval.every=null",
        env={"PYTHONPATH": str(site)},
    )
    assert run.status == 0, run.stderr
    assert run.column("scale") == [2.0, 2.0], "the loss"
    records = run.rollouts(1)
    assert {record["env"] for record in records} == {"shout"}
    for record in records:
        assert (record["outcome"]["stage"] == "trained") == (record["completion_tokens"] <= 2)
        assert record["advantage"] in (0.0, 0.5), "the algorithm"
    assert any(record["matched"] == {"post_batch": "longer"} for record in records), "the filter"
    assert {record["task"] for step in (1, 2) for record in run.rollouts(step)} == {0, 1, 2}, "the buffer"
    assert (run.dir / "notes.txt").read_text().split() == ["0", "1", "2"], "the monitor"
    assert (run.dir / "metrics.jsonl").exists(), "and the others are still there"
    assert (run.dir / "launcher.txt").read_text() == "nice 7, 1 rank", "the launcher"
    assert (run.dir / "shipped.txt").read_text().split() == ["1", "2"], "the transport"
    assert all(count >= 1 for count in run.column("counted/rows")), "the trainer"
