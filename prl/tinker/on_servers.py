"""Sampling from snapshots of clients' models on an engine's servers: adapters beside the base, all in one batch."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

from prl.base.errors import EngineError
from prl.engines.base import EngineSpec
from prl.engines.client import InferencePool
from prl.engines.replies import Completion, Scored
from prl.rollouts.inputs import ModelInput
from prl.tinker.sampler import Snapshots, has_adapter, identity
from prl.tinker.wire import RequestError


class ServedSnapshots(Snapshots):
    """The base and the snapshots beside it, asked over HTTP.

    A snapshot of all weights takes the place of the base: it is loaded once the requests to other weights are answered.

    Args:
        spec: The base.
        pool: The client of the servers, which began with it.
    """

    reserve: ClassVar[int] = 1  # a server always samples a token
    pool: InferencePool

    def __init__(self, spec: EngineSpec, pool: InferencePool):
        self.spec, self.pool = spec, pool
        self._base = (Path(spec.model.path), 0)
        self._held: tuple[Path, int] | None = self._base
        """The model whose weights the servers have; None = they may be neither the old nor the new ones."""
        self._turn = asyncio.Lock()
        self._asking = 0
        """Requests to those weights."""
        self._idle = asyncio.Event()
        self._idle.set()

    async def continued(
        self, snapshot: Path | None, prompt: list[int], sampling: dict[str, Any], n: int
    ) -> list[Completion]:
        async with self._having(snapshot) as adapter:
            return await self.pool.generate(ModelInput(prompt), sampling, n=n, adapter=adapter)

    async def scored(self, snapshot: Path | None, tokens: list[int], top_k: int) -> Scored:
        async with self._having(snapshot) as adapter:
            return await self.pool.top_logprobs(ModelInput(tokens), top_k, adapter=adapter)

    @contextlib.asynccontextmanager
    async def _having(self, snapshot: Path | None) -> AsyncIterator[str | None]:
        """Have the servers keep the weights of a snapshot inside the block, which gets the folder of its adapter.

        Raises RequestError for what a server refuses.
        """
        adapter = snapshot is not None and has_adapter(snapshot)
        whole = self._base if snapshot is None or adapter else identity(snapshot)
        async with self._turn:  # in the order in which they come, so that none waits for ever
            if whole != self._held:
                await self._load(whole)
            self._asking += 1
            self._idle.clear()
        try:
            yield str(snapshot) if adapter else None
        except EngineError as error:
            if error.status == 400:
                raise RequestError(str(error)) from error
            raise
        finally:
            self._asking -= 1
            if not self._asking:
                self._idle.set()

    async def _load(self, whole: tuple[Path, int]) -> None:
        """Have the servers load other weights, once nobody samples from those that they have."""
        await self._idle.wait()
        self._held = None
        timeout_s = self.spec.config.update_timeout_s
        await self.pool.update_weights(self.pool.version + 1, str(whole[0]), timeout_s)
        self._held = whole
