"""Run a prompt that several sequences start with once.

The rollouts of a group share their prompt. Instead of packed rows, in which each sequence carries its own copy, a row
here holds a prefix tree: the prompt, then the continuations one after the other. A continuation attends to the prompt
and to itself, and its positions continue where the prompt ends; so every logprob is what it is for the sequence alone.

Left out: prefixes longer than the prompt (turns that forked late), and architectures whose layers look back over a
window, which one mask for all layers cannot express.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from prl.trainer.batch import Stack, stacks
from prl.trainer.model import stack_logprobs
from prl.wire.messages import MicroBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class PrefixTree:
    """A prompt and the sequences that start with it. Indices are those of the flat tokens of the whole batch."""

    prompt: range
    sequences: list[tuple[int, int]]
    """(start, end) of each sequence, its prompt included."""

    @property
    def suffixes(self) -> list[range]:
        """The part of each sequence after the prompt."""
        return [range(start + len(self.prompt), end) for start, end in self.sequences]

    @property
    def length(self) -> int:
        """Tokens that the tree takes in a row."""
        return len(self.prompt) + sum(map(len, self.suffixes))


def can_share_prompts(model: "PreTrainedModel") -> bool:
    """Whether one explicit mask is right for all layers of this model."""
    layer_types = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    return layer_types == {"full_attention"} and not getattr(model.config, "sliding_window", None)


def check_sharing(model: "PreTrainedModel") -> None:
    """Raise unless two sequences with a common prompt get the logprobs they get as packed rows."""
    vocabulary = model.get_output_embeddings().weight.shape[0]
    ids = torch.randint(vocabulary, (12,), generator=torch.Generator().manual_seed(0)).tolist()
    sequences = [ids[:8], ids[:4] + ids[8:]]
    rows = [
        MicroBatch(
            input_ids=tokens,
            mask=[position >= 4 for position in range(len(tokens))],
            logprobs=[0.0] * len(tokens),
            temperatures=[1.0] * len(tokens),
            position_ids=list(range(len(tokens))),
            sequence_lengths=[len(tokens)],
            env_names=[""],
            losses=[""],
        )
        for tokens in sequences
    ]
    found = []
    with torch.no_grad():
        for layout in (stacks, shared_stacks):
            (stack,) = layout(rows, 64, model.device)
            logprobs, _ = stack_logprobs(model, stack, head_chunk=64)
            found.append(sorted(logprobs[stack.wanted].tolist()))
    gap = max(abs(a - b) for a, b in zip(*found, strict=True))
    if not gap < 1e-2:
        raise ValueError(
            f"{type(model).__name__}: a shared prompt changes logprobs by {gap:.2g}; set trainer.share_prompts=false"
        )


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
    by_prompt: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    start = 0
    for length in whole.sequence_lengths:
        end = start + length
        first = next((i for i in range(start + 1, end) if wanted[i]), None)
        if first is not None:
            by_prompt.setdefault(tuple(ids[start:first]), []).append((start, end))
        start = end
    trees: list[PrefixTree] = []
    for prompt, sequences in by_prompt.items():
        tree = None
        for start, end in sequences:
            if tree is None or tree.length + end - start - len(prompt) > max_tokens:
                tree = PrefixTree(range(start, start + len(prompt)), [])
                trees.append(tree)
            tree.sequences.append((start, end))
    return trees


class _Placement:
    """Where the tokens of prefix trees stand in the rows of a stack. Tensors are `[rows, tokens]` int64."""

    def __init__(self, trees: list[PrefixTree]):
        shape = (len(trees), max(tree.length for tree in trees))
        self.source = torch.zeros(shape, dtype=torch.int64)
        """The flat token of the batch that stands here."""
        self.position = torch.zeros(shape, dtype=torch.int64)
        self.branch = torch.full(shape, -1)
        """0 in the prompt, 1, 2, ... in the continuations, -1 in padding."""
        self.previous = torch.zeros(shape, dtype=torch.int64)
        """Index in the flattened rows of the token before."""
        self.flat: list[int] = []
        """Index in the flattened rows of each token of each sequence, so prompts repeat."""
        self.tokens: list[int] = []
        """The flat token of the batch that each of `flat` is."""
        for row, tree in enumerate(trees):
            self._place(row, tree)

    def _place(self, row: int, tree: PrefixTree) -> None:
        base, size = row * self.source.shape[1], len(tree.prompt)
        self.source[row, :size] = torch.arange(tree.prompt.start, tree.prompt.stop)
        self.position[row, :size] = torch.arange(size)
        self.branch[row, :size] = 0
        self.previous[row, :size] = base + torch.arange(size) - 1
        at = size
        for number, suffix in enumerate(tree.suffixes, start=1):
            end = at + len(suffix)
            self.source[row, at:end] = torch.arange(suffix.start, suffix.stop)
            self.position[row, at:end] = torch.arange(size, size + len(suffix))
            self.branch[row, at:end] = number
            self.previous[row, at:end] = base + torch.arange(at, end) - 1
            self.previous[row, at] = base + size - 1  # the prompt's last token, not the neighbour's
            self.flat += [*range(base, base + size), *range(base + at, base + end)]
            self.tokens += range(suffix.start - size, suffix.stop)
            at = end


def build_prefix_stack(whole: Stack, trees: list[PrefixTree], device: torch.device) -> Stack:
    """A stack with one tree per row; `whole` is the stack that the trees index."""
    place = _Placement(trees)
    order = torch.tensor(place.tokens)
    number_of = {start: number for number, start in enumerate(accumulate(whole.sequence_lengths[:-1], initial=0))}
    numbers = [number_of[start] for tree in trees for start, _ in tree.sequences]  # of the sequences, in `whole`

    def placed(values: torch.Tensor, fill: float) -> torch.Tensor:
        return torch.where(place.branch >= 0, values.flatten()[whole.flat][place.source], fill).to(device)

    return Stack(
        input_ids=placed(whole.input_ids, 0),
        position_ids=place.position.to(device),
        temperatures=placed(whole.temperatures, 1.0),
        wanted=placed(whole.wanted, False),
        flat=torch.tensor(place.flat, device=device),
        mask=whole.mask[order].to(device),
        logprobs=whole.logprobs[order].to(device),
        streams={name: s if s is None else s[order].to(device) for name, s in whole.streams.items()},
        sequence_lengths=[whole.sequence_lengths[number] for number in numbers],
        losses=[whole.losses[number] for number in numbers],
        origins=[whole.origins[number] for number in numbers],
        previous=place.previous.to(device),
        attention=tree_attention(place.branch).to(device),
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
