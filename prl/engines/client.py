"""Clients of models: the interface of every model, that of the live policy, and the policy's client over HTTP."""

import asyncio
import tempfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from filelock import FileLock, Timeout

from prl.base.errors import DeadlinePassed, EngineError, PrlError
from prl.engines import replies
from prl.engines.http import PROBE_S, Endpoints
from prl.engines.protocol import GENERATE, LOAD, TOKEN_VARIABLE
from prl.engines.replies import Completion, Scored
from prl.engines.rotation import Rotation
from prl.engines.servers import Server, Traffic
from prl.rollouts.inputs import ModelInput

if TYPE_CHECKING:
    from prl.rollouts.pictures import PictureStore

Read = TypeVar("Read")
Offer = Callable[[], AbstractAsyncContextManager[dict[str, Any]]]
"""Finds one server new weights: inside its block the server is to be asked for them, with the body that it yields."""


def scoring(top_k: int) -> dict[str, Any]:
    """Sampling parameters that ask prl's server for a prompt's own logprobs and the `top_k` best in each place."""
    return {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": top_k, "detokenize": False}


class ModelPool(ABC):
    """A model that samples and scores."""

    version: int | None = None
    """Policy version that a request sent now starts from; None for a frozen model."""
    http: Endpoints | None = None
    """The model's servers, for clients other than this one; None where it runs in this process."""

    def __init__(self, model: str, traffic: Traffic, pictures: "PictureStore | None" = None):
        """
        Args:
            model: Its name.
            traffic: What it is asked for at the moment, and when its engines were at work.
            pictures: The store of the pictures that it is shown; None = none are.
        """
        self.model = model
        self.traffic = traffic
        self.pictures = pictures

    @abstractmethod
    async def generate(
        self, prompt: ModelInput, sampling: dict[str, Any], *, n: int = 1, prefix: str | None = None
    ) -> list[Completion]:
        """Sample `n` continuations of one prompt.

        Args:
            prompt: The prompt, pictures included.
            sampling: The sampling parameters, by the names of `prl.engines.protocol`.
            n: Number of continuations; that number i has the seed `sampling["seed"] + i`.
            prefix: Name of what the prompt begins with; None = nothing that another request has in common with it.
        """

    async def prompt_logprobs(self, sequence: ModelInput) -> list[float]:
        """Prefill logprobs `[tokens]` of a sequence, as `top_logprobs` has them."""
        return (await self.top_logprobs(sequence, 0)).own

    @abstractmethod
    async def top_logprobs(self, sequence: ModelInput, top_k: int) -> Scored:
        """Prefill logprobs of a sequence, each looked up by its token id, and the `top_k` most likely in each place.

        Raises EngineError where a logprob is missing or not finite: such a value is never replaced by 0.0.
        """

    @abstractmethod
    async def wait_ready(self, timeout_s: float, still_alive: Callable[[], None] = lambda: None) -> None:
        """Wait until the model can answer.

        Args:
            timeout_s: Deadline, seconds.
            still_alive: Called now and then; what it raises ends the wait early.

        Raises:
            DeadlinePassed: Naming the servers that did not answer.
            EngineError: At once, where a server refuses the token.
        """

    async def close(self) -> None:
        if self.http is not None:
            await self.http.close()

    def picture_fields(self, shown: ModelInput) -> dict[str, Any]:
        """Return what a request to prl's server says of pictures. Raises EngineError where the model is shown none."""
        if not shown.pictures:
            return {}
        return {"pictures": shown.pictures, "picture_folder": str(self.store.folder.resolve())}

    @property
    def store(self) -> "PictureStore":
        """The store of the pictures that it is shown. Raises EngineError where none are."""
        if self.pictures is None:
            raise EngineError(f"the model {self.model!r} is shown no pictures, and the prompt has some", 400)
        return self.pictures

    @property
    def cache_salt(self) -> str | None:
        """Sent with requests, to keep cached prefixes of different weights apart; None for a frozen model."""
        return None if self.version is None else f"v{self.version}"

    @property
    def servers(self) -> Sequence[Server]:
        return self.traffic.servers

    @property
    def urls(self) -> list[str]:
        """Return the addresses of the servers, without `/v1`."""
        return [server.url for server in self.servers]

    @property
    def ailing(self) -> bool:
        """Return whether a server has just failed to answer."""
        return any(server.avoided for server in self.servers)

    @property
    def answered(self) -> int:
        """Requests that were answered so far."""
        return self.traffic.answered

    @property
    def requests_in_flight(self) -> int:
        return sum(server.in_flight for server in self.servers)


class PolicyPool(ModelPool):
    """The live policy: a model whose weights are updated."""

    version: int = 0
    """Policy version of all its servers; while they load another, some may have that already."""
    counts: Counter[str]
    """Metrics since the run began."""

    @property
    def loading(self) -> int | None:
        """The version that is being loaded; None = none is."""
        return next((server.loading for server in self.servers if server.loading is not None), None)

    @abstractmethod
    async def update_weights(self, version: int, path: str, timeout_s: float = 300.0) -> None:
        """Load new weights.

        Running requests are kept and continue under the new weights. No cached prefix of an older version survives.

        Args:
            version: The policy version of the weights.
            path: Their safetensors folder.
            timeout_s: Deadline, seconds.

        Raises DeadlinePassed or EngineError where the weights are not loaded.
        """

    async def receive_weights(self, version: int, offer: Offer, timeout_s: float = 300.0) -> None:
        """Load new weights, as `update_weights` does, from a sender that `offer` finds.

        Of engines that say so alone (`Engine.receives_weights`).
        """
        raise EngineError(f"{type(self).__name__} takes weights from folders only")


class InferencePool(PolicyPool):
    """The live policy on prl's own servers, which exchange token ids and logprobs.

    Invariant: a server in the rotation has the version that is on record for it, and is sent no request while it loads
    another, so the version that a request starts from is known. One that was sent before may live through the update:
    its last token is then at most of the version being loaded.
    """

    http: Endpoints

    def __init__(
        self,
        urls: list[str],
        model: str,
        token: str | None,
        *,
        shared: bool = False,
        restart_s: float = 0.0,
        pictures: "PictureStore | None" = None,
    ):
        """
        Args:
            urls: Base URLs of the servers, with or without `/v1`.
            model: The name they serve the model under.
            token: Sent as a bearer token; None = none is sent.
            shared: Whether the servers outlive this run. It has them alone meanwhile: PrlError where another one does.
            restart_s: Seconds that requests wait for a server that is away: the time that starting it again may take; 0
                = nobody does.
            pictures: The store of the pictures that the model is shown; None = none are.
        """
        super().__init__(model, Traffic(servers_at(urls, restart_s)), pictures)
        self.http = Endpoints(model, token, self.traffic)
        self.rotation = Rotation(self.http.servers, self.http.router, self._probe, self._catch_up)
        self.counts = self.rotation.counts
        self._updating = asyncio.Lock()
        self._newest = 0
        self._offer: Offer | None = None
        """Finds a server the weights of the newest version; None = the servers began with them."""
        self._update_timeout_s = 300.0
        self._locks = [lock_of(url) for url in self.urls] if shared else []

    async def generate(
        self,
        prompt: ModelInput,
        sampling: dict[str, Any],
        *,
        n: int = 1,
        prefix: str | None = None,
        adapter: str | None = None,
    ) -> list[Completion]:
        """Sample as every model does; with the folder of an `adapter` beside it (`EngineSpec.adapters`)."""
        # A server searches for stop strings in the text, which it makes only when asked to detokenise.
        sampling = {**sampling, "n": n, "detokenize": bool(sampling.get("stop"))}
        priority = sampling.pop("priority", 0)

        def read(reply: dict[str, Any], version: int) -> list[Completion]:
            # The newest version of now, not of the start: an update may have come while the reply was sampled.
            replies.require_prompt(prompt.token_ids, reply)
            return [replies.read_completion(choice, version, self._newest) for choice in replies.choices_of(reply, n)]

        return await self._ask(prompt, sampling, read, n, prefix, priority, adapter)

    async def top_logprobs(self, sequence: ModelInput, top_k: int, *, adapter: str | None = None) -> Scored:
        def read(reply: dict[str, Any], version: int) -> Scored:
            return replies.read_scored(reply, sequence.token_ids, top_k)

        return await self._ask(sequence, scoring(top_k), read, adapter=adapter)

    async def _ask(
        self,
        asked: ModelInput,
        sampling: dict[str, Any],
        read: Callable[[dict[str, Any], int], Read],
        n: int = 1,
        prefix: str | None = None,
        priority: int = 0,
        adapter: str | None = None,
    ) -> Read:
        """Return what `read` makes of the reply, and the version that its server had when the request started."""

        async def send(server: Server) -> Read:
            version = server.version
            # The salt keeps the cache of one version from another's requests, whatever a server does at an update.
            body: dict[str, Any] = {"token_ids": asked.token_ids, "sampling": sampling}
            body |= {"cache_salt": f"v{version}", "priority": priority, **self.picture_fields(asked)}
            if adapter is not None:
                body["adapter"] = adapter
            reply = await self.http.post(server, GENERATE, body, n=n)
            with self.http.reading(server, GENERATE):
                return read(reply, version)

        return await self.rotation.send(send, n, prefix)

    async def wait_ready(self, timeout_s: float, still_alive: Callable[[], None] = lambda: None) -> None:
        credentials = f"the token; start it with this run's {TOKEN_VARIABLE}"
        await self.http.wait_ready(self._probe, credentials, timeout_s, still_alive)

    async def _probe(self, server: Server) -> None:
        await self.http.request("GET", server.url, "/health", timeout_s=PROBE_S, headers=server.headers)

    async def update_weights(self, version: int, path: str, timeout_s: float = 300.0) -> None:
        await self.receive_weights(version, lambda: nullcontext({"path": path}), timeout_s)

    async def receive_weights(self, version: int, offer: Offer, timeout_s: float = 300.0) -> None:
        """Load new weights into every server at the same time; one that dies of it, or was away, when it is back.

        Each is sent requests again once it has loaded them.
        """
        async with self._updating:
            # Before any server loads: one that comes back meanwhile takes these weights, not the ones before.
            self._newest = version
            self._offer = offer
            self._update_timeout_s = timeout_s
            await asyncio.gather(*(self._update(server) for server in self.servers if not server.away))
            # If all have died of it, the update is over once one of them is back.
            await self.rotation.free()
            self.version = version

    async def _update(self, server: Server) -> None:
        """Have a server of the rotation load the newest version; one that dies meanwhile does so when it is back."""
        lives = server.lives
        try:
            await self._load(server)
        except EngineError as error:
            if not await self.rotation.lost(server, lives, error):
                raise

    async def _catch_up(self, server: Server, anew: bool) -> None:
        anew = anew or server.instance is None  # it has never said that it loaded any
        # Once more where a newer version has come while one was loaded.
        while self._offer is not None and (anew or server.version != self._newest):
            version = self._newest
            try:
                await self._load(server)
                anew = False
            except EngineError:
                if version == self._newest:  # else these weights may be gone by now
                    raise

    async def _load(self, server: Server) -> None:
        """Have a server load the newest version, with no request sent to it meanwhile."""
        version, limit_s = self._newest, self._update_timeout_s
        assert self._offer is not None
        try:
            with self.traffic.loading(server, version):
                async with asyncio.timeout(limit_s), self._offer() as body:
                    reply = await self.http.request("POST", server.url, LOAD, body)
                if not (isinstance(reply, dict) and "loaded" in reply):
                    raise EngineError(f"{server.url}{LOAD} does not say that policy version {version} is loaded")
                server.instance = reply.get("instance")
        except TimeoutError:
            raise DeadlinePassed(f"{server.url} did not load policy version {version} within {limit_s:g} s") from None
        finally:
            self.rotation.notify()

    async def close(self) -> None:
        await self.rotation.close()
        await super().close()
        for lock in self._locks:
            lock.release()


def servers_at(urls: list[str], restart_s: float = 0.0) -> list[Server]:
    """The servers at base URLs, with or without `/v1`; requests wait `restart_s` seconds for one that is away."""
    return [Server(url.rstrip("/").removesuffix("/v1"), restart_s=restart_s) for url in urls]


def lock_of(url: str) -> FileLock:
    """The lock of a server that outlives its runs, acquired. Raises PrlError where another run of this machine has it.

    Two runs at once would sample from each other's weights. The lock goes with its process, however that ends.
    """
    # By the address: runs that name the server in other words (with /v1, say) find the same lock.
    address = urlsplit(url).netloc.replace(":", "_")
    lock = FileLock(Path(tempfile.gettempdir()) / f"prl-engine-{address}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise PrlError(f"engine.urls: another run has the engine at {url}; wait for its end") from None
    return lock
