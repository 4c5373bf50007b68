"""The routes of the protocol, below /api/v1. Whoever knows the server's key is answered."""

import asyncio
import contextlib
import functools
import secrets
import socket
import sys
import uuid
from collections.abc import Awaitable, Callable, Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta
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
from prl.tinker.learner import Learner
from prl.tinker.sampler import Snapshots
from prl.tinker.service import Model, Service, looked_up
from prl.tinker.store import NAME
from prl.tinker.wire import PROTOBUF, RequestError

LONGEST_BODY = 256 << 20
"""Bytes of a request."""
WAIT_S = 20.0
"""[s] For a result, before the client is to ask again; the SDK's own deadline is 45."""
CONFIG = {
    "parallel_fwdbwd_chunks": False,  # the parts of a pass come in their order
    "custom_loss_server_side": True,  # as a graph of allowed operations
    "sample_join_sampling_session": True,
    "use_pyqwest_transport": False,
}
"""What the server asks of the SDK. The rest is as the SDK has it: bodies are not packed,
and each result is asked for, so that a client hears of one that is lost."""
INFO = "prl: adapters leave the output head out; a model keeps its last 16 unnamed snapshots."


class Session(msgspec.Struct):
    user_metadata: dict[str, Any] | None = None


class Finish(msgspec.Struct):
    reason: dict[str, Any] = {}
    detail: str | None = None


class SamplingSession(msgspec.Struct):
    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class Page(msgspec.Struct):
    """The part of a list that a client asks for."""

    limit: Annotated[int, Meta(ge=1, le=1000)] = 100
    offset: wire.Count = 0


class CustomLoss(msgspec.Struct):
    session_id: str
    inputs: list[Given]
    graph: Graph
    custom_loss_seq_id: int | None = None
    name: str = ""


CONSTANT = {
    ("POST", "client/config"): CONFIG,
    ("POST", "client/dynamic_config"): {"sample_cancel_enabled": True},
    ("POST", "telemetry"): {"status": "accepted"},  # and forgotten
    ("GET", "healthz"): {"status": "ok"},
}
"""Answers that are always the same, by method and path."""
SAVES = ("save_weights", "save_weights_for_sampler")
CHECKPOINTS = "training_runs/{model_id}/checkpoints"
A_CHECKPOINT = CHECKPOINTS + "/{kind}/{name}"
FOLDERS = "checkpoints are folders of the server's machine, below its dir: take them from there"
REFUSED = {
    "publish": FOLDERS,
    "external_weights_urls": FOLDERS,
    "save_weights_external": FOLDERS,
    "copy_weights": "create_training_client_from_state makes a model of a checkpoint",
}
"""What clients may ask in vain, by the last part of a path, with what they have instead."""
Call = Callable[[Request, bytes], Awaitable[Any]]


class Routes:
    """The answers to requests."""

    def __init__(self, service: Service, key: str):
        self.service, self.key = service, key

    def app(self) -> Starlette:
        """The server's application."""
        named: list[Call] = [
            *(self.create_session, self.session_heartbeat, self.create_model, self.get_info, self.weights_info),
            *(self.optim_step, self.load_weights, self.create_sampling_session, self.join_sampling_session),
            *(self.asample, self.retrieve_future, self.cancel_future, self.create_custom_loss),
        ]
        calls: dict[tuple[str, str], Call] = {("POST", call.__name__): call for call in named}
        calls |= {
            ("POST", "forward"): functools.partial(self._pass, True),
            ("POST", "forward_backward"): functools.partial(self._pass, False),
            **{("POST", kind): functools.partial(self._save, kind) for kind in SAVES},
            ("GET", "sessions"): self.sessions,
            ("GET", "sessions/{session_id}"): self.session,
            ("POST", "sessions/{session_id}/finish"): self.finish,
            ("GET", "get_server_capabilities"): self.capabilities,
            ("GET", "samplers/{sampler_id}"): self.sampler,
            ("GET", "training_runs"): self.training_runs,
            ("GET", "training_runs/{model_id}"): self.training_run,
            ("GET", "checkpoints"): self.all_checkpoints,
            ("GET", CHECKPOINTS): self.checkpoints,
            ("PUT", f"{A_CHECKPOINT}/ttl"): self.set_ttl,
            ("DELETE", A_CHECKPOINT): self.delete,
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
            except ClientDisconnect:
                return Response(status_code=400)
            except PrlError as error:
                status = error.status if isinstance(error, RequestError) else 500
                return _json({"detail": as_message(str(error))}, status)
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
        path = request.url.path
        why = REFUSED.get(path.rpartition("/")[2], "this server does not have it")
        raise RequestError(f"{request.method} {path[:200]}: {why}", 404)

    async def create_session(self, request: Request, body: bytes) -> Any:
        session_id = str(uuid.uuid4())
        self.service.store.sessions.sessions[session_id] = wire.decode(body, Session).user_metadata
        self.service.store.write_sessions()
        return {"type": "create_session", "session_id": session_id, "info_message": INFO}

    async def session_heartbeat(self, request: Request, body: bytes) -> Any:
        self._session(_named(body, "session_id"))
        return {"type": "session_heartbeat"}

    async def sessions(self, request: Request, body: bytes) -> Any:
        return _page(request, "sessions", [*self.service.store.sessions.sessions])

    async def session(self, request: Request, body: bytes) -> Any:
        session_id = request.path_params["session_id"]
        return {
            "user_metadata": self._session(session_id),
            "training_run_ids": [model.id for model in self.service.models_of(session_id)],
            "sampler_ids": [name for name in self.service.store.sessions.samplers if name.startswith(f"{session_id}:")],
        }

    def _session(self, session_id: str) -> dict[str, Any] | None:
        """Return what a client has said about a session. Raises RequestError for one that is not there."""
        return looked_up(self.service.store.sessions.sessions, session_id, "session_id")

    async def finish(self, request: Request, body: bytes) -> Any:
        session_id = request.path_params["session_id"]
        self._session(session_id)
        asked = wire.decode(body, Finish)
        self.service.finish(session_id, str(asked.reason.get("type")), asked.detail)
        return Response(status_code=204)

    async def capabilities(self, request: Request, body: bytes) -> Any:
        model = {"model_name": self.service.name, "max_context_length": self.service.learner.longest}
        return {"supported_models": [model | {"trainable": True, "sampleable": True}]}

    # --- models ---

    async def create_model(self, request: Request, body: bytes) -> Any:
        asked = wire.decode(body, wire.CreateModel)
        return self.service.create(asked, asked.lora_config, "create", body)

    async def get_info(self, request: Request, body: bytes) -> Any:
        model = self.service.model(_named(body, "model_id"))
        arch, name = self.service.learner.model.config.model_type, self.service.name
        # The SDK loads the tokenizer from there: it knows no model of prl by its name.
        data = {"arch": arch, "model_name": name, "tokenizer_id": self.service.path}
        about = {"type": "get_info", "model_data": data, "model_id": model.id, "model_name": name}
        return about | self._adapter(model.record.lora)

    async def weights_info(self, request: Request, body: bytes) -> Any:
        _, record = self.service.store.checkpoint(_named(body, "tinker_path"), "tinker_path")
        lora = record.lora
        trained = {} if lora is None else {"train_mlp": lora.train_mlp, "train_attn": lora.train_attn}
        return self._adapter(lora) | {"train_unembed": lora is None} | trained

    def _adapter(self, lora: wire.Lora | None) -> dict[str, Any]:
        """Return what a model is made of, as several answers have it."""
        rank = None if lora is None else lora.rank
        return {"base_model": self.service.name, "is_lora": lora is not None, "lora_rank": rank}

    async def training_runs(self, request: Request, body: bytes) -> Any:
        page = _page(request, "training_runs", [*self.service.models.values()])
        runs = [await run_in_threadpool(self._training_run, model) for model in page["training_runs"]]
        return page | {"training_runs": runs}

    async def training_run(self, request: Request, body: bytes) -> Any:
        return await run_in_threadpool(self._training_run, self.service.model(request.path_params["model_id"]))

    def _training_run(self, model: Model) -> dict[str, Any]:
        last = {record.checkpoint_type: record for record in self.service.store.checkpoints(model.id)}
        return self._adapter(model.record.lora) | {
            "training_run_id": model.id,
            "model_owner": "",
            "last_request_time": model.store.asked_at(),
            "last_checkpoint": last.get("training"),
            "last_sampler_checkpoint": last.get("sampler"),
            "user_metadata": model.record.user_metadata,
        }

    async def _pass(self, forward_only: bool, request: Request, body: bytes) -> Any:
        kind = request.headers.get("content-type", "")
        asked = await run_in_threadpool(self.service.read_forward, body, kind, forward_only)
        named = "forward" if asked.forward_only else "forward_backward"
        tokens = sum(len(datum.tokens) for datum in asked.data)
        return self.service.submit(asked, named, body, kind, tokens)

    async def create_custom_loss(self, request: Request, body: bytes) -> Any:
        asked = wire.decode(body, CustomLoss)
        self._session(asked.session_id)
        loss_id = Traced(asked.inputs, asked.graph).id
        Traced.of_id(loss_id)  # which checks it
        return {"request_id": loss_id}

    async def optim_step(self, request: Request, body: bytes) -> Any:
        asked = wire.decode(body, wire.OptimStep)
        return self.service.submit(asked, "optim_step", body)

    async def _save(self, kind: str, request: Request, body: bytes) -> Any:
        asked = wire.decode(body, wire.SaveWeights)
        if asked.path is not None and not NAME.fullmatch(asked.path):
            raise RequestError(f"path={asked.path[:200]!r}: a name of letters, digits, _, - and . is wanted")
        return self.service.submit(asked, kind, body)

    async def load_weights(self, request: Request, body: bytes) -> Any:
        asked = wire.decode(body, wire.LoadWeights)
        _, record = self.service.store.checkpoint(asked.path)
        if not asked.model_id:
            return self.service.create(asked, record.lora, "restore", body)
        return self.service.submit(asked, "load_weights", body)

    async def retrieve_future(self, request: Request, body: bytes) -> Any:
        request_id = _named(body, "request_id")
        result = await self.service.result(request_id, WAIT_S)
        if result is None:
            return {"type": "try_again", "request_id": request_id, "queue_state": "active"}
        content, kind = wire.encode(result, PROTOBUF in request.headers.get("accept", ""))
        return Response(content, media_type=kind)

    async def cancel_future(self, request: Request, body: bytes) -> Any:
        self.service.cancel(_named(body, "request_id"))
        return Response(status_code=204)

    # --- checkpoints ---

    async def checkpoints(self, request: Request, body: bytes) -> Any:
        model = self.service.model(request.path_params["model_id"])
        return {"checkpoints": await run_in_threadpool(self.service.store.checkpoints, model.id)}

    async def all_checkpoints(self, request: Request, body: bytes) -> Any:
        return _page(request, "checkpoints", await run_in_threadpool(self.service.store.checkpoints))

    async def set_ttl(self, request: Request, body: bytes) -> Any:
        ttl_seconds = wire.decode(body, wire.CheckpointTtl).ttl_seconds
        await run_in_threadpool(self.service.store.set_ttl, _uri(request), ttl_seconds)
        return Response(status_code=204)

    async def delete(self, request: Request, body: bytes) -> Any:
        await run_in_threadpool(self.service.store.delete, _uri(request))
        return Response(status_code=204)

    # --- sampling ---

    async def create_sampling_session(self, request: Request, body: bytes) -> Any:
        asked = wire.decode(body, SamplingSession)
        self._session(asked.session_id)
        self.service.check_base(asked.base_model)
        sampler_id = f"{asked.session_id}:sample:{asked.sampling_session_seq_id}"
        self.service.open_sampler(sampler_id, self.service.checkpoint_of(asked.model_path))
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    async def join_sampling_session(self, request: Request, body: bytes) -> Any:
        number = self.service.join_sampler(_named(body, "sampling_session_id"))
        return {"type": "join_sampling_session", "client_counter": number}

    async def sampler(self, request: Request, body: bytes) -> Any:
        sampler_id = request.path_params["sampler_id"]
        self.service.folder_of_sampler(sampler_id)
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


def _uri(request: Request) -> str:
    """Return the URI of the checkpoint that a path names."""
    return "tinker://{model_id}/{kind}/{name}".format(**request.path_params)


def _page(request: Request, key: str, items: list[Any]) -> dict[str, Any]:
    """Return the part of a list that a request asks for, with where it stands. Raises RequestError."""
    try:
        asked = msgspec.convert(dict(request.query_params), Page, strict=False)
    except msgspec.ValidationError as error:
        raise RequestError(str(error)) from None
    cursor = {"offset": asked.offset, "limit": asked.limit, "total_count": len(items)}
    return {key: items[asked.offset : asked.offset + asked.limit], "cursor": cursor}


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
        showing = asyncio.ensure_future(service.meters.show(service.state))
        print(safe(ready), file=sys.stderr, flush=True)
        try:
            await asyncio.wait({answering, running}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            server.should_exit = True
            running.cancel()
            showing.cancel()
            await asyncio.gather(answering, running, showing, return_exceptions=True)
        if not running.cancelled() and (error := running.exception()) is not None:
            raise PrlError(f"the server has failed: {error}") from error
    finally:
        await sampler.close()
