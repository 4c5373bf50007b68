"""Sequences of one forward pass that are the same: the prompt of a group, which an engine is to run once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Distinct:
    """What is left of a packed batch without the sequences that repeat an earlier one."""

    rows: NDArray[np.int64]
    """[sequences left] Their rows in the batch."""
    tokens: NDArray[np.int64]
    """[tokens left] Where their tokens are in the batch."""
    source: NDArray[np.int64]
    """[tokens of the batch] For each, its place in `tokens`, or that of the token which it repeats."""


def distinct(
    token_ids: NDArray[np.integer],
    starts: NDArray[np.integer],
    seq_lens: NDArray[np.integer],
    tables: Sequence[tuple[NDArray[np.integer], int]],
) -> Distinct | None:
    """The sequences of a packed batch without those that repeat an earlier one; None where none does.

    A sequence repeats another if both run the same tokens, two or more, after the same blocks of the key-value cache.

    Args:
        token_ids: [tokens] What runs now, one sequence after the other.
        starts: [sequences + 1] Where each sequence begins in `token_ids`, and their end.
        seq_lens: [sequences] Tokens of each with those that the cache holds already.
        tables: For each group of layers, the blocks of the cache `[sequences, blocks]`, and the tokens in a block.
    """
    first: dict[tuple[object, ...], int] = {}
    repeats: list[tuple[int, int]] = []
    new_lens = np.diff(starts)
    for row in np.flatnonzero(new_lens > 1).tolist():
        cached = int(seq_lens[row] - new_lens[row])
        blocks = (table[row, : -(-cached // size)].tobytes() for table, size in tables)
        key = (cached, token_ids[starts[row] : starts[row + 1]].tobytes(), *blocks)
        if (earlier := first.setdefault(key, row)) != row:
            repeats.append((row, earlier))
    if not repeats:
        return None
    left = np.ones(len(token_ids), bool)
    for row, _ in repeats:
        left[starts[row] : starts[row + 1]] = False
    source = np.cumsum(left) - 1
    for row, earlier in repeats:
        source[starts[row] : starts[row + 1]] = source[starts[earlier] : starts[earlier + 1]]
    rows = np.setdiff1d(np.arange(len(new_lens)), [row for row, _ in repeats])
    return Distinct(rows, np.flatnonzero(left), source)
