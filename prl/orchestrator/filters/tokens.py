"""What filters read of a rollout: the tokens it sampled, and the sampler's logprobs where they say something."""

import math
from collections.abc import Iterator
from itertools import compress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verifiers.v1.graph import MessageNode

    from prl.rollouts.rollout import Rollout

SENTINEL_BELOW = -9000.0  # vLLM sends -9999 where it has no logprob; rounding may bring it a little higher


def measured(logprob: float) -> bool:
    """Whether it is a logprob: neither infinite, nor NaN, nor the engine's stand-in for none."""
    return math.isfinite(logprob) and logprob > SENTINEL_BELOW


def sampled_messages(rollout: "Rollout") -> Iterator["MessageNode"]:
    """Each message that the model sampled, once: it may sit on several branches."""
    seen = set()
    for branch in rollout.sample_branches:
        for node in branch.nodes:
            if node.sampled and id(node) not in seen:
                seen.add(id(node))
                yield node


def sampled_branches(rollout: "Rollout") -> Iterator[list["MessageNode"]]:
    """Of each branch that trains, the messages that the model sampled. Two branches may share messages."""
    for branch in rollout.sample_branches:
        yield [node for node in branch.nodes if node.sampled]


def sampled_ids(node: "MessageNode") -> Iterator[int]:
    """The token ids that the model sampled of its message; `node.logprobs` are theirs."""
    return compress(node.token_ids, node.mask)
