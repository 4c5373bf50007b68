"""A model that is not there: for the rehearsal of a dry run, for looking at an env, and for tests."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from prl.engines.client import PolicyPool
from prl.engines.frozen import ReferencePool
from prl.engines.replies import Completion, Scored
from prl.engines.servers import Server, Traffic
from prl.engines.tokenizers import TokenizerProbe
from prl.rollouts.inputs import ModelInput

LOGPROB = -1.0
"""The logprob of every token that the model says or reads."""


class Scripted(PolicyPool, ReferencePool):
    """Says what it is given to say, as the policy or as a frozen model. It has every tokenizer.

    Args:
        replies: The token ids of its reply to each request, one after the other; the last one again and again. Empty =
            it repeats the last token of each prompt.
    """

    timeout_s = 1.0

    def __init__(self, replies: Sequence[list[int]] = ()):
        super().__init__("scripted", Traffic([Server("http://scripted")]))
        self.replies = replies
        self.counts = Counter({"engine/restarts": 0, "engine/requests_reissued": 0})
        self.requests: list[tuple[list[int], dict[str, Any]]] = []
        """Prompt `[tokens]` and sampling parameters of each request so far."""

    async def generate(
        self, prompt: ModelInput, sampling: dict[str, Any], *, n: int = 1, prefix: str | None = None
    ) -> list[Completion]:
        self.requests.append((prompt.token_ids, sampling))
        reply = prompt.token_ids[-1:]
        if self.replies:
            reply = self.replies[min(len(self.requests), len(self.replies)) - 1]
        return [self.completion(reply, self.version) for _ in range(n)]

    def completion(self, token_ids: list[int], start: int | None) -> Completion:
        """Return a reply to a request that was sent at version `start`; of a frozen model it has no logprobs."""
        logprobs = [] if self.version is None else [LOGPROB] * len(token_ids)
        return Completion(list(token_ids), logprobs, "stop", start, self.version)

    async def top_logprobs(self, sequence: ModelInput, top_k: int) -> Scored:
        own = [0.0] + [LOGPROB] * (len(sequence) - 1)
        ids = [
            [token, *(other for other in range(top_k) if other != token)][:top_k] for token in sequence.token_ids[1:]
        ]
        falling = [LOGPROB - place for place in range(top_k)]
        return Scored(own, [[], *ids], [[], *(list(falling) for _ in ids)])

    async def wait_ready(self, timeout_s: float, still_alive: Callable[[], None] = lambda: None) -> None:
        pass

    async def require_tokenizer(self, probe: TokenizerProbe) -> None:
        pass

    async def update_weights(self, version: int, path: str, timeout_s: float = 300.0) -> None:
        self.version = version
