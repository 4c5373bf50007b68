"""Which messages of a trace are the same one, and what text can be one."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import Branch


def keyed(branch: "Branch") -> Iterator[tuple[tuple[int, str], "MessageNode"]]:
    """The nodes of a branch, each with what its message keeps when history is rendered again: its place and its content.

    Where a template drops past reasoning, say, a turn starts a branch of its own, with new nodes for the messages before.
    """
    from verifiers.v1.graph import message_hash

    for place, node in enumerate(branch.nodes):
        yield (place, message_hash(node.message)), node


def encodable(text: str) -> str:
    """`text` without halves of surrogate pairs: JSON can spell them, and no file or tokenizer takes them."""
    return text.encode("utf-8", "replace").decode()
