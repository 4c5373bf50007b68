"""A rollout: one attempt at a task, with its verifiers trace, its training samples and its outcome."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from numbers import Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import AgentInfo, Branch, Reward, Trace, TraceTask
    from verifiers.v1.types import Message

    from prl.rollouts.messages import TrainingSample

ERROR_KINDS = ("timeout", "overlong_prompt", "env", "engine", "reference", "tokens")
"""Causes of a failure: a deadline, a prompt that leaves no room for a reply, a tool call that cannot be parsed, an
exception in the env's code, the engine that samples, the model that scores, or a trace whose tokens are not those that
were sent and sampled."""

TURN_REWARDS = "_turn_rewards"
"""The key in a trace's `info` of what reward functions gave as a list: weighted values, one per turn, by name."""

MessageKey = tuple[str, str, int, str]
"""Hash of the first message, hash of the last reply before the message, its position, hash of its content."""


class Stage(StrEnum):
    """The stage of the pipeline where a rollout ended, in order."""

    FAILED = "failed"
    """An exception or a deadline; `source` is one of `ERROR_KINDS`, `reason` the error."""
    EMPTY = "empty"
    """The model was never asked to sample, e.g. one side of a game that was over before its turn."""
    DIFFICULTY = "difficulty"
    """Online difficulty filtering dropped its group; `source` is easy or hard."""
    PRE_FILTERED = "pre_filtered"
    """An enforced `pre_batch` filter dropped it; `source` is the filter's name."""
    STALE = "stale"
    """It is too stale to train on (`max_off_policy_steps`)."""
    SURPLUS = "surplus"
    """It was in excess: with oversampling, or when the run ended early."""
    POST_FILTERED = "post_filtered"
    """An enforced `post_batch` filter dropped it from a batch; `source` is the filter's name."""
    UNLEARNABLE = "unlearnable"
    """It was in a batch, but none of its tokens has a weight in a loss."""
    TRAINED = "trained"
    """It was sent to the trainer, and at least one of its tokens trains."""


IN_BATCH = (Stage.POST_FILTERED, Stage.UNLEARNABLE, Stage.TRAINED)
"""The stages of rollouts that had a place in a cut batch."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a rollout. Written once, by `Rollout.leave` or `Rollout.fail`."""

    stage: Stage
    reason: str = ""
    """One sentence for a reader; equal reasons are counted together."""
    source: str | None = None
    """Cause of it as an identifier: the error kind, the filter's name, easy or hard. None for other stages."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One reply of the model, with its reward."""

    message: "Message"
    tokens: slice
    """Indices of its sampled tokens in the concatenated `token_ids` of the rollout's samples; empty if none trains."""
    reward: float


class Rollout:
    """One attempt at a task, whose messages, rewards and metrics are those of its trace.

    `outcome` is written once: the first thing that takes a rollout out of the pipeline.
    """

    def __init__(
        self,
        trace: "Trace",
        *,
        env_name: str,
        group_id: int,
        start_version: int | None,
        temperature: float,
        index: int = 0,
    ):
        self.trace = trace
        self.env_name = env_name
        self.group_id = group_id
        self.index = index
        """Number of its episode in the group, from 0: rollouts finish in any order, a group lists them in this one."""
        self.start_version = start_version
        """Policy version that its first model call started from; None of a frozen model."""
        self.end_version = start_version
        """Newest policy version that may have sampled a token of it; None of a frozen model."""
        self.temperature = temperature
        self.samples: list[TrainingSample] = []
        """The token sequences that it trains on."""
        self.sample_branches: list[Branch] = []
        """The branch of the trace that each sample comes from."""
        self.advantages: list[float] | None = None
        """`[tokens]` over the concatenation of its samples; None until an algorithm assigns them."""
        self.scoring_s: float = 0.0
        """Seconds that its algorithm took in `score_rollout`, model calls included."""
        self.difficulty_pool: str | None = None
        """The difficulty pool that its task is in once its group has been counted; None without pools."""
        self.matched: dict[str, str] = {}
        """`pre_batch` or `post_batch` -> the first filter there that matched, enforced or not."""
        self.outcome: Outcome | None = None
        """The stage where it ended, and the reason; None while it is active."""
        self.seal: int | None = None
        """Hash of its samples' tokens when its algorithm received them; later only advantages and weights change."""

    # --- its trace ------------------------------------------------------------------------------------------------

    @property
    def task(self) -> "TraceTask":
        """The task as the trace carries it; `task.data` are its fields."""
        return self.trace.task

    @property
    def agent(self) -> "AgentInfo":
        """The agent that played it; `agent.name` tells the sides of a game apart."""
        return self.trace.agent

    @property
    def reward(self) -> float:
        """The weighted sum of the env's reward functions."""
        return self.trace.reward

    @property
    def rewards(self) -> "dict[str, Reward | None]":
        """The value of each reward function of the env."""
        return self.trace.rewards

    @property
    def metrics(self) -> dict[str, float | None]:
        """The value of each metric function of the env."""
        return self.trace.metrics

    @property
    def branches(self) -> "list[Branch]":
        """Every path through the message graph, from an opening message to a last one."""
        return self.trace.branches

    @property
    def is_truncated(self) -> bool:
        """Return whether a length limit cut it off."""
        return self.trace.is_truncated

    # --- its outcome ----------------------------------------------------------------------------------------------

    @property
    def is_active(self) -> bool:
        """Return whether it has no outcome yet."""
        return self.outcome is None

    def leave(self, stage: Stage, reason: str = "", source: str | None = None) -> None:
        """Write its outcome. Raises RuntimeError if it has one already."""
        outcome = Outcome(stage, reason, source)
        if self.outcome is not None:
            raise RuntimeError(f"a rollout has one outcome: it is {self.outcome}, and cannot become {outcome}")
        self.outcome = outcome

    def fail(self, error: Exception, kind: str | None = None) -> None:
        """Write the outcome `failed`: algorithms, filters and batches skip it. Ignored if it has an outcome.

        Args:
            error: What went wrong.
            kind: One of ERROR_KINDS; by default the exception's own `kind`, `timeout` for a TimeoutError, else `env`.
        """
        # An outcome that it has already says what took it out of the pipeline.
        if self.is_active:
            kind = kind or ("timeout" if isinstance(error, TimeoutError) else getattr(error, "kind", "env"))
            # The message goes into records and result.json, which are UTF-8.
            self.leave(Stage.FAILED, encodable(f"{type(error).__name__}: {error}"), kind)
            self.trace.record_error(error)

    @property
    def stage(self) -> Stage | None:
        """The stage of its outcome; None while it is active."""
        return None if self.outcome is None else self.outcome.stage

    @property
    def failed(self) -> bool:
        """Return whether its outcome is `failed`."""
        return self.outcome is not None and self.outcome.stage is Stage.FAILED

    @property
    def error(self) -> str | None:
        """The reason of its failure; None if it did not fail."""
        return self.outcome.reason if self.outcome is not None and self.failed else None

    @property
    def error_kind(self) -> str | None:
        """One of ERROR_KINDS; None if it did not fail."""
        return self.outcome.source if self.outcome is not None and self.failed else None

    # --- its tokens and credit ----------------------------------------------------------------------------------------

    @property
    def live(self) -> bool:
        """Return whether the live policy generated it, rather than a frozen model."""
        return self.start_version is not None

    @property
    def num_completion_tokens(self) -> int:
        """Tokens that the model sampled, each counted once."""
        return sum(sum(node.mask) for node in self.trace.nodes if node.sampled)

    @property
    def num_tool_response_tokens(self) -> int:
        """Tokens of tool answers; without those of the chat template if the renderer marks them."""
        # By key: an answer that was rendered again on another branch is the same one.
        answers = {
            key: node
            for branch in self.trace.branches
            for key, node in keyed_nodes(branch)
            if node.message.role == "tool"
        }
        return sum(sum(node.is_content) if node.is_content else len(node.token_ids) for node in answers.values())

    @property
    def turns(self) -> list[Turn]:
        """The model's replies, in the order of the calls.

        Their rewards add up to the rollout's: a reward function that returned a list gave one to each turn, and what
        another one gave belongs to the last turn.
        """
        mask = [trains for sample in self.samples for trains in sample.mask]
        tokens: dict[int, slice] = {}
        start = 0
        for sample, branch in zip(self.samples, self.sample_branches, strict=True):
            stop = start
            for node in branch.nodes:
                stop += len(node.token_ids)
                # A reply that trains on another branch has its tokens there.
                if node.sampled and any(node.mask) and mask[stop - 1]:
                    tokens[id(node.message)] = slice(stop - sum(node.mask), stop)
            start += len(sample.token_ids)
        messages = [node.message for node in self.trace.nodes if node.sampled]
        by_turn = self.trace.info.get(TURN_REWARDS, {})
        rewards = [math.fsum(values) for values in zip(*by_turn.values(), strict=True)] or [0.0] * len(messages)
        if messages:  # a reward for the whole episode is known with the last turn only
            rewards[-1] += math.fsum(part.value for name, part in self.rewards.items() if part and name not in by_turn)
        nowhere = slice(0, 0)
        return [Turn(m, tokens.get(id(m), nowhere), reward) for m, reward in zip(messages, rewards, strict=True)]

    @property
    def mean_advantage(self) -> float | None:
        """The mean of its advantages over the tokens on its mask; None without advantages, or without such a token."""
        mask = [trains for sample in self.samples for trains in sample.mask]
        credited = [a for a, trains in zip(self.advantages or [], mask, strict=False) if trains]
        return sum(credited) / len(credited) if credited else None

    def read_versions(self) -> None:
        """Take the policy versions of its first and its last model call from the trace, where they were recorded."""
        # A call of verifiers' own client has no versions.
        versions = [(call.start_version, call.end_version) for call in self.trace.calls if hasattr(call, "end_version")]
        if versions and versions[0][0] is not None:
            self.start_version, self.end_version = versions[0][0], versions[-1][1]

    def attach_samples(self) -> None:
        """Make its samples from the trace. Its outcome is `empty` if nothing was sampled. Raises TokenMismatch."""
        # Configs name classes that work on rollouts; composing one imports no verifiers.
        from prl.rollouts.messages import Origin
        from prl.rollouts.samples import samples_of

        made = samples_of(self.trace, env_name=self.env_name, temperature=self.temperature, live=self.live)
        self.samples = [sample for sample, _ in made]
        self.sample_branches = [branch for _, branch in made]
        for sample in self.samples:
            sample.origin = Origin(self.task.data.idx, self.group_id, self.index, self.agent.name)
        if not made:
            self.leave(Stage.EMPTY, "nothing was sampled")

    def tokens_hash(self) -> int:
        """Return a hash of token ids, masks and pictures of its samples."""
        parts = ((sample.token_ids, sample.mask, sample.pictures or ()) for sample in self.samples)
        return hash(tuple(tuple(map(tuple, part)) for part in parts))

    def assign_advantages(self, advantages: float | Sequence[float]) -> None:
        """Write this rollout's advantages.

        Args:
            advantages: A number, broadcast over the trainable tokens; or `[tokens]` over the samples' concatenated
                `token_ids`, of which values off the mask become 0.0.

        Raises:
            ValueError: The list has another length, or a value is not a finite number.
        """
        mask = [trains for sample in self.samples for trains in sample.mask]
        values: Any = advantages  # an array or a tensor will do
        if isinstance(values, Real) or getattr(values, "ndim", None) == 0:
            values = [float(values)] * len(mask)
        if not hasattr(values, "__len__"):
            raise ValueError(f"advantages must be a number or a list, got a {type(values).__name__}")
        if len(values) != len(mask):
            raise ValueError(
                f"advantages must align with the rollout's tokens: got {len(values)} values "
                f"for {len(mask)} token_ids in {len(self.samples)} sample(s)"
            )
        credit = [float(a) if trains else 0.0 for a, trains in zip(values, mask, strict=True)]
        for advantage in credit:
            if not math.isfinite(advantage):
                raise ValueError(f"an advantage must be a finite number, got {advantage} (reward {self.reward})")
        self.advantages = credit

    def assign_turns(self, advantages: Sequence[float]) -> None:
        """Write an advantage for each of this rollout's `turns`. Raises ValueError as `assign_advantages`."""
        turns = self.turns
        if len(advantages) != len(turns):
            raise ValueError(f"advantages must align with turns: got {len(advantages)} values for {len(turns)} turns")
        credit = [0.0] * sum(len(sample.token_ids) for sample in self.samples)
        for turn, advantage in zip(turns, advantages, strict=True):
            credit[turn.tokens] = [float(advantage)] * (turn.tokens.stop - turn.tokens.start)
        self.assign_advantages(credit)


def keyed_nodes(branch: "Branch") -> Iterator[tuple[MessageKey, "MessageNode"]]:
    """Yield the nodes of a branch, each with a key that is the same on every branch that has the message.

    A chat template may drop earlier reasoning, for example. A turn then starts a branch of its own, with new nodes for
    the messages before it. The key identifies a message by the first message of its history, the last reply before it,
    its position and its content. So equal answers to two agents, or to two replies, have keys of their own.
    """
    from verifiers.v1.graph import message_hash

    opening = reply = ""
    for position, node in enumerate(branch.nodes):
        content = message_hash(node.message)
        opening = opening or content
        yield (opening, reply, position, content), node
        if node.message.role == "assistant":
            # A template may drop the reasoning of earlier turns: with and without it, it is the same reply.
            reply = message_hash(node.message.model_copy(update={"reasoning_content": None}))


def encodable(text: str) -> str:
    """Replace unpaired surrogates by `?`: JSON can spell them, but no UTF-8 file and no tokenizer accepts them."""
    return text.encode("utf-8", "replace").decode()
