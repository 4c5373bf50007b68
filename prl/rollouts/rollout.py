"""A rollout: one attempt at a task, as the verifiers trace it left and the samples it trains on."""

from collections.abc import Sequence
from typing import Any

from verifiers.v1.trace import Trace

from prl.wire import TrainingSample


class Rollout:
    """The trace of one episode (`reward`, `nodes`, `num_turns`, `info`, … are the trace's own) with samples attached.

    `samples` are the token sequences it trains on, `advantages` one float per token of their concatenation (None until
    an algorithm assigns credit). `start_version` and `end_version` are the policy versions that generated its first
    and its last token. `error` is why it failed, None if it did not.
    """

    def __init__(self, trace: Trace, *, env_name: str, group_id: int, start_version: int, temperature: float):
        self.trace = trace
        self.env_name = env_name
        self.group_id = group_id
        self.start_version = start_version
        self.end_version = start_version
        self.temperature = temperature
        self.samples: list[TrainingSample] = []
        self.advantages: list[float] | None = None
        self.error: str | None = None
        self.filtered_by: str | None = None
        self.dropped: bool = False

    def __getattr__(self, name: str) -> Any:
        if name == "trace":  # not set yet: an unpickled or half-built object must not recurse
            raise AttributeError(name)
        return getattr(self.trace, name)

    def attach_samples(self) -> None:
        self.samples = samples_of(self.trace, env_name=self.env_name, temperature=self.temperature)

    def assign_advantages(self, advantages: float | Sequence[float]) -> None:
        """Write this rollout's credit.

        A scalar is broadcast over the trainable tokens. A list must be as long as the samples' concatenated
        `token_ids`; what it holds off the mask becomes 0.0. Any other length raises ValueError.
        """
        mask = [trains for sample in self.samples for trains in sample.mask]
        if isinstance(advantages, int | float):
            self.advantages = [float(advantages) if trains else 0.0 for trains in mask]
            return
        if len(advantages) != len(mask):
            raise ValueError(
                f"advantages must align with the rollout's tokens: got {len(advantages)} values "
                f"for {len(mask)} token_ids in {len(self.samples)} sample(s)"
            )
        self.advantages = [float(a) if trains else 0.0 for a, trains in zip(advantages, mask, strict=True)]

    @property
    def num_completion_tokens(self) -> int:
        """Tokens the model sampled, each counted once."""
        return sum(sum(node.mask) for node in self.trace.nodes if node.sampled)


def samples_of(trace: Trace, *, env_name: str, temperature: float) -> list[TrainingSample]:
    """One sample per branch of the trace's message graph.

    The graph stores each message's tokens once and forks where a prompt does not extend, token for token, what stands
    before it; so a branch is the longest run of turns for which the exact-prefix invariant holds. A sampled message on
    several branches trains on the first of them only; a branch with nothing left to train gives no sample.
    """
    samples, claimed = [], set()
    for branch in trace.branches:
        if not branch.trainable:
            continue
        token_ids: list[int] = []
        mask: list[bool] = []
        logprobs: list[float] = []
        for node in branch.nodes:
            token_ids += node.token_ids
            if not node.sampled or id(node) in claimed:
                mask += [False] * len(node.token_ids)
                logprobs += [0.0] * len(node.token_ids)
                continue
            claimed.add(id(node))
            values = iter(node.logprobs)
            if len(node.logprobs) != sum(node.mask) or len(node.mask) != len(node.token_ids):
                raise ValueError(
                    f"a sampled message has {len(node.token_ids)} tokens, {sum(node.mask)} of them sampled, "
                    f"but {len(node.logprobs)} logprobs"
                )
            mask += node.mask
            logprobs += [next(values) if sampled else 0.0 for sampled in node.mask]
        if any(mask):
            samples.append(
                TrainingSample(
                    token_ids=token_ids,
                    mask=mask,
                    logprobs=logprobs,
                    temperatures=[temperature] * len(token_ids),
                    env_name=env_name,
                    reward=trace.reward,
                )
            )
    return samples
