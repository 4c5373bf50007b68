"""Token exactness: a trace holds what its calls sent and sampled, and samples that extend each other are one."""

import hashlib
from array import array
from collections.abc import Iterator
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
                branches[id(sample)] = _grafted(branches[id(sample)], sample.mask, branches.pop(id(other)), other.mask)
                sample.mask[:end] = [a or b for a, b in masks]
                sample.logprobs[:end] = [a + b for a, b in zip(other.logprobs[:end], sample.logprobs[:end], strict=True)]
                beginnings.remove(other)
        beginnings.append(sample)
    return [(sample, branches[id(sample)]) for sample, _ in made if id(sample) in branches]


def _begins(sample: TrainingSample, ends: dict[int, int], other: TrainingSample) -> bool:
    end = ends[id(sample)]
    return end <= ends[id(other)] and sample.token_ids[:end] == other.token_ids[:end]


def _grafted(branch: Branch, mask: list[bool], beginning: Branch, trained_there: list[bool]) -> Branch:
    """`branch` with the messages of `beginning` that train; the two masks say which tokens train in either."""
    kept = [span for span in _spans(branch) if any(mask[span[0] : span[1]])]
    kept += [span for span in _spans(beginning) if any(trained_there[span[0] : span[1]])]
    nodes: list[MessageNode] = []
    at, scaffold = 0, []
    for start, stop, node in [*sorted(kept, key=lambda span: span[1]), (len(mask), len(mask), None)]:
        parts = [(other, first, at, min(last, start)) for first, last, other in _spans(branch) if first < start and last > at]
        parts += [(node, start, at, stop)] if node else []
        for other, first, begin, end in parts:
            part = _cut(other, max(begin - first, 0), end - first, scaffold)
            scaffold = []
            if len(part.token_ids) < len(other.token_ids) and not any(part.mask) and not any(part.is_content):
                scaffold = part.token_ids  # what the template puts around messages
            else:
                nodes.append(part)
        at = stop
    return branch.model_copy(update={"nodes": nodes})


def _spans(branch: Branch) -> Iterator[tuple[int, int, MessageNode]]:
    """Where each message's tokens begin and end."""
    stop = 0
    for node in branch.nodes:
        start, stop = stop, stop + len(node.token_ids)
        yield start, stop, node


def _cut(node: MessageNode, begin: int, end: int, scaffold: list[int]) -> MessageNode:
    """The message's tokens `begin` to `end` with `scaffold` before them; itself where that changes nothing."""
    if not begin and end == len(node.token_ids) and not scaffold:
        return node
    lead, sampled = [False] * len(scaffold), sum(node.mask[:begin])
    attributed = len(node.is_content) == len(node.token_ids)
    changed: dict[str, Any] = {
        "token_ids": scaffold + node.token_ids[begin:end],
        "mask": lead + node.mask[begin:end],
        "logprobs": node.logprobs[sampled : sampled + sum(node.mask[begin:end])],
        "is_content": lead + node.is_content[begin:end] if attributed else [],
    }
    return node.model_copy(update=changed)
