"""Micro-batches as tensors: as packed rows, or with each prompt that several sequences start with once.

The rollouts of a group share their prompt. Instead of packed rows, in which each sequence carries its own copy, a row
of `shared_stacks` holds a prefix tree: the prompt, then the continuations one after the other. A continuation attends
to the prompt and to itself, and its positions continue where the prompt ends; so every logprob is what it is for the
sequence alone.

Left out: prefixes longer than the prompt (turns that forked late), and architectures whose layers look back over a
window, which one mask for all layers cannot express.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence

from prl.trainer.loss.compute import weighted_tokens
from prl.trainer.loss.interface import per_token
from prl.wire.components import COMPONENTS
from prl.wire.messages import STREAM_FILL, MicroBatch, sequence_slices


@dataclass
class Stack:
    """Packed rows that go through the model together: `[rows, tokens]`, and without padding `[flat tokens]`.

    The flat tokens are those of one sequence after the other, tiled by `sequence_lengths`.
    """

    input_ids: torch.Tensor
    """`[rows, tokens]`, as are the three below."""
    position_ids: torch.Tensor
    temperatures: torch.Tensor
    wanted: torch.Tensor
    """bool: tokens whose logprob is needed, the members of any loss component."""
    flat: torch.Tensor
    """`[flat tokens]`: the index of each flat token in the flattened rows."""
    mask: torch.Tensor
    """bool `[flat tokens]`."""
    logprobs: torch.Tensor
    """The sampler's, `[flat tokens]`."""
    streams: dict[str, torch.Tensor]
    """By name, `[flat tokens]`: those that a row has; a row without one takes its neutral value."""
    sequence_lengths: list[int]
    initial: torch.Tensor
    """bool `[flat tokens]`: tokens of sequences whose `ref_logprobs` the trainer fills."""
    losses: list[str]
    """Name of each sequence's rl loss."""
    envs: list[str]
    """The env of each sequence."""
    origins: list[tuple[int, int]]
    """Number of each sequence's row in the shipped batch, and its place in that row."""
    previous: torch.Tensor | None = None
    """`[rows, tokens]`: index in the flattened rows of the token before; None = one place to the left."""
    attention: torch.Tensor | None = None
    """bool `[rows, 1, tokens, tokens]`: which tokens (last axis) each token attends to; None = causal within each
    sequence."""


def stacks(rows: list[MicroBatch], tokens_per_forward: int, device: torch.device) -> Iterator[Stack]:
    """Stack rows, longest first, so that rows x longest row stays within `tokens_per_forward`; one row at least."""
    order = sorted(range(len(rows)), key=lambda number: sum(rows[number].sequence_lengths), reverse=True)
    while order:
        length = max(1, sum(rows[order[0]].sequence_lengths))
        count = max(1, tokens_per_forward // length)
        yield _stack({number: rows[number] for number in order[:count]}, length, device)
        order = order[count:]


def _stack(numbered: dict[int, MicroBatch], length: int, device: torch.device) -> Stack:
    """The rows, by their number in the batch, as tensors of `length` tokens per row."""
    rows = list(numbered.values())

    def tensor(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([getattr(row, name)[:length] for row in rows], dtype=dtype)

    used = torch.tensor([[sum(row.sequence_lengths)] for row in rows])
    flat = (torch.arange(length) < used).flatten().nonzero().squeeze(1)
    streams = {
        name: torch.tensor([(getattr(row, name) or [fill] * length)[:length] for row in rows])
        for name, fill in STREAM_FILL.items()
        if any(getattr(row, name) is not None for row in rows)
    }
    mask = tensor("mask", torch.bool)
    fed = [weighted_tokens(component, mask, streams.get(component.stream)) for component in COMPONENTS.values()]
    lengths = [n for row in rows for n in row.sequence_lengths]
    initial = [flag for row in rows for flag in row.initial_reference or [False] * len(row.sequence_lengths)]
    return Stack(
        input_ids=tensor("input_ids", torch.int64).to(device),
        position_ids=tensor("position_ids", torch.int64).to(device),
        temperatures=tensor("temperatures", torch.float32).to(device),
        wanted=torch.stack(fed).any(0).to(device),
        flat=flat.to(device),
        mask=mask.flatten()[flat].to(device),
        logprobs=tensor("logprobs", torch.float32).flatten()[flat].to(device),
        streams={name: stream.flatten()[flat].to(device) for name, stream in streams.items()},
        sequence_lengths=lengths,
        initial=per_token(initial, lengths, device).bool(),
        losses=[name for row in rows for name in row.losses],
        envs=[name for row in rows for name in row.env_names],
        origins=[(number, place) for number, row in numbered.items() for place in range(len(row.sequence_lengths))],
    )


@dataclass
class PrefixTree:
    """A prompt and the sequences that start with it. Indices are those of the flat tokens of the whole batch."""

    prompt: range
    suffixes: dict[int, range]
    """What follows the prompt, by the number of the sequence in the batch."""

    @property
    def length(self) -> int:
        """Tokens that the tree takes in a row."""
        return len(self.prompt) + sum(map(len, self.suffixes.values()))


def shared_stacks(rows: list[MicroBatch], tokens_per_forward: int, device: torch.device) -> Iterator[Stack]:
    """Like `stacks`, over the same sequences in another order, with each shared prompt once per row."""
    (whole,) = stacks(rows, sum(len(row.input_ids) for row in rows), torch.device("cpu"))
    trees = sorted(find_trees(whole, tokens_per_forward), key=lambda tree: tree.length, reverse=True)
    if not trees:  # a dummy: nothing to train, but backward has to run on every rank
        yield from stacks(rows[:1], tokens_per_forward, device)
    while trees:
        count = max(1, tokens_per_forward // trees[0].length)
        yield build_prefix_stack(whole, trees[:count], device)
        trees = trees[count:]


def find_trees(whole: Stack, max_tokens: int) -> list[PrefixTree]:
    """Trees of the sequences that share all tokens before their first wanted one, up to `max_tokens` per tree.

    Sequences without a wanted token are left out.
    """
    ids = whole.input_ids.flatten()[whole.flat].tolist()
    wanted = whole.wanted.flatten()[whole.flat].tolist()
    by_prompt: dict[tuple[int, ...], dict[int, range]] = defaultdict(dict)
    for number, part in enumerate(sequence_slices(whole.sequence_lengths)):
        first = next((i for i in range(part.start + 1, part.stop) if wanted[i]), None)
        if first is not None:
            by_prompt[tuple(ids[part.start : first])][number] = range(first, part.stop)
    trees: list[PrefixTree] = []
    for prompt, suffixes in by_prompt.items():
        for place, (number, suffix) in enumerate(suffixes.items()):
            if place == 0 or trees[-1].length + len(suffix) > max_tokens:
                trees.append(PrefixTree(range(suffix.start - len(prompt), suffix.start), {}))
            trees[-1].suffixes[number] = suffix
    return trees


def build_prefix_stack(whole: Stack, trees: list[PrefixTree], device: torch.device) -> Stack:
    """A stack with one tree per row; `whole` is the stack that the trees index.

    Of each token, int64 `[rows, tokens]`: `source` is its flat token in the batch; `branch` is 0 in the prompt, 1, 2,
    ... in the continuations, -1 in padding.
    """
    parts = [[tree.prompt, *tree.suffixes.values()] for tree in trees]
    source = pad_sequence(
        [torch.cat([torch.arange(part.start, part.stop) for part in row]) for row in parts], batch_first=True
    )
    branch = pad_sequence(
        [torch.cat([torch.full((len(part),), number) for number, part in enumerate(row)]) for row in parts],
        batch_first=True,
        padding_value=-1,
    )
    flat = [
        row * branch.shape[1] + ((branch[row] == 0) | (branch[row] == number)).nonzero().squeeze(1)
        for row, tree in enumerate(trees)
        for number in range(1, len(tree.suffixes) + 1)
    ]
    numbers = [number for tree in trees for number in tree.suffixes]
    slices = sequence_slices(whole.sequence_lengths)
    order = torch.cat([torch.arange(slices[number].start, slices[number].stop) for number in numbers])

    def placed(values: torch.Tensor, fill: float) -> torch.Tensor:
        return torch.where(branch >= 0, values.flatten()[whole.flat][source], fill)

    position = placed(whole.position_ids, 0)
    size = (branch == 0).sum(1, keepdim=True)
    # Before a continuation stands the prompt's last token, not the neighbour's.
    previous = torch.where((branch > 0) & (position == size), size - 1, torch.arange(branch.shape[1]) - 1)
    return Stack(
        input_ids=placed(whole.input_ids, 0).to(device),
        position_ids=position.to(device),
        temperatures=placed(whole.temperatures, 1.0).to(device),
        wanted=placed(whole.wanted, False).to(device),
        flat=torch.cat(flat).to(device),
        mask=whole.mask[order].to(device),
        logprobs=whole.logprobs[order].to(device),
        streams={name: stream[order].to(device) for name, stream in whole.streams.items()},
        sequence_lengths=[whole.sequence_lengths[number] for number in numbers],
        initial=whole.initial[order].to(device),
        losses=[whole.losses[number] for number in numbers],
        envs=[whole.envs[number] for number in numbers],
        origins=[whole.origins[number] for number in numbers],
        previous=(previous + torch.arange(len(trees))[:, None] * branch.shape[1]).to(device),
        attention=tree_attention(branch).to(device),
    )


def tree_attention(branch: torch.Tensor) -> torch.Tensor:
    """Which tokens each token attends to: those before it in the prompt and in its own branch.

    Args:
        branch: `[rows, tokens]`, 0 in the prompt, 1, 2, ... in the continuations, -1 in padding.

    Returns:
        bool `[rows, 1, tokens, tokens]`, query by key.
    """
    query, key = branch[:, :, None], branch[:, None, :]
    before = torch.ones(branch.shape[1], branch.shape[1], dtype=torch.bool).tril()
    itself = torch.eye(branch.shape[1], dtype=torch.bool)  # padding too: attention over nothing is NaN
    return (((query == key) | (key == 0)) & before | itself)[:, None]
