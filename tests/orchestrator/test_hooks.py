"""Whatever a hook of the user's raises during a run ends it with one error that names the hook."""

import asyncio
from collections import Counter

import pytest

from prl.algorithms.grpo import GRPOAlgorithm
from prl.base.errors import PrlError
from prl.curriculum.pools import TaskCurriculum
from prl.filters.base import Filter
from prl.monitors.base import Monitor, Monitors


class Mine(Monitor):
    def step(self, line):
        pass


class Never(Filter):
    def matches(self, rollout):
        return False


HOOKS = {  # the hook's class, and how the error begins
    "score_rollout": (GRPOAlgorithm, "env 'toy', GRPOAlgorithm: "),
    "score_group": (GRPOAlgorithm, "env 'toy', GRPOAlgorithm: "),
    "score_batch": (GRPOAlgorithm, "env 'toy', GRPOAlgorithm: "),
    "observe": (GRPOAlgorithm, "env 'toy', GRPOAlgorithm: "),
    "observe_batch": (GRPOAlgorithm, "env 'toy', GRPOAlgorithm: "),
    "state_dict": (GRPOAlgorithm, "toy.algo: GRPOAlgorithm.state_dict failed: "),
    "matches": (Never, "filters.pre_batch.mine: Never.matches failed: "),
    "next": (TaskCurriculum, "env 'toy', curriculum: TaskCurriculum failed: "),
    "update": (TaskCurriculum, "env 'toy', curriculum: TaskCurriculum failed: "),
    "returns": (TaskCurriculum, "env 'toy', curriculum: TaskCurriculum failed: "),
    "take_evicted": (TaskCurriculum, "env 'toy', curriculum: TaskCurriculum failed: "),
    "counts": (TaskCurriculum, "env 'toy', curriculum: TaskCurriculum failed: "),
    "retired_to": (TaskCurriculum, "env 'toy', curriculum: TaskCurriculum failed: "),
    "step": (Mine, "monitor.mine: Mine.step failed: "),
}


@pytest.fixture
def run(train, make_env, tmp_path):
    """`run()`: two steps, with a checkpoint at each."""

    def start():
        monitors = Monitors({"mine": Mine()})
        monitors.start(tmp_path, max_steps=2, run_config={})
        env = make_env(pre={"mine": Never()}, curriculum={"easy_threshold": 1.0})
        return train([env], steps=2, every=1, monitors=monitors)

    return start


@pytest.mark.parametrize("hook", HOOKS)
async def test_failing_hook_ends_the_run_by_its_name(run, monkeypatch, hook):
    cls, beginning = HOOKS[hook]

    def fails(*_, **__):
        raise SystemExit(3)

    async def fails_later(*_):
        await asyncio.sleep(0)
        fails()

    monkeypatch.setattr(cls, hook, fails_later if hook == "score_rollout" else fails)
    with pytest.raises(PrlError) as caught:
        await run()
    assert str(caught.value).startswith(f"{beginning}SystemExit: 3 ({__file__}, line ")


async def test_a_curriculum_that_fails_to_observe_ends_the_run_by_its_class(run, monkeypatch):
    monkeypatch.setattr(TaskCurriculum, "observe", lambda *_: 1 / 0)
    with pytest.raises(PrlError, match="env 'toy', curriculum: TaskCurriculum failed: ZeroDivisionError"):
        await run()


@pytest.mark.parametrize("name", ["ended", "pooled"])
async def test_failing_property_ends_the_run_by_its_class(run, monkeypatch, name):
    monkeypatch.setattr(TaskCurriculum, name, property(lambda _: Counter()[1 / 0]))
    with pytest.raises(PrlError, match=r"curriculum: TaskCurriculum.* failed: ZeroDivisionError"):
        await run()


async def test_run_whose_hooks_are_sound_trains(run, tmp_path):
    await run()
    assert (tmp_path / "checkpoints" / "step_000002").exists()
