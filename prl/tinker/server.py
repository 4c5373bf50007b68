"""The routes of the protocol, below /api/v1. Whoever knows the server's key is answered."""

import asyncio
import contextlib
import functools
import secrets
import socket
import sys
import uuid
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from prl.base.errors import PrlError
from prl.base.text import as_message, safe
from prl.config.schema import TinkerConfig
from prl.tinker import wire
from prl.tinker.graph import Given, Graph, Traced
from prl.tinker.learner import Learner, check_adam
from prl.tinker.sampler import Snapshots
from prl.tinker.service import Service
from prl.tinker.store import NAME
from prl.tinker.wire import PROTOBUF, RequestError

LONGEST_BODY = 256 << 20
"""Bytes of a request."""
WAIT_S = 20.0
"""[s] For a result, before the client is to ask again; the SDK's own deadline is 45."""
CONFIG = {
    "parallel_fwdbwd_chunks": False,  # the parts of a pass come in their order
    "proto_compress_fwdbwd": False,
    "sample_use_retrieve_futures": False,  # a client asks for each result, and hears of one that is lost
    "custom_loss_server_side": True,  # as a graph of allowed operations
    "sample_join_sampling_session": False,
    "use_pyqwest_transport": False,
}
"""What the server asks of the SDK; the rest is as the SDK has it."""
INFO = "prl: adapters leave the output head out; ttl_seconds is not read; a model keeps its last 16 unnamed snapshots."


class Session(msgspec.Struct):
    user_metadata: dict[str, Any] | None = None


class SamplingSession(msgspec.Struct):
    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class CustomLoss(msgspec.Struct):
    session_id: str
    inputs: list[Given]
    graph: Graph
    custom_loss_seq_id: int | None = None
    name: str = ""


CONSTANT = {
    ("POST", "client/config"): CONFIG,
    ("POST", "client/dynamic_config"): {},
    ("POST", "telemetry"): {"status": "accepted"},  # and forgotten
    ("GET", "healthz"): {"status": "ok"},
}
"""Answers that are always the same, by method and path."""
SAVES = ("save_weights", "save_weights_for_sampler")
Call = Callable[[Request, bytes], Awaitable[Any]]


class Routes:
    """The answers to requests."""

    def __init__(self, service: Service, key: str):
        self.service, self.key = service, key

    def app(self) -> Starlette:
        """The server's application."""
        named: list[Call] = [
            *(self.create_session, self.session_heartbeat, self.create_model, self.get_info, self.weights_info),
            *(self.optim_step, self.load_weights, self.create_sampling_session, self.asample, self.retrieve_future),
            self.create_custom_loss,
        ]
        calls: dict[tuple[str, str], Call] = {("POST", call.__name__): call for call in named}
        calls |= {
            ("POST", "forward"): functools.partial(self._pass, True),
            ("POST", "forward_backward"): functools.partial(self._pass, False),
            **{("POST", kind): functools.partial(self._save, kind) for kind in SAVES},
            ("POST", "sessions/{session_id}/finish"): self.finish,
            ("GET", "get_server_capabilities"): self.capabilities,
            ("GET", "samplers/{sampler_id}"): self.sampler,
            ("GET", "training_runs/{model_id}/checkpoints"): self.checkpoints,
            ("DELETE", "training_runs/{model_id}/checkpoints/{kind}/{name}"): self.delete,
            **{place: functools.partial(_always, content) for place, content in CONSTANT.items()},
        }
        routes = [
            Route(f"/api/v1/{path}", self._answering(call), methods=[method]) for (method, path), call in calls.items()
        ]
        rest = Route("/{path:path}", self._answering(self.unknown), methods=["GET", "POST", "PUT", "DELETE"])
        return Starlette(routes=[*routes, rest])

    def _answering(self, call: Call) -> Callable[[Request], Awaitable[Response]]:
        """Return an endpoint: it looks at the key and the size, and makes an answer of what is raised."""

        async def endpoint(request: Request) -> Response:
            try:
                self._admit(request)
                answer = await call(request, await _body(request))
            except RequestError as error:
                return _json({"detail": as_message(str(error))}, error.status)
            except ClientDisconnect:
                return _json({"detail": "the client has gone"}, 400)
            except PrlError as error:
                return _json({"detail": as_message(str(error))}, 500)
            return answer if isinstance(answer, Response) else _json(answer)

        return endpoint

    def _admit(self, request: Request) -> None:
        """Raise RequestError for a request without the key."""
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        given = request.headers.get("x-api-key") or bearer
        if not secrets.compare_digest(given.encode(), self.key.encode()):
            raise RequestError("the key is not that of this server: set TINKER_API_KEY to the one that it printed", 401)

    # --- sessions ---

    async def unknown(self, request: Request, body: bytes) -> Any:
        raise RequestError(f"{request.method} {request.url.path[:200]}: this server does not have it", 404)

    async def create_session(self, request: Request, body: bytes) -> Any:
        session_id = str(uuid.uuid4())
        self.service.store.sessions.sessions[session_id] = wire.decode(body, Session).user_metadata
        self.service.store.write_sessions()
        return {"type": "create_session", "session_id": session_id, "info_message": INFO}

    async def session_heartbeat(self, request: Request, body: bytes) -> Any:
        self._check_session(_named(body, "session_id"))
        return {"type": "session_heartbeat"}

    async def finish(self, request: Request, body: bytes) -> Any:
        self._check_session(request.path_params["session_id"])
        return Response(status_code=204)

    def _check_session(self, session_id: str) -> None:
        if session_id not in self.service.store.sessions.sessions:
            raise RequestError(f"session_id={session_id[:200]!r}: this server has no such session", 404)

    async def capabilities(self, request: Request, body: bytes) -> Any:
        model = {"model_name": self.service.name, "max_context_length": self.service.learner.longest}
        return {"supported_models": [model | {"trainable": True, "sampleable": True}]}

    # --- models ---

    async def create_model(self, request: Request, body: bytes) -> Any:
        model = self.service.create(wire.decode(body, wire.CreateModel), body)
        return {"request_id": f"{model.id}:create", "model_id": model.id}

    async def get_info(self, request: Request, body: bytes) -> Any:
        model = self.service.model(_named(body, "model_id"))
        lora, name = model.record.lora, self.service.name
        arch = self.service.learner.model.config.model_type
        # The SDK loads the tokenizer from there: it knows no model of prl by its name.
        data = {"arch": arch, "model_name": name, "tokenizer_id": self.service.path}
        about = {"is_lora": lora is not None, "lora_rank": None if lora is None else lora.rank, "model_name": name}
        return {"type": "get_info", "model_data": data, "model_id": model.id} | about

    async def weights_info(self, request: Request, body: bytes) -> Any:
        record = self.service.store.record(_named(body, "tinker_path"), "tinker_path")
        lora = record.lora
        if lora is None:
            return {"base_model": self.service.name, "is_lora": False}
        flags = {"train_unembed": False, "train_mlp": lora.train_mlp, "train_attn": lora.train_attn}
        return {"base_model": self.service.name, "is_lora": True, "lora_rank": lora.rank} | flags

    async def _pass(self, forward_only: bool, request: Request, body: bytes) -> Any:
        kind = request.headers.get("content-type", "")
        asked = await run_in_threadpool(wire.read_forward, body, kind, forward_only)
        await run_in_threadpool(self.service.check, asked)
        named = "forward" if asked.forward_only else "forward_backward"
        return self._accepted(asked.model_id, asked.seq_id, named, body, kind)

    async def create_custom_loss(self, request: Request, body: bytes) -> Any:
        asked = wire.decode(body, CustomLoss)
        self._check_session(asked.session_id)
        loss_id = Traced(asked.inputs, asked.graph).id
        Traced.of_id(loss_id)  # which checks it
        return {"request_id": loss_id}

    async def optim_step(self, request: Request, body: bytes) -> Any:
        asked = wire.decode(body, wire.OptimStep)
        check_adam(asked.adam_params)
        return self._accepted(asked.model_id, asked.seq_id, "optim_step", body)

    async def _save(self, kind: str, request: Request, body: bytes) -> Any:
        asked = wire.decode(body, wire.SaveWeights)
        if asked.path is not None and not NAME.fullmatch(asked.path):
            raise RequestError(f"path={asked.path[:200]!r}: a name of letters, digits, _, - and . is wanted")
        return self._accepted(asked.model_id, asked.seq_id, kind, body)

    async def load_weights(self, request: Request, body: bytes) -> Any:
        asked = wire.decode(body, wire.LoadWeights)
        if asked.model_id is None:
            model = self.service.create(asked, body)
            return {"request_id": f"{model.id}:create", "model_id": model.id}
        self.service.store.checkpoint(asked.path)
        return self._accepted(asked.model_id, asked.seq_id, "load_weights", body)

    def _accepted(self, model_id: str, number: int | None, kind: str, body: bytes, content_type: str = "") -> Any:
        return {"request_id": self.service.submit(model_id, number, kind, body, content_type), "model_id": model_id}

    async def retrieve_future(self, request: Request, body: bytes) -> Any:
        request_id = _named(body, "request_id")
        result = await self.service.result(request_id, WAIT_S)
        if result is None:
            return {"type": "try_again", "request_id": request_id, "queue_state": "active"}
        content, kind = wire.encode(result, PROTOBUF in request.headers.get("accept", ""))
        return Response(content, media_type=kind)

    # --- checkpoints ---

    async def checkpoints(self, request: Request, body: bytes) -> Any:
        model = self.service.model(request.path_params["model_id"])
        return {"checkpoints": await run_in_threadpool(self.service.store.checkpoints, model.id)}

    async def delete(self, request: Request, body: bytes) -> Any:
        path = "tinker://{model_id}/{kind}/{name}".format(**request.path_params)
        await run_in_threadpool(self.service.store.delete, path)
        return Response(status_code=204)

    # --- sampling ---

    async def create_sampling_session(self, request: Request, body: bytes) -> Any:
        asked = wire.decode(body, SamplingSession)
        self._check_session(asked.session_id)
        self.service.check_base(asked.base_model)
        folder = None if asked.model_path is None else self.service.store.checkpoint(asked.model_path, "model_path")
        sampler_id = f"{asked.session_id}:sample:{asked.sampling_session_seq_id}"
        self.service.open_sampler(sampler_id, folder)
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    async def sampler(self, request: Request, body: bytes) -> Any:
        sampler_id = request.path_params["sampler_id"]
        if sampler_id not in self.service.store.sessions.samplers:
            raise RequestError(f"{sampler_id[:200]!r}: this server has no such sampling session", 404)
        return {"sampler_id": sampler_id, "base_model": self.service.name}

    async def asample(self, request: Request, body: bytes) -> Any:
        asked = wire.decode(body, wire.Sample)
        request_id = self.service.sample(asked)
        ids = [f"{request_id}:{number}" for number in range(asked.num_samples)]
        return {"request_id": request_id, "sample_sequence_ids": ids}


def _named(body: bytes, field: str) -> str:
    """Read the one field of a request that counts."""
    given = wire.decode(body, dict).get(field)
    if not isinstance(given, str):
        raise RequestError(f"{field} is missing")
    return given


async def _always(content: Any, request: Request, body: bytes) -> Any:
    return content


async def _body(request: Request) -> bytes:
    """Read the body of a request. Raises RequestError for a large one, and for one that is packed."""
    if request.headers.get("content-encoding", "identity") != "identity":
        raise RequestError("content-encoding: this server reads bodies as they are", 415)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > LONGEST_BODY:
            raise RequestError(f"the request has more than {LONGEST_BODY} bytes: send fewer data at once", 413)
        parts.append(part)
    return b"".join(parts)


def _json(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type=wire.JSON)


async def serve(
    config: TinkerConfig, learner: Learner, sampler: Snapshots, key: str, listening: socket.socket, ready: str
) -> None:
    """Answer requests at a socket until cancelled, then write the models' states; `ready` is printed when it begins."""
    import uvicorn

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # the command has them

    try:
        await sampler.wait_ready(sampler.spec.config.startup_timeout_s)
        service = Service(config, learner, sampler)
        quiet: dict[str, Any] = {"log_level": "warning", "access_log": False, "lifespan": "off"}
        server = Server(uvicorn.Config(Routes(service, key).app(), timeout_graceful_shutdown=1, **quiet))
        answering = asyncio.ensure_future(server.serve([listening]))
        running = asyncio.ensure_future(service.run())
        print(safe(ready), file=sys.stderr, flush=True)
        try:
            await asyncio.wait({answering, running}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            server.should_exit = True
            running.cancel()
            await asyncio.gather(answering, running, return_exceptions=True)
        if not running.cancelled() and (error := running.exception()) is not None:
            raise PrlError(f"the server has failed: {error}") from error
    finally:
        await sampler.close()
