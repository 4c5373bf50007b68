"""Adapters (LoRA) that an engine has beside its model, each for the requests that name it."""

import asyncio
import contextlib
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from prl.base.text import in_one_line
from prl.engines.vllm.alive import while_alive
from prl.engines.vllm.weights import ADAPTER, WeightsError, folder_of

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM


class Adapters:
    """Loads adapters when they are asked for, and keeps each until it is gone or its place is wanted.

    One that a request has stays: an engine that had to read it again, and could not, would end.

    Args:
        engine: Has them.
        check: Raises WeightsError for a folder that does not fit the model.
        limit: Adapters that the engine has room for; 0 = it has none.
    """

    def __init__(self, engine: "AsyncLLM", check: Callable[[Path], None], limit: int):
        self.engine, self.check, self.limit = engine, check, limit
        self.loaded: OrderedDict[str, LoRARequest] = OrderedDict()
        """By their names; the last one used is at the end."""
        self.users = Counter[str]()
        """Requests that have each."""
        self.made = 0
        self.loading = asyncio.Lock()
        self.left = asyncio.Event()
        """Set when a request is over."""

    @contextlib.asynccontextmanager
    async def using(self, path: str | None) -> "AsyncIterator[LoRARequest | None]":
        """Have the engine keep the adapter of a folder inside the block; None = the model alone.

        Raises WeightsError for one that it cannot have.
        """
        if path is None:
            yield None
            return
        name, folder = await asyncio.to_thread(named, path)
        if name not in self.loaded:
            async with self.loading:
                if name not in self.loaded:  # another request may have loaded it meanwhile
                    await self._load(name, folder)
        adapter = self.loaded[name]
        self.loaded.move_to_end(name)
        self.users[name] += 1
        try:
            yield adapter
        finally:
            self.users[name] -= 1
            if not self.users[name]:
                del self.users[name]
            self.left.set()

    async def _load(self, name: str, folder: Path) -> None:
        """Load an adapter, once there is room for it."""
        from vllm.lora.request import LoRARequest

        if not self.limit:
            raise WeightsError("this server has no room for adapters beside its model")
        await asyncio.to_thread(self.check, folder)
        await self._make_room()
        self.made += 1
        adapter = LoRARequest(name, self.made, str(folder))
        try:
            await while_alive(self.engine, self.engine.add_lora(adapter))
        except Exception as error:
            if self.engine.errored:
                raise
            raise WeightsError(f"{folder}: {in_one_line(error)}") from error
        self.loaded[name] = adapter

    async def _make_room(self) -> None:
        """Unload what no request has: adapters whose folder is gone, and one more if there is still no room."""
        for name in [name for name in self._idle() if not Path(self.loaded[name].lora_path).is_dir()]:  # noqa: ASYNC240
            await self._unload(name)
        while len(self.loaded) >= self.limit:
            self.left.clear()
            if idle := self._idle():
                await self._unload(idle[0])
            else:
                await self.left.wait()

    def _idle(self) -> list[str]:
        """Return the adapters that no request has; the one that was used longest ago comes first."""
        return [name for name in self.loaded if not self.users[name]]

    async def _unload(self, name: str) -> None:
        await while_alive(self.engine, self.engine.remove_lora(self.loaded.pop(name).lora_int_id))

    def forget(self) -> None:
        """Know that the engine has dropped all of them, as it does with new weights."""
        self.loaded.clear()


def named(path: str) -> tuple[str, Path]:
    """Return the name and the folder of an adapter. One that takes the place of another has another name."""
    folder = folder_of(path)
    try:
        return f"{folder}@{(folder / ADAPTER).stat().st_mtime_ns}", folder
    except OSError as error:
        raise WeightsError(f"{folder} holds no {ADAPTER}") from error
