"""The server of the live page. It answers this machine alone, and only whoever knows the token in the address.

A request names a run as the list does; no path of a request reaches the file system.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from scipy.special import stdtrit
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from prl.base.errors import ConfigError, PrlError
from prl.base.text import as_message
from prl.rollouts.pictures import FOLDER, PictureError, PictureStore
from prl.tools.report.curves import KINDS
from prl.tools.report.examples import read_rollouts
from prl.tools.report.html import data_block, encoded, fragment, render
from prl.tools.report.page import origin
from prl.tools.report.runs import read_run
from prl.tools.report.statistics import FEW, LEVEL
from prl.tools.report.variants import seed_of, variants
from prl.tools.watch.feed import Feed
from prl.tools.watch.listing import find
from prl.tools.watch.rollouts import asked, search

PAUSE_S = 1.0
"""[s] Between two looks at the files of the runs that a page shows."""
SCRIPTS = ("curves.js", "run.js", "watch.js")
MOST_SEEDS = 100
"""Seeds of a variant for which the page has the width of an interval."""
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Site:
    """The answers to the requests for `/<token>/<name>`, by name."""

    def __init__(self, folders: Sequence[Path], token: str):
        self.folders = folders
        self.token = token
        named = (self.run, self.rollouts, self.examples, self.picture, self.compare)
        self.answers = {"": self.page} | {answer.__name__: answer for answer in named}

    def app(self) -> Starlette:
        """The server's application."""
        return Starlette(routes=[Route("/{path:path}", self.answer, methods=["GET"])])

    async def answer(self, request: Request) -> Response:
        """Answer a request, and refuse one without the token whatever it asks for."""
        token, slash, name = request.path_params["path"].partition("/")
        if not secrets.compare_digest(token.encode(), self.token.encode()):
            return PlainTextResponse("The token in the address is not that of this server.\n", 403, HEADERS)
        if not slash:  # what the page asks for is beside it
            return RedirectResponse(f"/{self.token}/", headers=HEADERS)
        if name == "news":
            stream = self.news(request.query_params)
            return StreamingResponse(stream, media_type="text/event-stream", headers=HEADERS)
        if name not in self.answers:
            return PlainTextResponse("There is no such page.\n", 404, HEADERS)
        try:
            # A large run takes seconds to read, in which other pages go on.
            answer = await run_in_threadpool(self.answers[name], request.query_params)
        except (PrlError, PictureError, OSError) as error:  # the run has been removed, say
            return PlainTextResponse(as_message(str(error)), 404, HEADERS)
        if isinstance(answer, bytes):
            return Response(answer, media_type="image/png", headers=HEADERS)
        kind = HTMLResponse if name == "" else JSON
        return kind(answer, headers=HEADERS)

    def page(self, query: QueryParams) -> str:
        """The page, which asks for all else."""
        quantiles = [float(stdtrit(seeds - 1, (1 + LEVEL) / 2)) for seeds in range(2, MOST_SEEDS + 1)]
        data = {"live": True, "kinds": KINDS, "quantiles": quantiles, "few": FEW}
        values = {"folders": ", ".join(map(str, self.folders)), "data": data_block("data", data)}
        return render("watch.html.j2", scripts=SCRIPTS, title="prl watch", live=True, **values)

    async def news(self, query: QueryParams) -> AsyncIterator[str]:
        """Server-sent events without end: what `Feed` has, and a `tick` that says that the server is there."""
        places = zip(query.getlist("run"), query.getlist("at"), strict=False)
        feed = Feed(self.folders, dict(places))
        while True:
            reading = asyncio.ensure_future(run_in_threadpool(lambda: [*feed.news()]))
            while not reading.done():  # a slow disk is not a server that is gone
                await asyncio.wait([reading], timeout=PAUSE_S)
                yield "event: tick\ndata: 0\n\n"
            for event, values in reading.result():
                yield f"event: {event}\ndata: {encoded(values)}\n\n"
            await asyncio.sleep(PAUSE_S)

    def run(self, query: QueryParams) -> dict[str, Any]:
        """The page of one run as its file has it, but for what `Feed` sends again and again."""
        run = read_run(self._path(query), with_metrics=False)
        return {"html": fragment("body.html.j2", live=True, run=run, **origin(run))}

    def rollouts(self, query: QueryParams) -> dict[str, Any]:
        """A page of results of a search in a run's rollouts."""
        return search(self._path(query), asked(query))

    def examples(self, query: QueryParams) -> dict[str, Any]:
        """The example groups of a step, with their tokens."""
        found = read_rollouts(self._path(query), asked(query).get("step", 0))
        return {"rows": found.rows, "examples": found.examples}

    def picture(self, query: QueryParams) -> bytes:
        """A picture of a run, by its digest."""
        return PictureStore(self._path(query) / FOLDER).file_of(query.get("digest", "")).read_bytes()

    def compare(self, query: QueryParams) -> dict[str, Any]:
        """The variant and the seed of each run that is chosen, and what differs between their configs."""
        runs = find(self.folders)
        chosen = {name: read_run(runs[name], with_metrics=False) for name in query.getlist("run") if name in runs}
        found = variants([*chosen.values()])
        labels = {run.dir: found.label(values) for values, members in found.members.items() for run in members}
        html = fragment("differences.html.j2", labels=[*dict.fromkeys(labels.values())], differences=found.differences)
        of_run = {name: {"label": labels.get(run.dir, name), "seed": seed_of(run)} for name, run in chosen.items()}
        return {"html": html, "runs": of_run}

    def _path(self, query: QueryParams) -> Path:
        """The directory of the run that a request names. Raises ConfigError where no run has this name."""
        runs, name = find(self.folders), query.get("run", "")
        if name not in runs:
            raise ConfigError(f"there is no run {name}")
        return runs[name]


class JSON(Response):
    """An answer as JSON, whose texts are harmless."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encoded(content).encode()
