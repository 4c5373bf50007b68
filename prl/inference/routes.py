"""vLLM endpoint plugin (entry point `vllm.endpoint_plugins`): the one route that prl adds to the server.

Pause, load, forget cached prefixes and resume happen inside the server, as one request: a client that dies half-way leaves
no paused engine behind, and vLLM's development routes, which do the same in four requests, can stay off.
"""

import asyncio
import os
from argparse import Namespace
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse

from prl.inference.server import FROZEN_VARIABLE

router = APIRouter()

ALIVE_S = 0.5


class PolicyRoutes:
    """`POST /prl/load_policy {"path": …}` loads a safetensors folder as the new policy."""

    name = "prl"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        if not os.environ.get(FROZEN_VARIABLE):
            app.include_router(router)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        state.load_policy_lock = asyncio.Lock()


@router.post("/prl/load_policy")
async def load_policy(request: Request) -> JSONResponse:
    """Running requests are kept: they are recomputed under the new weights and go on. 400 or 500 with `error` on failure."""
    path = (await request.json()).get("path")
    if not isinstance(path, str):
        return JSONResponse({"error": "the body must be a JSON object with a string `path`"}, status_code=400)
    if Path(path).is_absolute() and not any(Path(path).glob("*.safetensors")):  # else a model's name on the hub
        return JSONResponse(
            {"error": f"{path} holds no *.safetensors file: the weights stay as they are"}, status_code=400
        )
    state = request.app.state
    engine = state.engine_client
    async with state.load_policy_lock:
        try:
            return await while_alive(engine, update(engine, path))
        except Exception as error:  # whatever the workers raise: the caller has to know that the old weights are gone
            return JSONResponse({"error": f"{type(error).__name__}: {error}"}, status_code=500)


async def while_alive(engine: Any, work: Coroutine) -> Any:
    """The result of `work`. Raises RuntimeError when the engine dies meanwhile: what waits for it would wait for ever, and the
    server, which closes once its requests are answered, with it."""
    task = asyncio.ensure_future(work)
    while not (await asyncio.wait([task], timeout=ALIVE_S))[0]:
        if engine.errored:
            task.cancel()
            raise RuntimeError("the engine died during the update")
    return task.result()


async def update(engine: Any, path: str) -> JSONResponse:
    """Pause, load, forget, resume."""
    # Straight to the scheduler: `engine.pause_generation` sleeps 20 ms more to order outputs that are kept anyway.
    await engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
    try:
        await engine.collective_rpc("load_policy", kwargs={"path": path})
        cleared = await engine.reset_prefix_cache(reset_running_requests=True)
    finally:
        await engine.engine_core.resume_scheduler_async()
    if not cleared:
        return JSONResponse({"error": "prefixes cached under older weights are still in use"}, status_code=500)
    return JSONResponse({"loaded": path})
