"""The sampled tokens of a rollout, for filters."""

from collections.abc import Iterator
from itertools import compress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verifiers.v1.graph import MessageNode

    from prl.rollouts.rollout import Rollout


def sampled_messages(rollout: "Rollout") -> Iterator["MessageNode"]:
    """Each sampled message once, although it may be on several branches."""
    seen = set()
    for branch in rollout.sample_branches:
        for node in branch.nodes:
            if node.sampled and id(node) not in seen:
                seen.add(id(node))
                yield node


def sampled_branches(rollout: "Rollout") -> Iterator[list["MessageNode"]]:
    """The sampled messages of each branch that trains. Branches may share messages."""
    for branch in rollout.sample_branches:
        yield [node for node in branch.nodes if node.sampled]


def sampled_ids(node: "MessageNode") -> Iterator[int]:
    """The sampled token ids of a message, parallel to `node.logprobs`."""
    return compress(node.token_ids, node.mask)
