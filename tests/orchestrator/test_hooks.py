"""Whatever a hook of the user's raises during a run ends it with one error that names the hook; no engine."""

import asyncio
from collections import Counter

import pytest

from prl.errors import PrlError
from prl.monitors.base import Monitor, Monitors
from prl.orchestrator.algo.grpo import GRPOAlgorithm
from prl.orchestrator.buffer.task_buffer import TaskBuffer
from prl.orchestrator.filters.base import Filter
from prl.rollouts.rollout import IN_BATCH
from prl.wire.files import FileTransport

RAISED = [SystemExit(0), SystemExit(3), KeyboardInterrupt(), BaseException("panic"), ValueError("a bug")]


class Mine(Monitor):
    def step(self, line):
        pass


class Never(Filter):
    def matches(self, rollout):
        return False


HOOKS = {
    "score_rollout": (GRPOAlgorithm, "env 'toy', GRPOAlgorithm: "),
    "score_group": (GRPOAlgorithm, "env 'toy', GRPOAlgorithm: "),
    "score_batch": (GRPOAlgorithm, "env 'toy', GRPOAlgorithm: "),
    "observe_batch": (GRPOAlgorithm, "env 'toy', GRPOAlgorithm: "),
    "state_dict": (GRPOAlgorithm, "toy.algo: GRPOAlgorithm.state_dict failed: "),
    "matches": (Never, "filters.pre_batch.mine: Never.matches failed: "),
    "next": (TaskBuffer, "env 'toy', buffer: TaskBuffer failed: "),
    "update": (TaskBuffer, "env 'toy', buffer: TaskBuffer failed: "),
    "returns": (TaskBuffer, "env 'toy', buffer: TaskBuffer failed: "),
    "take_evicted": (TaskBuffer, "env 'toy', buffer: TaskBuffer failed: "),
    "counts": (TaskBuffer, "env 'toy', buffer: TaskBuffer failed: "),
    "retired_to": (TaskBuffer, "env 'toy', buffer: TaskBuffer failed: "),
    "step": (Mine, "monitor.mine: Mine.step failed: "),
}
"""By method: its class, and how the error begins."""


@pytest.fixture
def train(make_orchestrator, make_env, make_filter, tmp_path):
    """`train()`: two steps with a trainer that publishes at once, and a checkpoint at each."""

    async def run():
        monitors = Monitors({"mine": Mine()})
        monitors.start(tmp_path, max_steps=2, run_config={})
        env = make_env(pre={"mine": make_filter(Never)}, buffer={"easy_threshold": 1.0})
        orchestrator = make_orchestrator([env], monitors, 2)
        transport = FileTransport(tmp_path)

        async def trainer():
            for step in (1, 2):
                while transport.receive_batch(step, 0) is None:
                    await asyncio.sleep(0.001)
                (tmp_path / "checkpoints" / f".step_{step:06d}").mkdir(parents=True)
                transport.publish(step, {"tokens/trained": 60.0})

        training = asyncio.create_task(trainer())
        try:
            async with asyncio.timeout(20):
                await orchestrator.run()
                orchestrator.finish()
        finally:
            training.cancel()

    return run


@pytest.mark.parametrize("error", RAISED, ids=repr)
@pytest.mark.parametrize("hook", HOOKS)
async def test_it_ends_the_run_by_the_name_of_the_hook(train, monkeypatch, hook, error):
    cls, says = HOOKS[hook]

    def fails(*_, **__):
        raise error.with_traceback(None)

    async def fails_later(*_):
        await asyncio.sleep(0)
        fails()

    monkeypatch.setattr(cls, hook, fails_later if hook == "score_rollout" else fails)
    with pytest.raises(PrlError) as caught:
        await train()
    assert str(caught.value).startswith(says)
    if not (
        isinstance(error, ValueError) and hook.startswith(("score", "observe"))
    ):  # it may be prl's own, of what was written
        said = f"{type(error).__name__}: {error}".removesuffix(": ")
        assert str(caught.value).endswith(f"{said} ({__file__}, line {fails.__code__.co_firstlineno + 1})")


@pytest.mark.parametrize("hook", ["ended", "pooled"])
async def test_so_does_a_property(train, monkeypatch, hook):
    monkeypatch.setattr(TaskBuffer, hook, property(lambda _: Counter()[1 / 0]))
    with pytest.raises(PrlError, match="env 'toy', buffer: TaskBuffer failed: ZeroDivisionError"):
        await train()


async def test_an_algorithm_is_shown_the_rollouts_of_each_batch_that_is_trained(train, monkeypatch):
    seen = []
    monkeypatch.setattr(GRPOAlgorithm, "observe_batch", lambda _, rollouts: seen.append(rollouts))
    await train()
    assert len(seen) == 2 and all({rollout.env_name for rollout in batch} == {"toy"} for batch in seen)
    rollouts = [rollout for batch in seen for rollout in batch]
    assert {rollout.stage for rollout in rollouts} <= set(IN_BATCH) and len({*map(id, rollouts)}) == len(rollouts) > 0


async def test_credit_of_a_batch_is_of_what_is_trained_and_reaches_the_trainer(train, tmp_path, monkeypatch):
    seen = []

    def score_batch(_, groups):
        seen.append([len(group) for group in groups])
        for rollout in [rollout for group in groups for rollout in group]:
            rollout.assign_advantages(7.0)

    monkeypatch.setattr(GRPOAlgorithm, "score_batch", score_batch)
    sent = []
    send = FileTransport.send_batch
    monkeypatch.setattr(
        FileTransport, "send_batch", lambda self, batch, rank: (sent.append(batch), send(self, batch, rank))
    )
    await train()
    assert len(seen) == 2 and all(seen)
    credits = {a for batch in sent for row in batch.micro_batches for a in row.advantages}
    assert credits == {0.0, 7.0}


async def test_without_one_that_fails_it_trains(train, tmp_path):
    await train()
    assert (tmp_path / "checkpoints" / "step_000002").exists()
