"""Sequences as token trees: tokens that several sequences begin with go through the model once.

The samples of a group share their prompt, the branches of a forked trace all turns before the fork, and short
completions are often the same. Sorted by their tokens, each sequence shares most with the one before it. A row holds
what each adds to those, up to the token before the last wanted one; positions count along each path. So a token has
the logprob that it has in the sequence alone. What a loss needs of a token stays each sequence's own, temperatures too.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise

import torch

from prl.trainer.attention import TokenTree
from prl.trainer.batch import Stack, stacks
from prl.wire.messages import MicroBatch, sequence_slices

ROOM = 8
"""Tokens left out of a forward pass that are as bad as one that goes through the model twice."""


def tree_stacks(rows: list[MicroBatch], tokens_per_forward: int, device: torch.device) -> Iterator[Stack]:
    """Like `stacks`, over the same sequences in another order, with each token that they share once per row.

    Sequences without a wanted token are left out.
    """
    (whole,) = stacks(rows, sum(len(row.input_ids) for row in rows), torch.device("cpu"))
    ids, wanted = whole.token_ids.tolist(), whole.wanted.tolist()
    tokens = {
        number: ids[part.start : part.start + max(1, last_of(wanted[part]))]
        for number, part in enumerate(sequence_slices(whole.sequence_lengths))
        if any(wanted[part])
    }
    numbers = sorted(tokens, key=tokens.__getitem__)
    shared = [0, *(count_shared(tokens[one], tokens[other]) for one, other in pairwise(numbers))]
    if not numbers:  # a dummy: nothing to train, but backward has to run on every rank
        yield from stacks(rows[:1], tokens_per_forward, device)
    for run in cut([len(tokens[number]) for number in numbers], shared, tokens_per_forward):
        part = {numbers[place]: tokens[numbers[place]] for place in run}
        yield _tree_stack(whole, part, [0, *shared[run.start + 1 : run.stop]], device)


def last_of(wanted: Sequence[bool]) -> int:
    """Place of the last wanted token: it and those after it need not go through the model."""
    return len(wanted) - 1 - wanted[::-1].index(True)


def count_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of tokens that two sequences both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def cut(lengths: Sequence[int], shared: Sequence[int], budget: int) -> list[range]:
    """Cut sorted sequences into runs of at most `budget` tokens each, one sequence at least, where little is shared.

    Args:
        lengths: of the sequences, tokens.
        shared: tokens that each shares with the one before it, which are its own where a run starts.
        budget: tokens.
    """
    runs, start = [], 0
    while start < len(lengths):
        tokens, best, least = lengths[start], len(lengths), float("inf")
        for place in range(start + 1, len(lengths)):
            lost = shared[place] + max(0, budget - tokens) / ROOM
            if lost <= least:
                best, least = place, lost
            tokens += lengths[place] - shared[place]
            if tokens > budget:
                break
        else:
            best = len(lengths)
        runs.append(range(start, best))
        start = best
    return runs


def _tree_stack(whole: Stack, tokens: dict[int, list[int]], shared: list[int], device: torch.device) -> Stack:
    """A stack of one row.

    Args:
        whole: all sequences, packed.
        tokens: by number in `whole`, the first tokens of each sequence, which go through the model.
        shared: how many of them each shares with the one before it.
        device: of the stack.
    """
    slices = sequence_slices(whole.sequence_lengths)
    paths: list[list[int]] = []
    before: list[int] = []
    size = 0
    for (number, ids), common in zip(tokens.items(), shared, strict=True):
        added = len(ids) - common
        paths.append([*(paths[-1][:common] if paths else []), *range(size, size + added)])
        before += [-1, *paths[-1], *[-1] * whole.sequence_lengths[number]][: whole.sequence_lengths[number]]
        size += added
    places = torch.tensor(list(chain.from_iterable(paths)))
    lengths = [len(path) for path in paths]
    order = torch.cat([torch.arange(slices[number].start, slices[number].stop) for number in tokens])

    def row(values: Iterable[int]) -> torch.Tensor:
        return places.new_empty(size).scatter_(0, places, torch.tensor(list(values)))[None].to(device)

    return Stack(
        input_ids=row(chain.from_iterable(tokens.values())),
        position_ids=row(chain.from_iterable(map(range, lengths))),
        token_ids=whole.token_ids[order].to(device),
        before=torch.tensor(before).to(device),
        temperatures=whole.temperatures[order].to(device),
        wanted=whole.wanted[order].to(device),
        mask=whole.mask[order].to(device),
        logprobs=whole.logprobs[order].to(device),
        streams={name: stream[order].to(device) for name, stream in whole.streams.items()},
        sequence_lengths=[whole.sequence_lengths[number] for number in tokens],
        initial=whole.initial[order].to(device),
        losses=[whole.losses[number] for number in tokens],
        envs=[whole.envs[number] for number in tokens],
        origins=[whole.origins[number] for number in tokens],
        tree=TokenTree.of_paths(
            places.split(lengths), [n - common for n, common in zip(lengths, shared, strict=True)], device
        ),
    )
