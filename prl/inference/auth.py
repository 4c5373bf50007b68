"""The token check in front of every route of a prl server.

vLLM's own `--api-key` covers `/v1` only, and leaves weight updates, pause and tokenization open.
"""

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

TOKEN_VARIABLE = "PRL_TOKEN"
"""Environment variable of a server's token; of a run's, where its servers already run."""


class TokenAuth:
    """ASGI middleware: answers 401 unless the request carries `Authorization: Bearer $PRL_TOKEN`."""

    def __init__(self, app: App):
        token = os.environ.get(TOKEN_VARIABLE)
        if not token:
            raise RuntimeError(f"{TOKEN_VARIABLE} is not set: a prl server does not start without a token")
        self.app = app
        self.expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if hmac.compare_digest(given, self.expected):
            return await self.app(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        body = b'{"error": "missing or wrong token"}'
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": body})
