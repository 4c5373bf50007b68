"""The token check in front of every route of a prl server.

vLLM's own `--api-key` covers `/v1` only and leaves weight updates, pause and tokenisation open.
"""

import hmac
import os

TOKEN_VARIABLE = "PRL_TOKEN"
RUN_TOKEN_VARIABLE = "PRL_RUN_TOKEN"
"""Where a run puts its own token for the clients in its process; unlike the other, nobody is asked to set it."""


class TokenAuth:
    """ASGI middleware: answers 401 unless the request carries `Authorization: Bearer $PRL_TOKEN`."""

    def __init__(self, app):
        token = os.environ.get(TOKEN_VARIABLE)
        if not token:
            raise RuntimeError(f"{TOKEN_VARIABLE} is not set: a prl server does not start without a token")
        self.app = app
        self.expected = f"Bearer {token}".encode()

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        headers = dict(scope.get("headers", ()))
        if hmac.compare_digest(headers.get(b"authorization", b""), self.expected):
            return await self.app(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        body = b'{"error": "missing or wrong token"}'
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": body})
