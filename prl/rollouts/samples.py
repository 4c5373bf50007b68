"""Training samples of a trace: one token sequence for each branch that has something to train, exactly as sampled."""

import hashlib
from array import array
from collections.abc import Sequence

from pydantic import Field
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import Branch, ModelCall, Trace

from prl.rollouts.sample_merging import merge_samples
from prl.wire import TrainingSample


class TokenMismatch(ValueError):
    """A trace does not hold the tokens that a model call sent and sampled."""

    kind = "tokens"


class RecordedCall(ModelCall):
    """A model call with the digest of the tokens that it sent and sampled."""

    digest: bytes = Field(default=b"", exclude=True, repr=False)


def token_hash(*parts: Sequence[int]) -> "hashlib.blake2b":
    """A hash of token ids, whatever the parts they come in. More can be added by its `update`, as an array of "I"."""
    return hashlib.blake2b(b"".join(array("I", part).tobytes() for part in parts), digest_size=16)


def samples_of(trace: Trace, *, env_name: str, temperature: float, live: bool) -> list[tuple[TrainingSample, Branch]]:
    """Make the samples of a trace, each with the branch of the message graph that it comes from.

    The graph stores each message's tokens once, and forks where a prompt does not extend, token for token, what
    precedes it. A branch is therefore the longest run of turns for which the exact-prefix invariant holds. A sampled
    message on several branches trains on the first of them only. A branch with nothing left to train gives no sample,
    and a sample that another one begins with is merged into it.

    A trace without any recorded call was built by hand, and its tokens are not verified.

    Args:
        trace: The episode, its rewards recorded.
        env_name: Name of the env, for the samples and for messages.
        temperature: Sampling temperature of every token.
        live: Whether the live policy sampled. Otherwise there are no sampler logprobs, and they are 0.0.

    Raises:
        TokenMismatch: The tokens up to a sampled message are not those that its model call sent and sampled.
    """
    calls = {
        id(trace.nodes[call.node]): (turn, call) for turn, call in enumerate(trace.calls, 1) if call.node is not None
    }
    samples, claimed = [], set()
    for branch in [branch for branch in trace.branches if branch.trainable]:
        token_ids: list[int] = []
        mask: list[bool] = []
        logprobs: list[float] = []
        digest = token_hash()
        for node in branch.nodes:
            token_ids += node.token_ids
            digest.update(array("I", node.token_ids))
            trains = node.sampled and id(node) not in claimed
            if trains:
                claimed.add(id(node))
                if trace.calls:
                    check_tokens(node, calls.get(id(node)), len(token_ids), digest.digest(), env_name)
            mask += node.mask if trains else [False] * len(node.token_ids)
            logprobs += sampler_logprobs(node) if trains and live else [0.0] * len(node.token_ids)
        if any(mask):
            sample = TrainingSample(
                token_ids=token_ids,
                mask=mask,
                logprobs=logprobs,
                temperatures=[temperature] * len(token_ids),
                env_name=env_name,
                reward=trace.reward,
            )
            samples.append((sample, branch))
    return merge_samples(samples, trace)


def sampler_logprobs(node: MessageNode) -> list[float]:
    """Sampler logprobs `[tokens]` of a sampled message, 0.0 off its mask. Raises TokenMismatch if any is missing."""
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
            f"sampled, but the trace holds {length - sampled} and {sampled}"
        )
    if isinstance(call, RecordedCall) and call.digest != digest:
        raise TokenMismatch(
            f"env {env_name!r}, turn {turn}: the {length} tokens that the trace holds are not those that were sent and "
            "sampled"
        )
