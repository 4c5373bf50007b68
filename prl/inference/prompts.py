"""What sequences of one forward pass have in common from their start: an engine is to run that once."""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SAVED = 0.1
"""Of the tokens of a pass, the share that must be saved: to leave tokens out takes time, too."""


@dataclass(frozen=True, slots=True)
class Distinct:
    """What is left of a packed batch without tokens whose sequence, up to them, another one has as well."""

    rows: NDArray[np.int64]
    """[sequences left] Their rows in the batch. Of each the last tokens are left, those from some token on."""
    starts: NDArray[np.int32]
    """[sequences left + 1] Where each begins in `tokens`, and their end."""
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
    """A packed batch with what its sequences share from their start left in once; None where that saves too little.

    A token repeats another if both end the same tokens after the same blocks of the key-value cache.

    Args:
        token_ids: [tokens] What runs now, one sequence after the other.
        starts: [sequences + 1] Where each sequence begins in `token_ids`, and their end.
        seq_lens: [sequences] Tokens of each with those that the cache holds already.
        tables: For each group of layers, the blocks of the cache `[sequences, blocks]`, and the tokens in a block.
    """
    new_lens = np.diff(starts)
    alike = defaultdict[object, list[tuple[bytes, int]]](list)
    ids = token_ids.astype(">i8")  # so that sequences in the order of their bytes are in that of their tokens
    for row in np.flatnonzero(new_lens > 1).tolist():
        cached = int(seq_lens[row] - new_lens[row])
        blocks = (table[row, : -(-cached // size)].tobytes() for table, size in tables)
        alike[cached, *blocks].append((ids[starts[row] : starts[row + 1]].tobytes(), row))
    skipped = np.zeros(len(new_lens), np.int64)
    repeats: list[tuple[int, int]] = []
    for sequences in alike.values():
        sequences.sort()  # neighbours share the most
        for (_, earlier), (_, row) in itertools.pairwise(sequences):
            length = min(new_lens[earlier], new_lens[row])
            differ = np.flatnonzero(ids[starts[earlier] :][:length] != ids[starts[row] :][:length])
            if shared := differ[0] if len(differ) else length:
                skipped[row] = shared
                repeats.append((row, earlier))
    if skipped.sum() <= SAVED * len(token_ids):
        return None
    left = np.arange(len(token_ids)) >= np.repeat(starts[:-1] + skipped, new_lens)
    source = np.cumsum(left) - 1
    for row, earlier in repeats:  # the earlier one has been given its own before
        shared = int(skipped[row])
        source[starts[row] : starts[row] + shared] = source[starts[earlier] : starts[earlier] + shared]
    lens = new_lens - skipped
    rows = np.flatnonzero(lens)
    return Distinct(rows, np.concatenate([[0], np.cumsum(lens[rows])]).astype(np.int32), np.flatnonzero(left), source)
