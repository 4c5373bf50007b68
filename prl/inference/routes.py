"""vLLM endpoint plugin (entry point `vllm.endpoint_plugins`): the routes that prl adds to the server.

Sampling goes over one of them (`protocol.py`), new weights over the other. Pausing, loading, clearing the prefix cache
and resuming happen inside the server, as one request. A client that dies half-way leaves no paused engine behind, and
vLLM's development routes, which take four requests for the same, stay off.
"""

import asyncio
import os
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.routing import request_response

from prl.inference import _vllm_groups, _vllm_internals, _vllm_sampling
from prl.inference.protocol import GENERATE, GenerateRequest
from prl.inference.server import FROZEN_VARIABLE, INSTANCE_VARIABLE, TokenAuth
from prl.inference.weights import ServedModel, WeightsError

if TYPE_CHECKING:
    from starlette.datastructures import State
    from starlette.types import ASGIApp, Receive, Scope, Send
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")
Endpoint = Callable[[Request], Awaitable[Response]]

LOAD = "/prl/load_policy"

ALIVE_S = 0.5
"""[s] Time between two looks at whether the engine still lives during an update."""

REQUESTS = msgspec.json.Decoder(GenerateRequest)


class PolicyRoutes:
    """`POST /prl/generate` samples, `POST /prl/load_policy {"path": …}` loads a safetensors folder as the policy."""

    name = "prl"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes; that for weights unless the server's model is frozen.

        They are answered before vLLM's middleware, which costs more than they do, and behind a check of the token.
        """
        app.add_route(GENERATE, generate, methods=["POST"])  # starlette's: nothing of FastAPI's for each request
        ours: dict[str, Endpoint] = {GENERATE: generate}
        if not os.environ.get(FROZEN_VARIABLE):
            app.add_api_route(LOAD, load_policy, methods=["POST"])
            ours[LOAD] = load_policy
        stack = app.build_middleware_stack
        app.build_middleware_stack = lambda: TokenAuth(Directly(stack(), ours, app.exception_handlers))

    async def init_state(self, engine_client: "AsyncLLM", state: "State", args: Namespace) -> None:
        """Prepare what the routes need besides the engine."""
        state.served_names = args.served_model_name or [args.model]
        state.groups = _vllm_groups.Groups(engine_client)
        state.load_policy_lock = asyncio.Lock()
        state.served_model = ServedModel(engine_client.vllm_config.model_config)


class Directly:
    """ASGI middleware: answers POSTs to some routes itself."""

    def __init__(self, app: "ASGIApp", endpoints: "dict[str, Endpoint]", handlers: Any):
        """
        Args:
            app: Answers everything else.
            endpoints: By path.
            handlers: What becomes of exceptions: functions by class.
        """
        self.app = app
        self.ours = {path: ExceptionMiddleware(request_response(each), handlers) for path, each in endpoints.items()}

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        post = scope["type"] == "http" and scope["method"] == "POST"
        await (self.ours.get(scope["path"], self.app) if post else self.app)(scope, receive, send)


async def generate(request: Request) -> Response:
    """Sample continuations of a prompt, until the client goes away.

    Returns:
        200 with `Generated`; with `error` 400 or 404. What vLLM raises is answered as on its own routes.
    """
    try:
        asked = REQUESTS.decode(await request.body())
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return JSONResponse({"error": f"no request to sample: {error}"}, status_code=400)
    if asked.model not in request.app.state.served_names:
        return JSONResponse({"error": f"the model {asked.model!r} is not served here"}, status_code=404)
    work = asyncio.ensure_future(_vllm_sampling.sample(request.app.state.groups, asked))
    gone = asyncio.ensure_future(disconnected(request))
    try:
        await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return Response(status_code=499)  # nobody will see it
        return Response(await work, media_type="application/json")
    finally:
        gone.cancel()
        work.cancel()


async def disconnected(request: Request) -> None:
    """Return once the client has gone. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def load_policy(request: Request) -> JSONResponse:
    """Load new weights and keep the running requests, which are recomputed under the new weights and go on.

    Returns:
        200 with `loaded`, the `seconds` of each part and the server's `instance`; with `error` 400 (refused before the
        engine pauses: the old weights) or 500 (weights unknown: the engine stays paused)
    """
    try:
        body = await request.json()
    except ValueError:
        body = None
    path = body.get("path") if isinstance(body, dict) else None
    if not isinstance(path, str) or "\0" in path:
        return JSONResponse({"error": "the body must be a JSON object with a string `path`"}, status_code=400)
    engine = request.app.state.engine_client
    async with request.app.state.load_policy_lock:
        began = time.monotonic()
        try:
            folder = await asyncio.to_thread(request.app.state.served_model.check, path)
        except WeightsError as error:
            return JSONResponse({"error": f"{error}: the weights stay as they are"}, status_code=400)
        checked_s = time.monotonic() - began
        try:
            seconds = {"check": checked_s} | await while_alive(engine, _vllm_internals.update(engine, folder))
        except Exception as error:  # whatever the workers raise: the caller has to know that the old weights are gone
            return JSONResponse({"error": f"{type(error).__name__}: {error}"}, status_code=500)
    return JSONResponse({"loaded": folder, "seconds": seconds, "instance": os.environ.get(INSTANCE_VARIABLE)})


async def while_alive(engine: "AsyncLLM", work: Coroutine[Any, Any, T]) -> T:
    """Await `work`; raise RuntimeError if the engine dies meanwhile.

    Otherwise the request would wait forever, and so would the server, which shuts down once its requests are answered.
    """
    task = asyncio.ensure_future(work)
    while not (await asyncio.wait([task], timeout=ALIVE_S))[0]:
        if engine.errored:
            task.cancel()
            raise RuntimeError("the engine died during the update")
    return task.result()
