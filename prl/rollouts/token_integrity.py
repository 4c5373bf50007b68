"""Token exactness: a trace holds the tokens that its model calls sent and sampled."""

import hashlib
from array import array
from collections.abc import Sequence

from pydantic import Field
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import ModelCall, Trace


class TokenMismatch(ValueError):
    """A trace does not hold the tokens that a model call sent and sampled."""

    kind = "tokens"


class RecordedCall(ModelCall):
    """A model call with the digest of the tokens that it sent and sampled, and the policy versions that sampled them.

    The versions are None of a frozen model.
    """

    digest: bytes = Field(default=b"", exclude=True, repr=False)
    start_version: int | None = Field(default=None, exclude=True, repr=False)
    end_version: int | None = Field(default=None, exclude=True, repr=False)


class TokenDigest:
    """An incremental digest of token ids."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, token_ids: Sequence[int]) -> "TokenDigest":
        self._hash.update(array("I", token_ids))
        return self

    def value(self) -> bytes:
        """Return the digest of all tokens that were added so far."""
        return self._hash.digest()


class TokenLedger:
    """The tokens that each model call sent and sampled, to verify the nodes of a trace.

    Of calls that verifiers' own client made, only the token counts are known. A trace without any recorded call was
    built by hand and is not verified.
    """

    def __init__(self, trace: Trace, env_name: str):
        self._env_name = env_name
        self._has_calls = bool(trace.calls)
        self._calls: dict[int, tuple[int, ModelCall]] = {
            id(trace.nodes[call.node]): (turn, call)
            for turn, call in enumerate(trace.calls, 1)
            if call.node is not None
        }

    def check(self, node: MessageNode, length: int, digest: TokenDigest) -> None:
        """Verify a sampled node and all tokens before it.

        Args:
            node: The sampled message.
            length: Number of tokens on the branch up to the end of `node`.
            digest: Digest of these tokens.

        Raises:
            TokenMismatch: The tokens differ from those that the node's call sent and sampled.
        """
        if not self._has_calls:
            return
        if id(node) not in self._calls:
            raise TokenMismatch(f"env {self._env_name!r}: a sampled message belongs to no model call")
        turn, call = self._calls[id(node)]
        where = f"env {self._env_name!r}, turn {turn}"
        sampled = sum(node.mask)
        usage = call.usage
        if usage is not None and (length - sampled, sampled) != (usage.prompt_tokens, usage.completion_tokens):
            raise TokenMismatch(
                f"{where}: {usage.prompt_tokens} tokens were sent and {usage.completion_tokens} sampled, "
                f"but the trace holds {length - sampled} and {sampled}"
            )
        if isinstance(call, RecordedCall) and call.digest != digest.value():
            raise TokenMismatch(
                f"{where}: the {length} tokens that the trace holds are not those that were sent and sampled"
            )
