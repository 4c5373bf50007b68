"""A door in front of a real server, which lets requests through as they are, refuses them, or spoils the replies."""

import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

GENERATE, UPDATE, SCORE = "/prl/generate", "/prl/load_policy", "/v1/completions"
Fault = Callable[["Request"], tuple[int, bytes]]


class Request:
    """One request at the door; `ask` passes it on."""

    def __init__(self, door: "Door", handler: BaseHTTPRequestHandler):
        self.door, self.handler, self.path = door, handler, handler.path
        self.body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))

    def ask(self) -> tuple[int, bytes]:
        """Status and body of what the server says."""
        server = http.client.HTTPConnection(*self.door.address, timeout=60)
        try:
            server.request(self.handler.command, self.path, self.body, dict(self.handler.headers))
            reply = server.getresponse()
            return reply.status, reply.read()
        finally:
            server.close()


class Cut(Exception):
    """The connection is to be cut in the middle of this reply."""

    def __init__(self, body: bytes):
        self.body = body


class Door:
    """Passes requests on to `url`. `choose(request, number)` may return a `Fault` for the number-th request of a route.

    Shut (`open` is False), it answers 503 to everything.
    """

    def __init__(self, url: str):
        host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
        self.address = host, int(port)
        self.open = True
        self.choose: Callable[[Request, int], Fault | None] = lambda request, number: None
        self.spoilt: Counter[str] = Counter()
        """Replies that a fault made, by the fault's name."""
        self.first_spoilt: float | None = None
        """When the first of them was asked for, on the monotonic clock."""
        self.closed = threading.Event()
        self._numbers: Counter[str] = Counter()
        self._lock = threading.Lock()
        door = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                request = Request(door, self)
                try:
                    status, body = door.pass_on(request)
                except Cut as cut:
                    self._send(200, cut.body[: len(cut.body) // 2], len(cut.body))
                    self.close_connection = True
                    return
                self._send(status, body, len(body))

            do_GET = do_POST = answer

            def _send(self, status: int, body: bytes, length: int) -> None:
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(length))
                    self.end_headers()
                    self.wfile.write(body)
                except ConnectionError:  # whoever asked has given up
                    self.close_connection = True

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads, self.server.block_on_close = True, False
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def pass_on(self, request: Request) -> tuple[int, bytes]:
        if not self.open:
            return 503, b'{"error": "shut"}'
        with self._lock:
            number = self._numbers[request.path]
            self._numbers[request.path] += 1
            fault = self.choose(request, number)
            if fault is not None:
                self.spoilt[fault.__name__] += 1
                self.first_spoilt = self.first_spoilt or time.monotonic()
        return request.ask() if fault is None else fault(request)

    def close(self) -> None:
        self.closed.set()
        self.server.shutdown()
        self.server.server_close()


# --- faults -----------------------------------------------------------------------------------------------------------


def answers_500(request: Request) -> tuple[int, bytes]:
    return 500, b'{"error": "out of luck"}'


def hangs(request: Request) -> tuple[int, bytes]:
    request.door.closed.wait(600)
    return 503, b"{}"


def cut_connection(request: Request) -> tuple[int, bytes]:
    raise Cut(request.ask()[1])


def slow(request: Request) -> tuple[int, bytes]:
    time.sleep(1.0)
    return request.ask()


def truncated_json(request: Request) -> tuple[int, bytes]:
    status, body = request.ask()
    return status, body[: body.rindex(b",")]  # between two values, where a parser can only miss the rest


def nothing_at_all(request: Request) -> tuple[int, bytes]:
    return 200, b""


def nested_too_deep(request: Request) -> tuple[int, bytes]:
    return 200, b"[" * 100_000


def spoiling(name: str, spoil: Callable[[dict[str, Any]], None]) -> Fault:
    """The fault `name`: the real reply as `spoil` leaves it."""

    def fault(request: Request) -> tuple[int, bytes]:
        status, body = request.ask()
        if status != 200:  # the server's own trouble
            return status, body
        reply = json.loads(body)
        spoil(reply)
        return status, json.dumps(reply).encode()

    fault.__name__ = name
    return fault


def last(change: Callable[[list[int], list[Any]], None]) -> Callable[[dict[str, Any]], None]:
    """Spoil tokens and logprobs of each choice."""

    def spoil(reply: dict[str, Any]) -> None:
        for choice in reply["choices"]:
            change(choice["token_ids"], choice["logprobs"])

    return spoil


def set_last(token: int | None = None, **logprob: Any) -> Callable[[dict[str, Any]], None]:
    """Set the last token of each choice, or the last logprob."""

    def change(ids: list[int], logprobs: list[Any]) -> None:
        if token is not None:
            ids[-1] = token
        for value in logprob.values():
            logprobs[-1] = value

    return last(change)


def set_all(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Set a key of each choice."""

    def spoil(reply: dict[str, Any]) -> None:
        for choice in reply["choices"]:
            choice[key] = value

    return spoil


def all_sentinel(ids: list[int], logprobs: list[Any]) -> None:
    logprobs[:] = [-9999.0] * len(logprobs)


def empty(ids: list[int], logprobs: list[Any]) -> None:
    ids.clear()
    logprobs.clear()


def one_logprob_less(ids: list[int], logprobs: list[Any]) -> None:
    logprobs.pop()


def one_token_less(ids: list[int], logprobs: list[Any]) -> None:
    ids.pop()


def another_prompt(reply: dict[str, Any]) -> None:
    reply["prompt_token_ids"] = reply["prompt_token_ids"][:-1] + [1]


def one_completion_less(reply: dict[str, Any]) -> None:
    reply["choices"].pop()


without_logprobs = spoiling("no logprobs", set_all("logprobs", None))
wrong_tokens = spoiling("token outside the vocabulary", set_last(token=99_999))
BROKEN = {
    answers_500: "HTTP 500",
    cut_connection: "generate failed: ",
    truncated_json: "generate failed: Input data was truncated",
    nothing_at_all: "cannot be read: KeyError('choices')",
    nested_too_deep: "maximum recursion depth",
    spoiling("fewer logprobs than tokens", last(one_logprob_less)): "sampled tokens came with",
    spoiling("fewer tokens than logprobs", last(one_token_less)): "sampled tokens came with",
    without_logprobs: "came with 0 logprobs",
    spoiling("logprob null", set_last(logprob=None)): "came with the logprob None",
    spoiling("logprob NaN", set_last(logprob=float("nan"))): "JSON is malformed",
    spoiling('logprob "NaN"', set_last(logprob="NaN")): "came with the logprob 'NaN'",
    spoiling("logprob above 0", set_last(logprob=5.0)): "came with the logprob 5.0",
    spoiling("logprobs all sentinel", last(all_sentinel)): "has a logprob (got -9999.0)",
    wrong_tokens: "sent token 99999",
    spoiling("token beyond 32 bits", set_last(token=1 << 40)): "which the policy does not have",
    spoiling("negative token", set_last(token=-7)): "sent token -7",
    spoiling("token of another kind", set_last(token=1.5)): "no list of token ids",  # type: ignore[arg-type]
    spoiling("another prompt's reply", another_prompt): "continues another prompt",
    spoiling("broken off", set_all("finish_reason", "error")): "it was broken off after",
    spoiling("no list of completions", lambda reply: reply.update(choices=5)): "cannot be read: TypeError",
    spoiling("empty reply", last(empty)): "it has no token",
    spoiling("one completion less", one_completion_less): "asked for 8 completions, got 7",
}
"""Faults of a reply of the policy's engine, and what the reason of a rollout says then."""

given_up = spoiling("given up", set_all("finish_reason", "abort"))
"""As of a server that is about to end: the request is sent again."""
one_sentinel = spoiling("one sentinel logprob", set_last(logprob=-9999.0))
"""The loss leaves such a token out."""


def row(logprob: Any) -> Callable[[dict[str, Any]], None]:
    """Set the logprob of a prompt's last token."""

    def spoil(reply: dict[str, Any]) -> None:
        for entry in reply["choices"][0]["prompt_logprobs"][-1].values():
            entry["logprob"] = logprob

    return spoil


def one_row_less(reply: dict[str, Any]) -> None:
    reply["choices"][0]["prompt_logprobs"].pop()


def other_tokens_rows(reply: dict[str, Any]) -> None:
    rows = reply["choices"][0]["prompt_logprobs"]
    rows[-1] = {"1": next(iter(rows[-1].values()))}


UNSCORED = {
    spoiling("logprob null", row(None)): "(got None)",
    spoiling("logprob NaN", row(float("nan"))): "JSON is malformed",
    spoiling('logprob "NaN"', row("NaN")): "(got 'NaN')",
    spoiling("sentinel logprob", row(-9999.0)): "(got -9999.0)",
    spoiling("fewer logprobs than tokens", one_row_less): "tokens came with",
    spoiling("another token's logprob", other_tokens_rows): "no logprob for token",
    spoiling("no logprobs", lambda reply: reply["choices"][0].pop("prompt_logprobs")): "came with 0 logprobs",
    spoiling("no choice", lambda reply: reply["choices"].clear()): "asked for 1 completions, got 0",
    truncated_json: "Input data was truncated",
    nothing_at_all: "cannot be read: KeyError('choices')",
}
"""Faults of a reply of a model that scores, and what the reason of a rollout says then."""
