"""vLLM endpoint plugin (entry point `vllm.endpoint_plugins`): the routes that prl adds to the server.

Sampling goes over one of them (`protocol.py`), new weights over the others. Pausing, loading, clearing the prefix cache
and resuming happen inside the server, as one request. A client that dies half-way leaves no paused engine behind, and
vLLM's development routes, which take four requests for the same, stay off.
"""

import asyncio
import os
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.routing import request_response

from prl.inference import _vllm_groups, _vllm_internals, _vllm_sampling
from prl.inference.protocol import (
    AHEAD_NS,
    ANOTHER_RUN,
    GENERATE,
    RUN,
    RUN_NAME,
    TAKEN_OVER,
    WHOSE,
    GenerateRequest,
)
from prl.inference.server import FROZEN_VARIABLE, INSTANCE_VARIABLE, TokenAuth
from prl.inference.weights import ServedModel, WeightsError, files_of

if TYPE_CHECKING:
    from starlette.datastructures import State
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")
Endpoint = Callable[[Request], Awaitable[Response]]

LOAD = "/prl/load_policy"

ALIVE_S = 0.5
"""[s] Time between two looks at whether the engine still lives during an update."""

NAMED = RUN.lower().encode()
REQUESTS = msgspec.json.Decoder(GenerateRequest)


class PolicyRoutes:
    """`POST /prl/generate` samples, `POST /prl/load_policy {"path": …}` loads a safetensors folder as the policy;
    `GET /prl/run` says whose the policy is."""

    name = "prl"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes; that for weights unless the server's model is frozen.

        They are answered before vLLM's middleware, which costs more than they do, and behind a check of the token.
        """
        app.add_route(GENERATE, generate, methods=["POST"])  # starlette's: nothing of FastAPI's for each request
        ours: dict[str, Endpoint] = {GENERATE: generate}
        if not os.environ.get(FROZEN_VARIABLE):
            ours |= {LOAD: load_policy}
            app.add_api_route(LOAD, load_policy, methods=["POST"])
            app.add_api_route(WHOSE, whose, methods=["GET"])
        stack = app.build_middleware_stack
        app.build_middleware_stack = lambda: TokenAuth(OneRun(Directly(stack(), ours, app.exception_handlers)))

    async def init_state(self, engine_client: "AsyncLLM", state: "State", args: Namespace) -> None:
        """Prepare what the routes need besides the engine."""
        state.served_names = args.served_model_name or [args.model]
        state.groups = _vllm_groups.Groups(engine_client)
        state.load_policy_lock = asyncio.Lock()
        state.run = ""  # whose weights it has
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


class OneRun:
    """ASGI middleware: refuses a run where a later one has begun with the server, also if that was while it was asked.

    Else it would go on with replies of the other's policy.
    """

    def __init__(self, app: "ASGIApp"):
        self.app = app

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        run = dict(scope.get("headers", ())).get(NAMED, b"").decode("latin-1")
        if not run:
            return await self.app(scope, receive, send)
        state, refused = scope["app"].state, False
        if run < state.run:
            return await taken_over()(scope, receive, send)

        async def send_unless_taken_over(message: "Message") -> None:
            nonlocal refused
            if message["type"] == "http.response.start" and run < state.run:
                refused = True
                await taken_over()(scope, receive, send)
            elif not refused:
                await send(message)

        await self.app(scope, receive, send_unless_taken_over)


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


def taken_over() -> JSONResponse:
    """The refusal of a run that is not the last to have begun with this server."""
    reason = f"{ANOTHER_RUN}, and it has the weights of one at a time"
    return JSONResponse({"error": reason}, status_code=TAKEN_OVER)


def refusal(request: Request) -> JSONResponse | None:
    """Why weights may not come; None = they may. Those of no run may only where no run has begun with the server."""
    run = request.headers.get(RUN, "")
    found = RUN_NAME.fullmatch(run)
    if found and int(found[1]) > time.time_ns() + AHEAD_NS:
        reason = f"{RUN}: {run!r} begins more than a day from now by this server's clock"
        return JSONResponse({"error": reason}, status_code=400)
    if run and not found:
        reason = f"{RUN} must be 19 digits, the time in ns since 1970, a hyphen and letters or digits: {run!r}"
        return JSONResponse({"error": reason}, status_code=400)
    return taken_over() if run < request.app.state.run else None


async def whose(request: Request) -> JSONResponse:
    """The `run` whose weights the server has."""
    return JSONResponse({"run": request.app.state.run})


async def load_policy(request: Request) -> JSONResponse:
    """Load new weights and keep the running requests, which are recomputed under the new weights and go on.

    Returns:
        200 with `loaded`, the `seconds` of each part and the server's `instance`; with `error` 400 (refused before the
        engine pauses: the old weights), 409 (the same, where a later run has begun) or 500 (weights unknown: the engine
        stays paused)
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
        if (refused := refusal(request)) is not None:
            return refused
        try:
            folder, size = await asyncio.to_thread(checked, request.app.state.served_model, path)
        except WeightsError as error:
            return JSONResponse({"error": f"{error}: the weights stay as they are"}, status_code=400)
        request.app.state.run = request.headers.get(RUN, "")
        return await loaded(engine, folder, size, time.monotonic() - began)


def checked(model: ServedModel, path: str) -> tuple[str, int]:
    """The folder of weights that a server may load, and their bytes. Raises WeightsError."""
    folder = model.check(path)
    return folder, sum(file.stat().st_size for file in files_of(Path(folder)))


def instance() -> str | None:
    """What this start of the server is called."""
    return os.environ.get(INSTANCE_VARIABLE)


async def loaded(engine: "AsyncLLM", path: str, size: int, checked_s: float) -> JSONResponse:
    """The reply to a request for new weights, once the workers have loaded them."""
    try:
        seconds = {"check": checked_s} | await while_alive(engine, _vllm_internals.update(engine, path, size))
    except Exception as error:  # whatever the workers raise: the caller has to know that the old weights are gone
        return JSONResponse({"error": f"{type(error).__name__}: {error}"}, status_code=500)
    return JSONResponse({"loaded": path, "seconds": seconds, "instance": instance()})


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
