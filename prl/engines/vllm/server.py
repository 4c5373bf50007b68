"""A model server: vLLM's own OpenAI-compatible server, with token checks and, unless PRL_FROZEN is set, weight updates.

PRL_TOKEN=… python -m prl.engines.vllm.server --model DIR --port 8000 [any vLLM server argument]
"""

import hmac
import os
import secrets
import sys
import tempfile
from typing import TYPE_CHECKING

from prl.engines.protocol import ANOTHER_INSTANCE, FROZEN_VARIABLE, TOKEN_VARIABLE
from prl.engines.vllm import start

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

INSTANCE_VARIABLE = "PRL_INSTANCE"
"""A name of its own for each start of a server, which its processes share."""

REQUIRED = [
    "--enable-scale-out",  # POST /inference/v1/generate: token ids in, token ids and logprobs out
    "--max-logprobs=-1",  # of a prompt: as many as a reference is asked for
    "--middleware=prl.engines.vllm.server.TokenAuth",
]
"""Arguments of every prl server; the rest of the command line is vLLM's."""
LIVE = [
    "--worker-extension-cls=prl.engines.vllm.transfer.WorkerExtension",
    '--weight-transfer-config={"backend": "prl"}',
]
"""Arguments of a server that takes new weights, by the routes in `routes.py`; those of its command line come after."""


class TokenAuth:
    """ASGI middleware: answers 401 unless the request carries `Authorization: Bearer $PRL_TOKEN`, and 412 where it
    carries an `If-Match` that is not this start of the server (`PRL_INSTANCE`).

    It stands before every route: vLLM's own `--api-key` covers `/v1` only, and leaves weight updates, pause and
    tokenization open.
    """

    def __init__(self, app: "ASGIApp"):
        token = os.environ.get(TOKEN_VARIABLE)
        if not token:
            raise RuntimeError(f"{TOKEN_VARIABLE} is not set: a prl server does not start without a token")
        self.app = app
        self.expected = f"Bearer {token}".encode()
        self.instance = os.environ.get(INSTANCE_VARIABLE, "").encode()

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        headers = dict(scope.get("headers", ()))
        status, error = 401, "missing or wrong token"
        if scope["type"] == "lifespan" or hmac.compare_digest(headers.get(b"authorization", b""), self.expected):
            if headers.get(b"if-match", self.instance) == self.instance:
                return await self.app(scope, receive, send)
            status, error = ANOTHER_INSTANCE, "the server was started anew: what it had loaded is gone"
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        from starlette.responses import JSONResponse  # the clients, which import this module too, do without it

        await JSONResponse({"error": error}, status_code=status)(scope, receive, send)


def main() -> None:
    """Serve with the arguments of the command line and those that every prl server has."""
    if not os.environ.get(TOKEN_VARIABLE):
        raise SystemExit(f"set {TOKEN_VARIABLE}: every request must carry it as a bearer token")
    os.environ[INSTANCE_VARIABLE] = secrets.token_hex(8)
    os.environ["VLLM_PLUGINS"] = ",".join(start.plugin_names(os.environ.get("VLLM_PLUGINS")))
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ["VLLM_RPC_BASE_PATH"] = tempfile.gettempdir()  # which goes with the run, whatever the variable was
    if not any(arg.startswith("--host") for arg in sys.argv[1:]):
        sys.argv += ["--host", "127.0.0.1"]
    sys.argv += REQUIRED
    if not os.environ.get(FROZEN_VARIABLE):
        sys.argv[1:1] = LIVE
    start.serve()


if __name__ == "__main__":
    main()
