"""Training samples of a trace: one token sequence for each branch that has something to train, exactly as sampled.

Samples are then merged where the prompt of one model call extends the tokens of another. verifiers' message graph
compares messages before it compares tokens. If a message occurs twice, in the same or in other tokens, or if two
different messages have the same tokens, a call can be on a branch of its own although its prompt extends the tokens of
another call.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import msgspec
from pydantic import Field, InstanceOf
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import Branch, ModelCall, Trace

from prl.rollouts.inputs import Picture
from prl.rollouts.messages import TrainingSample

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


class TokenMismatch(ValueError):
    """A trace does not have the tokens that a model call sent and sampled."""

    kind = "tokens"


class RecordedCall(ModelCall):
    """A model call with the digest of the tokens that it sent and sampled, and the policy versions that sampled them.

    The versions are None of a frozen model.
    """

    # Left out of a trace's dump: a rollout is saved after its tokens were verified.
    digest: bytes = Field(default=b"", exclude=True, repr=False)
    start_version: int | None = Field(default=None, exclude=True, repr=False)
    end_version: int | None = Field(default=None, exclude=True, repr=False)
    pictures: tuple[InstanceOf[Picture], ...] = Field(default=(), exclude=True, repr=False)
    """The pictures in the prompt."""


def token_hash(*parts: Sequence[int]) -> "hashlib.blake2b":
    """Return a hash of token ids, whatever the parts they come in. `update` adds more, as an array of "I"."""
    return hashlib.blake2b(b"".join(array("I", part).tobytes() for part in parts), digest_size=16)


def samples_of(trace: Trace, *, env_name: str, temperature: float, live: bool) -> list[BranchSample]:
    """Make the samples of a trace, each with the branch of the message graph that it comes from.

    The graph stores each message's tokens once, and forks where a prompt does not extend, token for token, what
    precedes it. A branch is therefore the longest run of turns for which the exact-prefix invariant holds. A sampled
    message on several branches trains on the first of them only. A branch with nothing left to train gives no sample,
    and a sample that another one begins with is merged into it.

    The tokens of a trace without any recorded call, built by hand, are not verified.

    Args:
        trace: The episode, its rewards recorded.
        env_name: Name of the env, for the samples and for messages.
        temperature: The policy divided its logits by it where it sampled. All other tokens have temperature 1: what a
            frozen model, a demonstration or an env wrote is no sample of the policy.
        live: Whether the live policy sampled. Otherwise there are no sampler logprobs, and they are 0.0.

    Raises:
        TokenMismatch: The tokens up to a sampled message are not those that its model call sent and sampled.
    """
    calls = {
        id(trace.nodes[call.node]): (turn, call) for turn, call in enumerate(trace.calls, 1) if call.node is not None
    }
    claimed: set[int] = set()
    samples = []
    for branch in [branch for branch in trace.branches if branch.trainable]:
        sample = TrainingSample([], [], [], [], env_name, trace.reward)
        _fill(sample, branch, calls if trace.calls else None, claimed, live=live)
        if any(sample.mask):
            samples.append((sample, branch))
    merged = merge_samples(samples, calls)
    for sample, _ in merged:
        sample.temperatures = [temperature if live and trains else 1.0 for trains in sample.mask]
    return merged


def _fill(
    sample: TrainingSample,
    branch: Branch,
    calls: dict[int, tuple[int, ModelCall]] | None,
    claimed: set[int],
    *,
    live: bool,
) -> None:
    """Add the tokens of a branch to an empty sample. `claimed` are the messages that train on branches before it."""
    digest = token_hash()
    for node in branch.nodes:
        sample.token_ids += node.token_ids
        digest.update(array("I", node.token_ids))
        # A reply that several branches share would else train once for each of them.
        trains = node.sampled and id(node) not in claimed
        if trains:
            claimed.add(id(node))
            if calls is not None:
                check_tokens(node, calls.get(id(node)), len(sample.token_ids), digest.digest(), sample.env_name)
        if calls is not None and node.sampled:
            sample.pictures = pictures_of(calls.get(id(node))) or sample.pictures
        sample.mask += node.mask if trains else [False] * len(node.token_ids)
        sample.logprobs += sampler_logprobs(node) if trains and live else [0.0] * len(node.token_ids)


def pictures_of(turn_and_call: tuple[int, ModelCall] | None) -> list[Picture] | None:
    """Return the pictures in the prompt of a call, which stands behind its number; None where it has none."""
    call = None if turn_and_call is None else turn_and_call[1]
    return list(call.pictures) or None if isinstance(call, RecordedCall) else None


def sampler_logprobs(node: MessageNode) -> list[float]:
    """Return the sampler logprobs `[tokens]` of a sampled message, 0.0 off its mask. Raises TokenMismatch."""
    if len(node.logprobs) != sum(node.mask) or len(node.mask) != len(node.token_ids):
        raise TokenMismatch(
            f"a sampled message has {len(node.token_ids)} tokens, {sum(node.mask)} of them sampled, "
            f"but {len(node.logprobs)} logprobs"
        )
    values = iter(node.logprobs)
    return [next(values) if sampled else 0.0 for sampled in node.mask]


def check_tokens(
    node: MessageNode, turn_and_call: tuple[int, ModelCall] | None, length: int, digest: bytes, env_name: str
) -> None:
    """Verify a sampled message and all tokens before it.

    Args:
        node: The sampled message.
        turn_and_call: The model call that sampled it, behind its number. Of a call that verifiers' own client made,
            only the token counts are known.
        length: Number of tokens on the branch up to the end of `node`.
        digest: Digest of these tokens.
        env_name: Name of the env, for messages.

    Raises:
        TokenMismatch: The tokens differ from those that the call sent and sampled.
    """
    if turn_and_call is None:
        raise TokenMismatch(f"env {env_name!r}: a sampled message belongs to no model call")
    turn, call = turn_and_call
    usage, sampled = call.usage, sum(node.mask)
    if usage is not None and (length - sampled, sampled) != (usage.prompt_tokens, usage.completion_tokens):
        raise TokenMismatch(
            f"env {env_name!r}, turn {turn}: {usage.prompt_tokens} tokens were sent and {usage.completion_tokens} "
            f"sampled, but the trace has {length - sampled} and {sampled}"
        )
    if isinstance(call, RecordedCall) and call.digest != digest:
        raise TokenMismatch(
            f"env {env_name!r}, turn {turn}: the {length} tokens of the trace are not those that were sent and sampled"
        )


# --- merging ----------------------------------------------------------------------------------------------------------


def merge_samples(samples: list[BranchSample], calls: dict[int, tuple[int, ModelCall]]) -> list[BranchSample]:
    """Assign each call to the longest sample that its prompt extends, in the order of the calls.

    Tokens that two calls sampled at the same position stay in two samples. `calls` are the model calls, each behind its
    number, by the identity of the message that they sampled.
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
    # In the order of the calls: a call can extend only the tokens of an earlier one.
    spans.sort(key=lambda span: calls[id(span.node)][0] if calls else 0)
    _find_parents(spans, [memoryview(array("q", sample.input.keys)) for sample, _ in samples])
    # Nearly every trace: its branches are the longest runs already.
    if all(span.parent is given.get(id(span)) for span in spans):
        return samples
    parents = {id(span.parent) for span in spans}
    return [_build_sample(samples, span) for span in spans if id(span) not in parents]


def _find_parents(spans: list[SampledSpan], tokens: list[memoryview]) -> None:
    """Set the parent of each call that has one. A call is the parent of at most one other; ties go to the first.

    Args:
        spans: The calls, in the order in which they were made.
        tokens: The keys of each sample's tokens (`prl.rollouts.inputs`).
    """
    free: list[SampledSpan] = []
    for span in spans:
        prefixes = [
            earlier
            for earlier in free
            if earlier.stop <= span.begin
            and tokens[earlier.sample_index][: earlier.stop] == tokens[span.sample_index][: earlier.stop]
        ]
        if prefixes:
            span.parent = max(prefixes, key=lambda earlier: earlier.stop)
            free.remove(span.parent)  # two calls after the same one sampled different tokens in the same place
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
    merged = msgspec.structs.replace(sample, token_ids=sample.token_ids[: last.stop], mask=mask, logprobs=logprobs)
    if merged.pictures is not None:
        merged.pictures = [picture for picture in merged.pictures if picture.stop <= last.stop] or None
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


def _node_spans(branch: Branch) -> list[tuple[int, int, MessageNode]]:
    """Return the first and the end position of each message's tokens, with its node."""
    stops = accumulate(len(node.token_ids) for node in branch.nodes)
    return [(stop - len(node.token_ids), stop, node) for stop, node in zip(stops, branch.nodes, strict=True)]


def _slice_node(node: MessageNode, begin: int, end: int, scaffold: list[int]) -> MessageNode:
    """Return a copy of the node with its tokens `begin` to `end` and `scaffold` before them."""
    lead, sampled_before = [False] * len(scaffold), sum(node.mask[:begin])
    # A renderer that marks no content leaves the list empty.
    attributed = len(node.is_content) == len(node.token_ids)
    return node.model_copy(
        update={
            "token_ids": scaffold + node.token_ids[begin:end],
            "mask": lead + node.mask[begin:end],
            "logprobs": node.logprobs[sampled_before : sampled_before + sum(node.mask[begin:end])],
            "is_content": lead + node.is_content[begin:end] if attributed else [],
        }
    )
