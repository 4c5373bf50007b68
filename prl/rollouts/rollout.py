"""A rollout: one attempt at a task, as the verifiers trace it left and the samples it trains on."""

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import Branch, Trace

from prl.rollouts.messages import encodable, keyed
from prl.rollouts.sample_merging import merged
from prl.rollouts.token_integrity import Digest, Sent, TokenMismatch
from prl.wire import TrainingSample

ERROR_KINDS = ("timeout", "overlong_prompt", "tool_call", "env", "engine", "reference", "tokens")
"""What a rollout can fail of: its deadline, a prompt without room, a tool call that cannot be read, an exception in its
env's code, the engine that samples, the model that scores it, or a trace that does not hold the tokens which were sent and
sampled."""


class Rollout:
    """The trace of one episode (`reward`, `nodes`, `num_turns`, `info`, … are the trace's own) with samples attached.

    `samples` are the token sequences it trains on, `advantages` one float per token of their concatenation (None until
    an algorithm assigns credit). `start_version` and `end_version` are the policy versions that generated its first
    and its last token; None where a frozen model did. `error` is why it failed, None if it did not.
    """

    def __init__(self, trace: Trace, *, env_name: str, group_id: int, start_version: int | None, temperature: float):
        self.trace = trace
        self.env_name = env_name
        self.group_id = group_id
        self.start_version = start_version
        self.end_version = start_version
        self.temperature = temperature
        self.samples: list[TrainingSample] = []
        self._sealed: list[bytes] | None = None
        self.sample_branches: list[Branch] = []
        """The branch of the trace that each sample came from."""
        self.advantages: list[float] | None = None
        self.scoring_s: float = 0.0
        """Seconds its algorithm took to score it on arrival, model calls included."""
        self.error: str | None = None
        self.error_kind: str | None = None
        """One of ERROR_KINDS where it failed."""
        self.pre_filtered_by: str | None = None
        """The filter of the `pre_batch` slot that matches it."""
        self.filtered_by: str | None = None
        """The filter of the `post_batch` slot that matches it."""
        self.dropped: bool = False
        """Whether one of the two is enforced."""
        self.left_out: str | None = None
        """Why no batch holds it although it neither failed nor was filtered."""
        self.pool: str | None = None
        """The difficulty pool its task is in, the group's own result counted; None without pools."""

    def __getattr__(self, name: str) -> Any:
        if name == "trace":  # not set yet: an unpickled or half-built object must not recurse
            raise AttributeError(name)
        return getattr(self.trace, name)

    @property
    def live(self) -> bool:
        """Whether the policy generated it, rather than a frozen model."""
        return self.start_version is not None

    @property
    def dropped_by(self) -> str | None:
        """The filter that dropped it: what the first slot drops, the second is not asked about."""
        return (self.filtered_by or self.pre_filtered_by) if self.dropped else None

    @property
    def not_trained_because(self) -> str:
        """Why, where it does not train."""
        if self.error is not None or self.left_out is not None:
            return self.error or self.left_out
        return f"filter {self.dropped_by}" if self.dropped else "nothing of it within trainer.seq_len feeds a loss"

    @property
    def in_batch(self) -> bool:
        """Whether it takes a place in a batch: it did not fail, and nothing dropped it before the batch was cut."""
        return self.error is None and self.left_out is None and not (self.dropped and self.filtered_by is None)

    def attach_samples(self) -> None:
        made = samples_of(self.trace, env_name=self.env_name, temperature=self.temperature, live=self.live)
        self.samples = [sample for sample, _ in made]
        self.sample_branches = [branch for _, branch in made]
        if not made:  # the side of a game that was over before its turn
            self.left_out = "nothing was sampled"

    def seal(self) -> None:
        """From now on its samples keep their tokens and masks: an algorithm, which may be anybody's code, writes streams."""
        self._sealed = [digest_of(sample) for sample in self.samples]

    def check_seal(self) -> None:
        """Raise ValueError where that was not so."""
        if self._sealed is not None and self._sealed != [digest_of(sample) for sample in self.samples]:
            raise ValueError(
                "the token_ids or the mask of a sample were changed: an algorithm may write its streams only"
            )

    def fail(self, error: Exception, kind: str | None = None) -> None:
        """Mark it as errored, unless it is: it skips the algorithm's hooks and is not trained on.

        `kind` is one of ERROR_KINDS; by default what the exception says of itself.
        """
        if self.error is None:
            self.error = encodable(f"{type(error).__name__}: {error}")
            self.error_kind = kind or ("timeout" if isinstance(error, TimeoutError) else getattr(error, "kind", "env"))
            self.trace.record_error(error)

    def assign_advantages(self, advantages: float | Sequence[float]) -> None:
        """Write this rollout's credit.

        A scalar is broadcast over the trainable tokens. A list must be as long as the samples' concatenated
        `token_ids`; what it holds off the mask becomes 0.0. Any other length raises ValueError, and so does a credit that
        is no finite number.
        """
        mask = [trains for sample in self.samples for trains in sample.mask]
        if isinstance(advantages, Real) or getattr(advantages, "ndim", None) == 0:
            advantages = [float(advantages)] * len(mask)
        if not hasattr(advantages, "__len__"):
            raise ValueError(f"advantages must be a number or a list, got a {type(advantages).__name__}")
        if len(advantages) != len(mask):
            raise ValueError(
                f"advantages must align with the rollout's tokens: got {len(advantages)} values "
                f"for {len(mask)} token_ids in {len(self.samples)} sample(s)"
            )
        credit = [float(a) if trains else 0.0 for a, trains in zip(advantages, mask, strict=True)]
        if (bad := next((a for a in credit if not math.isfinite(a)), None)) is not None:
            raise ValueError(f"an advantage must be a finite number, got {bad} (reward {self.reward})")
        self.advantages = credit

    @property
    def num_completion_tokens(self) -> int:
        """Tokens the model sampled, each counted once."""
        return sum(sum(node.mask) for node in self.trace.nodes if node.sampled)

    @property
    def num_tool_response_tokens(self) -> int:
        """Tokens that tools answered, the template's own left out where the renderer tells them apart."""
        answers = {
            key: node for branch in self.trace.branches for key, node in keyed(branch) if node.message.role == "tool"
        }
        return sum(sum(node.is_content) if node.is_content else len(node.token_ids) for node in answers.values())


def digest_of(sample: TrainingSample) -> bytes:
    """Of what was sampled, and where."""
    return Digest().add(sample.token_ids).add(sample.mask).value()


def samples_of(trace: Trace, *, env_name: str, temperature: float, live: bool) -> list[tuple[TrainingSample, Branch]]:
    """One sample per branch of the trace's message graph, with its branch; one that another begins with is part of that.

    The graph stores each message's tokens once and forks where a prompt does not extend, token for token, what stands
    before it; so a branch is the longest run of turns for which the exact-prefix invariant holds. A sampled message on
    several branches trains on the first of them only; a branch with nothing left to train gives no sample. Unless the live
    policy sampled (`live`) there are no sampler logprobs: they stand as 0.0. Raises TokenMismatch where the tokens up to a
    sampled message are not those that its call sent and sampled.
    """
    samples, claimed, sent = [], set(), Sent(trace, env_name)
    for branch in trace.branches:
        if not branch.trainable:
            continue
        token_ids: list[int] = []
        mask: list[bool] = []
        logprobs: list[float] = []
        digest = Digest()
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
    return merged(samples, trace)


def sampler_logprobs(node: MessageNode) -> list[float]:
    """`[tokens]` of a sampled message, 0.0 off its mask. Raises TokenMismatch where a sampled token has none."""
    if len(node.logprobs) != sum(node.mask) or len(node.mask) != len(node.token_ids):
        raise TokenMismatch(
            f"a sampled message has {len(node.token_ids)} tokens, {sum(node.mask)} of them sampled, "
            f"but {len(node.logprobs)} logprobs"
        )
    values = iter(node.logprobs)
    return [next(values) if sampled else 0.0 for sampled in node.mask]
