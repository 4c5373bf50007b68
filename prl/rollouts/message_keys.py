"""Identity of a message across the branches of a trace."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import Branch

MessageKey = tuple[str, str, int, str]
"""Hash of the first message, hash of the last reply before the message, its position, hash of its content."""


def keyed_nodes(branch: "Branch") -> Iterator[tuple[MessageKey, "MessageNode"]]:
    """Yield the nodes of a branch, each with a key that is the same on every branch that has the message.

    A chat template may drop earlier reasoning, for example. A turn then starts a branch of its own, with new nodes for
    the messages before it. The key identifies a message by the first message of its history, the last reply before it,
    its position and its content. Equal answers to two agents, or to two different replies, therefore have different
    keys.
    """
    from verifiers.v1.graph import message_hash

    opening = reply = ""
    for position, node in enumerate(branch.nodes):
        content = message_hash(node.message)
        opening = opening or content
        yield (opening, reply, position, content), node
        if node.message.role == "assistant":
            reply = message_hash(node.message.model_copy(update={"reasoning_content": None}))
