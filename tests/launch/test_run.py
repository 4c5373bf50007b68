"""Which failures of a run have the trainer write a last checkpoint; the first error stays the run's in any case."""

import asyncio
from types import SimpleNamespace

import pytest

from prl.base.errors import NoSignal, PrlError
from prl.launch.launcher import ProcessDied
from prl.launch.run import train_and_keep


@pytest.mark.parametrize(
    ("error", "unsaved", "kept"),
    [
        (PrlError("of an env"), True, True),
        (RuntimeError("a fault of prl's"), True, True),
        (ProcessDied("process 'engine' ended", "engine"), True, True),
        (ProcessDied("process 'teacher' ended", "teacher"), True, True),
        (ProcessDied("process 'trainer' ended", "trainer"), True, False),
        (ProcessDied("process 'trainer rank 1' ended", "trainer rank 1"), True, False),
        (PrlError("its last step has a checkpoint"), False, False),
        (NoSignal("nothing to train on"), False, True),
        (asyncio.CancelledError(), True, False),  # `run` itself keeps what a signal stops
    ],
    ids=str,
)
@pytest.mark.parametrize("then", [None, PrlError("and the monitors"), asyncio.CancelledError()], ids=repr)
async def test_failing_run_is_kept_and_raises_its_error(tmp_path, error, unsaved, kept, then):
    (tmp_path / "config.yaml").touch()
    asked = []

    async def fail(*_):
        raise error

    async def last_checkpoint(end, timeout_s, why):
        asked.append((end, timeout_s))
        if then is not None:
            raise then

    orchestrator = SimpleNamespace(run=lambda: None, run_dir=tmp_path, unsaved=unsaved, end="end")
    supervisor = SimpleNamespace(guard=fail, last_checkpoint=last_checkpoint)
    with pytest.raises(type(error)) as raised:
        await train_and_keep(orchestrator, supervisor, 7.0)
    assert raised.value is error
    assert asked == [("end", 7.0)] * kept


async def test_removed_run_is_not_written_again(tmp_path):
    async def fail(*_):
        raise PrlError("config.yaml is gone")

    orchestrator = SimpleNamespace(run=lambda: None, run_dir=tmp_path, unsaved=True, end=None)
    with pytest.raises(PrlError, match="is gone"):
        await train_and_keep(orchestrator, SimpleNamespace(guard=fail), 7.0)
