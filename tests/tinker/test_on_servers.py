"""Weights of a whole snapshot take the place of the base between requests, never during one."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from prl.base.errors import EngineError
from prl.tinker.on_servers import ServedSnapshots
from prl.tinker.wire import RequestError
from prl.trainer.lora import WEIGHTS


class Pool:
    """Notes with which weights each request is answered."""

    def __init__(self):
        self.version, self.has, self.log, self.failure = 0, "base", [], None

    async def generate(self, prompt, sampling, *, n, adapter):
        began = self.has
        await asyncio.sleep(0.01)
        assert self.has == began, "other weights came during a request"
        if self.failure:
            raise self.failure
        self.log.append((began, adapter and Path(adapter).name))
        return []

    async def update_weights(self, version, path, timeout_s):
        self.has = None
        await asyncio.sleep(0.01)
        if self.failure:
            raise self.failure
        self.version, self.has = version, Path(path).name


@pytest.fixture
def served(tmp_path):
    """What samples, with the folders of an adapter and of two models."""
    folders = [tmp_path / name for name in ("adapter", "one", "two")]
    for folder in folders:
        folder.mkdir()
    (folders[0] / WEIGHTS).touch()
    model, config = SimpleNamespace(path=str(tmp_path / "base")), SimpleNamespace(update_timeout_s=1.0)
    return SimpleNamespace(
        snapshots=ServedSnapshots(SimpleNamespace(model=model, config=config), Pool()), folders=folders
    )


async def test_requests_are_answered_in_their_order_each_with_its_weights(served):
    adapter, one, two = served.folders
    asked = [None, adapter, one, None, adapter, one, one, two]
    await asyncio.gather(*(served.snapshots.continued(snapshot, [1], {}, 1) for snapshot in asked))
    base, beside = ("base", None), ("base", "adapter")
    assert served.snapshots.pool.log == [base, beside, ("one", None), base, beside, *[("one", None)] * 2, ("two", None)]
    assert served.snapshots.pool.version == 4


async def test_a_load_that_failed_is_tried_again_and_a_refusal_is_the_requests(served):
    pool = served.snapshots.pool
    pool.failure = EngineError("out of memory", 500)
    with pytest.raises(EngineError, match="out of memory"):
        await served.snapshots.continued(served.folders[1], [1], {}, 1)
    pool.failure = None
    await served.snapshots.continued(None, [1], {}, 1)
    assert pool.log == [("base", None)] and pool.version == 1
    pool.failure = EngineError("temperature", 400)
    with pytest.raises(RequestError, match="temperature"):
        await served.snapshots.continued(None, [1], {}, 1)
