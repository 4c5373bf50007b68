"""Which messages of a trace are the same one, and what text can be one."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import Branch


def keyed(branch: "Branch") -> Iterator[tuple[tuple[str, str, int, str], "MessageNode"]]:
    """The nodes of a branch, each with what its message keeps when history is rendered again.

    Where a template drops past reasoning, say, a turn starts a branch of its own, with new nodes for the messages before. A
    message is known again by how its history opens, the model's last words before it, its place and its content. So two
    agents, or two replies to one prompt, that are answered the same are answered twice.
    """
    from verifiers.v1.graph import message_hash

    opening = reply = ""
    for place, node in enumerate(branch.nodes):
        content = message_hash(node.message)
        opening = opening or content
        yield (opening, reply, place, content), node
        if node.message.role == "assistant":
            reply = message_hash(node.message.model_copy(update={"reasoning_content": None}))


def encodable(text: str) -> str:
    """`text` without halves of surrogate pairs: JSON can spell them, and no file or tokenizer takes them."""
    return text.encode("utf-8", "replace").decode()
