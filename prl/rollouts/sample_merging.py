"""Exact-prefix merging: find the model calls whose prompts extend each other token for token, and merge their samples.

verifiers' message graph compares messages before it compares tokens. If a message occurs twice, in the same or in other
tokens, or if two different messages have the same tokens, a call can be on a branch of its own although its prompt
extends the tokens of another call.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import Branch, Trace

from prl.wire import TrainingSample

BranchSample = tuple[TrainingSample, Branch]
"""A sample and the branch of the trace that it was made from."""


@dataclass(eq=False, slots=True)
class SampledSpan:
    """The tokens that one call sampled and one sample trains on."""

    sample_index: int
    node: MessageNode
    first: int
    """Position in the sample where the message starts; its sampled tokens are `begin` to `stop`."""
    begin: int
    stop: int
    parent: "SampledSpan | None" = None
    """The earlier call whose tokens are the longest prefix of this call's prompt."""


def merge_samples(samples: list[BranchSample], trace: Trace) -> list[BranchSample]:
    """Assign each call to the longest sample that its prompt extends, in the order of the calls.

    Tokens that two calls sampled at the same position stay in two samples.
    """
    if len(samples) < 2:
        return samples
    spans = [
        SampledSpan(index, node, first, stop - sum(node.mask), stop)
        for index, (sample, branch) in enumerate(samples)
        for first, stop, node in _node_spans(branch)
        if any(sample.mask[first:stop])
    ]
    given = {
        id(span): before for before, span in pairwise(spans) if before.sample_index == span.sample_index
    }  # the parents as the samples have them
    turns = {id(trace.nodes[call.node]): turn for turn, call in enumerate(trace.calls) if call.node is not None}
    spans.sort(key=lambda span: turns.get(id(span.node), 0))
    _find_parents(spans, _shared_prefix_lengths([sample.token_ids for sample, _ in samples]))
    if all(span.parent is given.get(id(span)) for span in spans):
        return samples
    parents = {id(span.parent) for span in spans}
    return [_build_sample(samples, span) for span in spans if id(span) not in parents]


def _shared_prefix_lengths(sequences: list[list[int]]) -> list[list[int]]:
    """Return `[a][b]`: the length of the common prefix of two sequences."""
    order = sorted(range(len(sequences)), key=sequences.__getitem__)
    table = [[len(sequence)] * len(sequences) for sequence in sequences]
    neighbours = [_common_prefix(sequences[a], sequences[b]) for a, b in pairwise(order)]
    for i, a in enumerate(order):
        shared = len(sequences[a])
        # In sorted order, two sequences share what all neighbouring pairs between them share.
        for b, length in zip(order[i + 1 :], neighbours[i:], strict=True):
            shared = min(shared, length)
            table[a][b] = table[b][a] = shared
    return table


def _common_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _find_parents(spans: list[SampledSpan], shared: list[list[int]]) -> None:
    """Set the parent of each call that has one. A call is the parent of at most one other; ties go to the first.

    Args:
        spans: The calls, in the order in which they were made.
        shared: Common prefix length of each pair of samples.
    """
    free: list[SampledSpan] = []
    for span in spans:
        prefixes = [
            earlier
            for earlier in free
            if earlier.stop <= min(span.begin, shared[earlier.sample_index][span.sample_index])
        ]
        if prefixes:
            span.parent = max(prefixes, key=lambda earlier: earlier.stop)
            free.remove(span.parent)
        free.append(span)


def _build_sample(samples: list[BranchSample], last: SampledSpan) -> BranchSample:
    """Build the sample that ends with the call `last` and trains on it and all its ancestors."""
    sample, branch = samples[last.sample_index]
    mask, logprobs = [False] * last.stop, [0.0] * last.stop
    chain: list[SampledSpan] = []
    span: SampledSpan | None = last
    while span is not None:
        chain.append(span)
        mask[span.begin : span.stop] = [True] * (span.stop - span.begin)
        logprobs[span.begin : span.stop] = samples[span.sample_index][0].logprobs[span.begin : span.stop]
        span = span.parent
    merged = msgspec.structs.replace(
        sample,
        token_ids=sample.token_ids[: last.stop],
        mask=mask,
        logprobs=logprobs,
        temperatures=sample.temperatures[: last.stop],
    )
    return merged, _splice(branch, chain[::-1])


def _splice(branch: Branch, chain: list[SampledSpan]) -> Branch:
    """Return `branch` up to the last sampled message of `chain`, with the messages of `chain` in their places."""
    nodes: list[MessageNode] = []
    scaffold: list[int] = []
    position = 0
    for span in chain:
        between = [
            (first, min(stop, span.first), node) for first, stop, node in _node_spans(branch) if first < span.first
        ]
        for first, stop, node in [*between, (span.first, span.stop, span.node)]:
            if stop <= position:
                continue
            part = _slice_node(node, max(position - first, 0), stop - first, scaffold)
            scaffold, position = [], stop
            if len(part.token_ids) < len(node.token_ids) and not any(part.mask) and not any(part.is_content):
                scaffold = part.token_ids  # template tokens around messages, to be put before the next message
            else:
                nodes.append(part)
    return branch.model_copy(update={"nodes": nodes})


def _node_spans(branch: Branch) -> Iterator[tuple[int, int, MessageNode]]:
    """Yield first and end position of each message's tokens, with its node."""
    stop = 0
    for node in branch.nodes:
        start, stop = stop, stop + len(node.token_ids)
        yield start, stop, node


def _slice_node(node: MessageNode, begin: int, end: int, scaffold: list[int]) -> MessageNode:
    """Return the node with its tokens `begin` to `end` and `scaffold` before them; itself if nothing changes."""
    if not begin and end == len(node.token_ids) and not scaffold:
        return node
    lead, sampled_before = [False] * len(scaffold), sum(node.mask[:begin])
    attributed = len(node.is_content) == len(node.token_ids)
    changed: dict[str, Any] = {
        "token_ids": scaffold + node.token_ids[begin:end],
        "mask": lead + node.mask[begin:end],
        "logprobs": node.logprobs[sampled_before : sampled_before + sum(node.mask[begin:end])],
        "is_content": lead + node.is_content[begin:end] if attributed else [],
    }
    return node.model_copy(update=changed)
