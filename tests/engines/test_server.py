"""The token check, as an ASGI middleware."""

import pytest

from prl.engines.vllm.server import TokenAuth


class App:
    """Notes what gets through."""

    def __init__(self):
        self.scopes = []

    async def __call__(self, scope, receive, send):
        self.scopes.append(scope["type"])


@pytest.fixture
def app(monkeypatch):
    monkeypatch.setenv("PRL_TOKEN", "s3cret")
    return App()


async def call(app, kind, *headers):
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": kind, "path": "/collective_rpc", "headers": list(headers)}
    await TokenAuth(app)(scope, None, send)
    return sent


WRONG = [
    (),
    ((b"authorization", b"Bearer wrong"),),
    ((b"authorization", b"s3cret"),),
    ((b"authorization", b"Bearer s3cretx"),),
    ((b"authorization", b"bearer s3cret"),),
    ((b"authorization", b""),),
    ((b"authorization", "Bearer s3cret\N{SNOWMAN}".encode()),),
    ((b"x-api-key", b"s3cret"),),
]


@pytest.mark.parametrize("headers", WRONG)
async def test_http_without_the_token_is_401(app, headers):
    start, body = await call(app, "http", *headers)
    assert app.scopes == []
    assert start["type"] == "http.response.start" and start["status"] == 401
    assert dict(start["headers"])[b"content-length"] == str(len(body["body"])).encode()
    assert b"token" in body["body"] and b"s3cret" not in body["body"]


@pytest.mark.parametrize("headers", WRONG)
async def test_websocket_without_the_token_is_closed(app, headers):
    assert await call(app, "websocket", *headers) == [{"type": "websocket.close", "code": 1008}]
    assert app.scopes == []


@pytest.mark.parametrize("kind", ["http", "websocket"])
async def test_the_token_passes(app, kind):
    sent = await call(app, kind, (b"host", b"x"), (b"authorization", b"Bearer s3cret"))
    assert sent == [] and app.scopes == [kind]


async def test_an_unknown_kind_of_request_does_not_pass(app):
    await call(app, "something new")
    assert app.scopes == []


async def test_start_and_stop_messages_pass(app):
    async def send(message): ...

    await TokenAuth(app)({"type": "lifespan"}, None, send)
    assert app.scopes == ["lifespan"]


@pytest.mark.parametrize("value", [None, ""])
def test_no_server_without_a_token(monkeypatch, value):
    monkeypatch.delenv("PRL_TOKEN", raising=False)
    if value is not None:
        monkeypatch.setenv("PRL_TOKEN", value)
    with pytest.raises(RuntimeError, match="PRL_TOKEN is not set"):
        TokenAuth(App())


async def test_a_request_for_an_earlier_start_of_the_server_is_412(app, monkeypatch):
    monkeypatch.setenv("PRL_INSTANCE", "this")
    token = (b"authorization", b"Bearer s3cret")
    assert await call(app, "http", token, (b"if-match", b"this")) == [] and app.scopes == ["http"]
    start, body = await call(app, "http", token, (b"if-match", b"another"))
    assert start["status"] == 412 and b"started anew" in body["body"] and b"this" not in body["body"]
    start, _ = await call(app, "http", (b"if-match", b"this"))
    assert start["status"] == 401, "the token comes first"
    assert app.scopes == ["http"]
