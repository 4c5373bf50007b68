"""Which tasks are held out for evaluation."""

import hashlib


def held_out(text: str) -> bool:
    """Whether the task that `text` identifies belongs to the eval split: one in ten, by content.

    So no task is in both splits, whatever the seed or the Python process.
    """
    return hashlib.sha256(text.encode()).digest()[0] * 10 < 256
