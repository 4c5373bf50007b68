"""Which model calls go on from which, token for token.

verifiers' graph goes by messages before it goes by tokens. Where a message was said twice, in the same or other tokens, or
two messages are the same tokens, a call may stand on a branch of its own although its prompt extends another call's tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import Branch, Trace

from prl.wire import TrainingSample

Made = tuple[TrainingSample, Branch]


@dataclass(eq=False, slots=True)
class Said:
    """What one call sampled and one sample trains."""

    of: int
    """The sample's number."""
    node: MessageNode
    first: int
    """Where the message begins in the sample; its sampled tokens are `begin` to `stop`."""
    begin: int
    stop: int


def merged(made: list[Made], trace: Trace) -> list[Made]:
    """The samples as the calls make them, one after the other: each joins the longest sample that its prompt extends.

    Tokens that two calls sampled in one place stay in two samples.
    """
    if len(made) < 2:
        return made
    said = [
        Said(number, node, first, stop - sum(node.mask), stop)
        for number, (sample, branch) in enumerate(made)
        for first, stop, node in _spans(branch)
        if any(sample.mask[first:stop])
    ]
    as_made = {id(said[j]): said[j - 1] for j in range(1, len(said)) if said[j].of == said[j - 1].of}
    turns = {id(trace.nodes[call.node]): turn for turn, call in enumerate(trace.calls) if call.node is not None}
    said.sort(key=lambda call: turns.get(id(call.node), 0))
    before = _predecessors(said, _shared([sample.token_ids for sample, _ in made]))
    if {id(said[j]): said[i] for j, i in before.items()} == as_made:
        return made
    ends = sorted(set(range(len(said))) - set(before.values()))
    return [_joined(made, said, before, number) for number in ends]


def _shared(sequences: list[list[int]]) -> list[list[int]]:
    """`[a][b]`: how many tokens two sequences begin with alike."""
    order = sorted(range(len(sequences)), key=sequences.__getitem__)
    table = [[len(sequence)] * len(sequences) for sequence in sequences]
    alike = [_alike(sequences[a], sequences[b]) for a, b in pairwise(order)]
    for i, a in enumerate(order):
        least = len(sequences[a])
        for b, neighbours in zip(
            order[i + 1 :], alike[i:], strict=True
        ):  # in sorted order, what lies between is alike too
            least = min(least, neighbours)
            table[a][b] = table[b][a] = least
    return table


def _alike(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _predecessors(said: list[Said], shared: list[list[int]]) -> dict[int, int]:
    """The call that each call goes on from: of those before it that none has gone on from, the first with the most tokens."""
    free, before = set(), {}
    for number, call in enumerate(said):
        extended = [i for i in free if said[i].stop <= min(call.begin, shared[said[i].of][call.of])]
        if extended:
            before[number] = max(extended, key=lambda i: (said[i].stop, -i))
            free.remove(before[number])
        free.add(number)
    return before


def _joined(made: list[Made], said: list[Said], before: dict[int, int], number: int) -> Made:
    """The sample that ends with the call `number` and trains all that it goes on from."""
    sample, branch = made[said[number].of]
    length = said[number].stop
    mask, logprobs, kept = [False] * length, [0.0] * length, []
    at: int | None = number
    while at is not None:
        call = said[at]
        kept.append(call)
        mask[call.begin : call.stop] = [True] * (call.stop - call.begin)
        logprobs[call.begin : call.stop] = made[call.of][0].logprobs[call.begin : call.stop]
        at = before.get(at)
    changed = {"token_ids": sample.token_ids[:length], "mask": mask, "logprobs": logprobs}
    changed["temperatures"] = sample.temperatures[:length]
    return msgspec.structs.replace(sample, **changed), _grafted(branch, kept[::-1])


def _grafted(branch: Branch, kept: list[Said]) -> Branch:
    """`branch` as far as the last of the messages that train, and these in their places."""
    nodes: list[MessageNode] = []
    at, scaffold = 0, []
    for call in kept:
        between = [(first, min(last, call.first), node) for first, last, node in _spans(branch) if first < call.first]
        for first, stop, node in [*between, (call.first, call.stop, call.node)]:
            if stop <= at:
                continue
            part = _cut(node, max(at - first, 0), stop - first, scaffold)
            scaffold, at = [], stop
            if len(part.token_ids) < len(node.token_ids) and not any(part.mask) and not any(part.is_content):
                scaffold = part.token_ids  # what the template puts around messages
            else:
                nodes.append(part)
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
