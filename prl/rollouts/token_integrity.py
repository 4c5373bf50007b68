"""Token exactness: a trace holds what its calls sent and sampled."""

import hashlib
from array import array

from pydantic import Field
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import ModelCall, Trace


class TokenMismatch(ValueError):
    """A trace does not hold the tokens that a model call sent and sampled."""

    kind = "tokens"


class Call(ModelCall):
    """A model call, and the digest of what it sent and sampled."""

    digest: bytes = Field(default=b"", exclude=True, repr=False)


class Digest:
    """A digest of token ids that grows with them."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, token_ids: list[int]) -> "Digest":
        self._hash.update(array("I", token_ids))
        return self

    def value(self) -> bytes:
        """Of all that was added so far."""
        return self._hash.digest()


class Sent:
    """What a trace's calls sent and sampled, to hold its nodes against. Of verifiers' own calls only counts are known."""

    def __init__(self, trace: Trace, env_name: str):
        self._env_name = env_name
        self._made_by_hand = not trace.calls
        self._calls = {
            id(trace.nodes[call.node]): (turn, call)
            for turn, call in enumerate(trace.calls, 1)
            if call.node is not None
        }

    def check(self, node: MessageNode, length: int, digest: Digest) -> None:
        """Raise TokenMismatch unless the `length` tokens of `digest`, up to and with the sampled `node`, are its call's."""
        if self._made_by_hand:
            return
        turn, call = self._calls.get(id(node), (None, None))
        if call is None:
            raise TokenMismatch(f"env {self._env_name!r}: a sampled message belongs to no model call")
        usage = call.usage
        if usage is not None and (length - sum(node.mask), sum(node.mask)) != (
            usage.prompt_tokens,
            usage.completion_tokens,
        ):
            raise TokenMismatch(
                f"env {self._env_name!r}, turn {turn}: {usage.prompt_tokens} tokens were sent and "
                f"{usage.completion_tokens} sampled, but the trace holds {length - sum(node.mask)} and {sum(node.mask)}"
            )
        if isinstance(call, Call) and call.digest != digest.value():
            raise TokenMismatch(
                f"env {self._env_name!r}, turn {turn}: the {length} tokens that the trace holds are not those that were sent "
                "and sampled"
            )
