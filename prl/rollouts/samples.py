"""Training samples of a trace: one token sequence for each branch that has something to train."""

from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import Branch, Trace

from prl.rollouts.sample_merging import merge_samples
from prl.rollouts.token_integrity import TokenDigest, TokenLedger, TokenMismatch
from prl.wire.messages import TrainingSample


def samples_of(trace: Trace, *, env_name: str, temperature: float, live: bool) -> list[tuple[TrainingSample, Branch]]:
    """Make the samples of a trace, each with the branch of the message graph that it comes from.

    The graph stores each message's tokens once, and forks where a prompt does not extend, token for token, what
    precedes it. A branch is therefore the longest run of turns for which the exact-prefix invariant holds. A sampled
    message on several branches trains on the first of them only. A branch with nothing left to train gives no sample,
    and a sample that another one begins with is merged into it.

    Args:
        trace: The episode, its rewards recorded.
        env_name: Name of the env, for the samples and for messages.
        temperature: Sampling temperature of every token.
        live: Whether the live policy sampled. Otherwise there are no sampler logprobs, and they are 0.0.

    Raises:
        TokenMismatch: The tokens up to a sampled message are not those that its model call sent and sampled.
    """
    samples, claimed, sent = [], set(), TokenLedger(trace, env_name)
    for branch in trace.branches:
        if not branch.trainable:
            continue
        token_ids: list[int] = []
        mask: list[bool] = []
        logprobs: list[float] = []
        digest = TokenDigest()
        for node in branch.nodes:
            token_ids += node.token_ids
            digest.add(node.token_ids)
            if not node.sampled or id(node) in claimed:
                mask += [False] * len(node.token_ids)
                logprobs += [0.0] * len(node.token_ids)
                continue
            claimed.add(id(node))
            sent.check(node, len(token_ids), digest)
            mask += node.mask
            logprobs += sampler_logprobs(node) if live else [0.0] * len(node.mask)
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
