"""Adapters beside an engine's model: each is loaded once, and stays while a request has it."""

import asyncio
import os
from types import SimpleNamespace

import pytest

from prl.engines.vllm.adapters import Adapters
from prl.engines.vllm.weights import ADAPTER, WeightsError


class Engine:
    """Notes what it has."""

    errored = False

    def __init__(self):
        self.has = {}
        self.wrong = False

    async def add_lora(self, request):
        await asyncio.sleep(0)
        if self.wrong:
            raise RuntimeError("LoRA rank 64 is greater than max_lora_rank 16.")
        self.has[request.lora_int_id] = os.path.basename(request.lora_path)

    async def remove_lora(self, number):
        del self.has[number]

    @property
    def names(self):
        return sorted(self.has.values())


@pytest.fixture
def served(tmp_path):
    """An engine with room for two adapters, and `folder(name)`, which makes one."""

    def folder(name, at=1):
        (tmp_path / name).mkdir(exist_ok=True)
        file = tmp_path / name / ADAPTER
        file.touch()
        os.utime(file, ns=(at, at))
        return str(tmp_path / name)

    engine = Engine()
    return SimpleNamespace(engine=engine, adapters=Adapters(engine, lambda folder: None, 2), folder=folder)


async def test_an_adapter_is_loaded_once_and_the_oldest_without_requests_leaves(served):
    a, b, c = map(served.folder, "abc")

    async def use(path):
        async with served.adapters.using(path) as request:
            await asyncio.sleep(0.01)
            return request.lora_name

    assert len({*await asyncio.gather(use(a), use(a), use(a))}) == 1 and len(served.engine.has) == 1
    await use(b)
    await use(a)
    await use(c)
    assert served.engine.names == ["a", "c"]
    async with served.adapters.using(None) as request:
        assert request is None
    before = await use(a)
    assert await use(served.folder("a", at=2)) != before, "another adapter in its place"


async def test_a_request_keeps_its_adapter_and_others_wait(served):
    a, b, c = map(served.folder, "abc")
    async with served.adapters.using(a):
        async with served.adapters.using(b):
            waiting = asyncio.create_task(anext(served.adapters.using(c).gen))
            await asyncio.sleep(0.05)
            assert not waiting.done() and served.engine.names == ["a", "b"]
        await asyncio.wait_for(waiting, 5)
        assert served.engine.names == ["a", "c"]


async def test_what_is_gone_is_unloaded_and_what_does_not_fit_refused(served):
    a, b = map(served.folder, "ab")
    async with served.adapters.using(a):
        pass
    os.remove(os.path.join(a, ADAPTER))
    os.rmdir(a)
    async with served.adapters.using(b):
        assert served.engine.names == ["b"]
    with pytest.raises(WeightsError, match="no such folder"):
        async with served.adapters.using(a):
            pass
    served.engine.wrong = True
    with pytest.raises(WeightsError, match="LoRA rank 64 is greater"):
        async with served.adapters.using(served.folder("c")):
            pass
    with pytest.raises(WeightsError, match="no room for adapters"):
        async with Adapters(served.engine, lambda folder: None, 0).using(b):
            pass
