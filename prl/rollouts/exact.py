"""Token exactness: a trace holds what its calls sent and sampled, and samples that extend each other are one."""

import hashlib
from array import array
from typing import Any

from pydantic import Field
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import Branch, ModelCall, Trace

from prl.wire import TrainingSample

Made = tuple[TrainingSample, Branch]


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
            id(trace.nodes[call.node]): (turn, call) for turn, call in enumerate(trace.calls, 1) if call.node is not None
        }

    def check(self, node: MessageNode, length: int, digest: Digest) -> None:
        """Raise TokenMismatch unless the `length` tokens of `digest`, up to and with the sampled `node`, are its call's."""
        if self._made_by_hand:
            return
        turn, call = self._calls.get(id(node), (None, None))
        if call is None:
            raise TokenMismatch(f"env {self._env_name!r}: a sampled message belongs to no model call")
        usage = call.usage
        if usage is not None and (length - sum(node.mask), sum(node.mask)) != (usage.prompt_tokens, usage.completion_tokens):
            raise TokenMismatch(
                f"env {self._env_name!r}, turn {turn}: {usage.prompt_tokens} tokens were sent and "
                f"{usage.completion_tokens} sampled, but the trace holds {length - sum(node.mask)} and {sum(node.mask)}"
            )
        if isinstance(call, Call) and call.digest != digest.value():
            raise TokenMismatch(
                f"env {self._env_name!r}, turn {turn}: the {length} tokens that the trace holds are not those that were sent "
                "and sampled"
            )


def merged(made: list[Made]) -> list[Made]:
    """The samples, those left out that another one begins with: their trained tokens are trained there.

    verifiers' graph goes by messages before it goes by tokens. Where a message was said twice in other tokens, or two
    messages are the same tokens, a call may stand on a branch of its own although its prompt extends another's tokens.
    Samples that train the same token twice stay apart.
    """
    if len(made) < 2:
        return made
    ends = {id(sample): len(sample.mask) - sample.mask[::-1].index(True) for sample, _ in made}  # behind what they train
    branches = {id(sample): branch for sample, branch in made}
    beginnings: list[TrainingSample] = []  # each begins the next
    for sample, _ in sorted(made, key=lambda pair: pair[0].token_ids[: ends[id(pair[0])]]):
        while beginnings and not _begins(beginnings[-1], ends, sample):
            beginnings.pop()
        for other in reversed(beginnings):
            end = ends[id(other)]
            masks = list(zip(other.mask[:end], sample.mask[:end], strict=True))
            if not any(a and b for a, b in masks):
                sample.mask[:end] = [a or b for a, b in masks]
                sample.logprobs[:end] = [a + b for a, b in zip(other.logprobs[:end], sample.logprobs[:end], strict=True)]
                branches[id(sample)] = _grafted(branches.pop(id(other)), branches[id(sample)], end)
                beginnings.remove(other)
        beginnings.append(sample)
    return [(sample, branches[id(sample)]) for sample, _ in made if id(sample) in branches]


def _begins(sample: TrainingSample, ends: dict[int, int], other: TrainingSample) -> bool:
    end = ends[id(sample)]
    return end <= ends[id(other)] and sample.token_ids[:end] == other.token_ids[:end]


def _grafted(beginning: Branch, branch: Branch, end: int) -> Branch:
    """`branch` with the messages of `beginning` for its first `end` tokens; one ends there."""
    nodes, length = [], 0
    for node in beginning.nodes:
        if length < end:
            nodes.append(node)
            length += len(node.token_ids)
    start, scaffold = 0, []
    for node in branch.nodes:
        stop = start + len(node.token_ids)
        if stop > end:
            node = _cut(node, max(end - start, 0), scaffold)
            scaffold = []
            if start < end and not any(node.mask) and not any(node.is_content):  # the template's end of a message
                scaffold = node.token_ids
            else:
                nodes.append(node)
        start = stop
    return branch.model_copy(update={"nodes": nodes})


def _cut(node: MessageNode, count: int, scaffold: list[int]) -> MessageNode:
    """The message without its first `count` tokens, and with `scaffold` before it; itself where that changes nothing."""
    if not count and not scaffold:
        return node
    lead = [False] * len(scaffold)
    changed: dict[str, Any] = {
        "token_ids": scaffold + node.token_ids[count:],
        "mask": lead + node.mask[count:],
        "logprobs": node.logprobs[sum(node.mask[:count]) :],
        "is_content": lead + node.is_content[count:] if len(node.is_content) == len(node.token_ids) else [],
    }
    return node.model_copy(update=changed)
