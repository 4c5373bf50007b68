"""Sequences as token trees: tokens that several sequences begin with go through the model once.

The samples of a group share their prompt, the branches of a forked trace all turns before the fork, and short
completions are often the same. Sorted by their tokens, each sequence shares most with the one before it. A row holds
what each adds to those, up to the token before the last wanted one; positions count along each path. So a token has
the logprob that it has in the sequence alone. What a loss needs of a token stays each sequence's own, temperatures too.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from transformers import PreTrainedModel

from prl.rollouts.inputs import Picture, keys_of, pictures_in
from prl.rollouts.messages import MicroBatch, sequence_slices
from prl.trainer.batch import Stack, empty_stack, stacks
from prl.trainer.tree.attention import TokenTree, can_attend_over_trees
from prl.trainer.tree.blocks import BlockTree
from prl.trainer.tree.flex import row_on_gpu

UNUSED_PER_REPEATED = 8
"""Tokens of a forward pass's budget that cost, unused, about as much as one token that goes through the model twice."""
Layout = Callable[[list[MicroBatch], int, torch.device], Iterator[Stack]]
"""Makes stacks of rows, of at most so many tokens, on a device."""


def layout_of(model: PreTrainedModel, device: torch.device, *, share: bool) -> Layout:
    """Return how rows go through a model on a device. Raises ValueError for a model that has no way there.

    Args:
        model: the policy.
        device: where it runs.
        share: tokens that several sequences begin with go through it once, if it allows that.
    """
    cpu = device.type == "cpu"
    if can_attend_over_trees(model) and (share or not cpu):
        return functools.partial(tree_stacks, share=share)
    if cpu:
        return stacks
    raise ValueError(
        f"{type(model).__name__} on a GPU: its layers attend in a way that needs a mask of tokens x tokens; "
        "set trainer.device=cpu"
    )


def tree_stacks(
    rows: list[MicroBatch], tokens_per_forward: int, device: torch.device, *, share: bool = True
) -> Iterator[Stack]:
    """Make stacks like `stacks`, of the same sequences in another order, with each token that they share once per row.

    Sequences without a wanted token are left out. Without `share` each has all of its tokens.
    """
    (whole,) = stacks(rows, sum(len(row.input_ids) for row in rows), torch.device("cpu"))
    keys, wanted = keys_of(whole.token_ids.tolist(), whole.pictures), whole.wanted.tolist()
    tokens = {
        number: keys[part.start : part.start + max(1, last_of(wanted[part]))]
        for number, part in enumerate(sequence_slices(whole.sequence_lengths))
        if any(wanted[part])
    }
    # Sorted by their tokens, each sequence shares most with its neighbour.
    numbers = sorted(tokens, key=tokens.__getitem__)
    shared = [0, *(share and count_shared(tokens[one], tokens[other]) for one, other in pairwise(numbers))]
    if not numbers:  # a dummy: nothing to train, but backward has to run on every rank
        yield empty_stack(device)
    for run in cut([len(tokens[number]) for number in numbers], shared, tokens_per_forward):
        part = {numbers[place]: tokens[numbers[place]] for place in run}
        yield _tree_stack(whole, part, [0, *shared[run.start + 1 : run.stop]], device)


def last_of(wanted: Sequence[bool]) -> int:
    """Return the place of the last wanted token: it and those after it need not go through the model."""
    return len(wanted) - 1 - wanted[::-1].index(True)


def count_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Count the tokens that two sequences both begin with."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))


def cut(lengths: Sequence[int], shared: Sequence[int], budget: int) -> list[range]:
    """Cut sorted sequences into runs of at most `budget` tokens each, one sequence at least, where little is shared.

    Args:
        lengths: tokens of each sequence.
        shared: tokens that each shares with the one before it, which are its own where a run starts.
        budget: tokens.
    """
    runs = list[range]()
    start = 0
    while start < len(lengths):
        end = _end_of_run(lengths, shared, budget, start)
        runs.append(range(start, end))
        start = end
    return runs


def _end_of_run(lengths: Sequence[int], shared: Sequence[int], budget: int, start: int) -> int:
    """Return where the run ends that begins with the sequence `start`: arguments as of `cut`.

    Of all places that the budget reaches, the run ends at the cheapest one, the last of several: what the sequence
    there shares goes through the model again, and what is left of the budget stays unused.
    """
    tokens = lengths[start]  # of the run, if it ends before `place`
    cheapest = start + 1
    least = math.inf
    for place in range(start + 1, len(lengths)):
        cost = shared[place] + max(0, budget - tokens) / UNUSED_PER_REPEATED
        if cost <= least:
            least = cost
            cheapest = place
        tokens += lengths[place] - shared[place]
        if tokens > budget:
            return cheapest
    return len(lengths)  # the rest fits


def _tree_stack(whole: Stack, tokens: dict[int, list[int]], shared: list[int], device: torch.device) -> Stack:
    """Make a stack of one row.

    Args:
        whole: all sequences, packed.
        tokens: by number in `whole`, the keys of the first tokens of each sequence, which go through the model.
        shared: how many of them each shares with the one before it.
        device: where the stack goes.
    """
    slices = sequence_slices(whole.sequence_lengths)
    lengths = [whole.sequence_lengths[number] for number in tokens]
    taken, depths, starts = list[int](), list[int](), list[int]()
    before = np.full(sum(lengths), -1)
    path = np.empty(max(lengths), dtype=np.int64)
    first = 0
    for (number, keys), common, length in zip(tokens.items(), shared, lengths, strict=True):
        own = slices[number].start
        # Else it says nothing new: its tokens are all on the path before it.
        if len(keys) > common:
            starts.append(len(taken))
            path[common : len(keys)] = np.arange(starts[-1], starts[-1] + len(keys) - common)
            taken += range(own + common, own + len(keys))
            depths += range(common, len(keys))
        known = min(len(keys), length - 1)
        before[first + 1 : first + 1 + known] = path[:known]
        first += length
    order = torch.from_numpy(
        np.concatenate([np.arange(slices[number].start, slices[number].stop) for number in tokens])
    )
    depth = np.array(depths)
    return Stack(
        input_ids=whole.token_ids[torch.tensor(taken)][None].to(device),
        position_ids=torch.from_numpy(depth)[None].to(device),
        token_ids=whole.token_ids[order].to(device),
        before=torch.from_numpy(before).to(device),
        temperatures=whole.temperatures[order].to(device),
        wanted=whole.wanted[order].to(device),
        mask=whole.mask[order].to(device),
        logprobs=whole.logprobs[order].to(device),
        streams={name: stream[order].to(device) for name, stream in whole.streams.items()},
        sequence_lengths=lengths,
        references=[whole.references[number] for number in tokens],
        top=None if whole.top is None else whole.top.part(order).to(device),
        losses=[whole.losses[number] for number in tokens],
        envs=[whole.envs[number] for number in tokens],
        origins=[whole.origins[number] for number in tokens],
        tree=row_tree(depth, starts, device),
        pictures=_pictures(whole, tokens),
    )


def _pictures(whole: Stack, tokens: dict[int, list[int]]) -> list[Picture]:
    """Return the pictures of some sequences, whose places count their tokens: arguments as of `_tree_stack`."""
    slices = sequence_slices(whole.sequence_lengths)
    pictures, first = list[Picture](), 0
    for number, keys in tokens.items():
        own = slices[number]
        seen = slice(own.start, own.start + len(keys))
        pictures += [picture.moved(first - own.start) for picture in pictures_in(whole.pictures, seen)]
        first += own.stop - own.start
    return pictures


def row_tree(depths: np.ndarray, starts: Sequence[int], device: torch.device) -> TokenTree:
    """Return the tree by which a row attends on `device`.

    Args:
        depths: place of each token on its path, int64 `[tokens]`.
        starts: where in the row branches start, in order, 0 among them.
        device: where the model runs.
    """
    if device.type == "cpu":
        return BlockTree.of_row(depths, starts, device)
    return row_on_gpu(depths, starts, device)
