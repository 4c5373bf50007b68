"""Waiting for an engine that may die meanwhile."""

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")

ALIVE_S = 0.5
"""[s] Time between two looks at whether the engine still lives: vLLM leaves its calls unanswered when it dies."""


async def while_alive(engine: "AsyncLLM", work: Coroutine[Any, Any, T]) -> T:
    """Await `work`; raise vLLM's EngineDeadError if the engine dies meanwhile.

    Otherwise the request would wait forever, and so would the server, which shuts down once its requests are answered.
    """
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([task], timeout=ALIVE_S))[0]:
            if engine.errored:
                raise engine.dead_error
        return task.result()
    finally:
        task.cancel()
