"""Run a prompt that several sequences start with once.

The rollouts of a group share their prompt. Instead of packed rows, in which each sequence carries its own copy, a row
here holds a prefix tree: the prompt, then the continuations one after the other. A continuation attends to the prompt
and to itself, and its positions continue where the prompt ends; so every logprob is what it is for the sequence alone.

Left out: prefixes longer than the prompt (turns that forked late), and architectures whose layers look back over a
window, which one mask for all layers cannot express.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from prl.trainer.batch import Stack, stacks
from prl.trainer.model import random_tokens, stack_logprobs
from prl.wire.messages import MicroBatch, sequence_slices


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


def can_share_prompts(model: PreTrainedModel) -> bool:
    """Whether one explicit mask is right for all layers of this model."""
    layer_types = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    return layer_types == {"full_attention"} and not getattr(model.config, "sliding_window", None)


@torch.no_grad()
def check_sharing(model: PreTrainedModel) -> None:
    """Raise unless two sequences with a common prompt get the logprobs they get as packed rows."""
    ids = random_tokens(model, 12).tolist()
    rows = [
        MicroBatch(
            input_ids=tokens,
            mask=[False] * 4 + [True] * 4,
            logprobs=[0.0] * 8,
            temperatures=[1.0] * 8,
            position_ids=list(range(8)),
            sequence_lengths=[8],
            env_names=[""],
            losses=[""],
        )
        for tokens in (ids[:8], ids[:4] + ids[8:])
    ]
    found = []
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
    by_prompt: dict[tuple[int, ...], dict[int, range]] = defaultdict(dict)
    for number, part in enumerate(sequence_slices(whole.sequence_lengths)):
        first = next((i for i in range(part.start + 1, part.stop) if wanted[i]), None)
        if first is not None:
            by_prompt[tuple(ids[part.start : first])][number] = range(first, part.stop)
    trees: list[PrefixTree] = []
    for prompt, suffixes in by_prompt.items():
        tree = None
        for number, suffix in suffixes.items():
            if tree is None or tree.length + len(suffix) > max_tokens:
                tree = PrefixTree(range(suffix.start - len(prompt), suffix.start), {})
                trees.append(tree)
            tree.suffixes[number] = suffix
    return trees


def build_prefix_stack(whole: Stack, trees: list[PrefixTree], device: torch.device) -> Stack:
    """A stack with one tree per row; `whole` is the stack that the trees index."""
    columns = zip(*map(_cells, trees), strict=True)
    source, position, branch, previous = (
        pad_sequence(list(column), batch_first=True, padding_value=fill)
        for column, fill in zip(columns, (0, 0, -1, 0), strict=True)
    )
    base = torch.arange(len(trees))[:, None] * source.shape[1]
    flat = [
        row * source.shape[1] + ((branch[row] == 0) | (branch[row] == number)).nonzero().squeeze(1)
        for row, tree in enumerate(trees)
        for number in range(1, len(tree.suffixes) + 1)
    ]
    numbers = [number for tree in trees for number in tree.suffixes]
    parts = sequence_slices(whole.sequence_lengths)
    order = torch.cat([torch.arange(parts[number].start, parts[number].stop) for number in numbers])

    def placed(values: torch.Tensor, fill: float) -> torch.Tensor:
        return torch.where(branch >= 0, values.flatten()[whole.flat][source], fill).to(device)

    return Stack(
        input_ids=placed(whole.input_ids, 0),
        position_ids=position.to(device),
        temperatures=placed(whole.temperatures, 1.0),
        wanted=placed(whole.wanted, False),
        flat=torch.cat(flat).to(device),
        mask=whole.mask[order].to(device),
        logprobs=whole.logprobs[order].to(device),
        streams={name: s if s is None else s[order].to(device) for name, s in whole.streams.items()},
        sequence_lengths=[whole.sequence_lengths[number] for number in numbers],
        losses=[whole.losses[number] for number in numbers],
        origins=[whole.origins[number] for number in numbers],
        previous=(base + previous).to(device),
        attention=tree_attention(branch).to(device),
    )


def _cells(tree: PrefixTree) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The tokens of a tree as they stand in a row, each tensor int64 `[tokens]`.

    Returns the flat token of the batch; its position; its branch, 0 in the prompt, 1, 2, ... in the continuations; and
    the place in the row of the token before it.
    """
    size = len(tree.prompt)
    parts = [tree.prompt, *tree.suffixes.values()]
    source = torch.cat([torch.arange(part.start, part.stop) for part in parts])
    branch = torch.cat([torch.full((len(part),), number) for number, part in enumerate(parts)])
    within = torch.cat([torch.arange(len(part)) for part in parts])
    # Before a continuation stands the prompt's last token, not the neighbour's.
    previous = torch.where((branch > 0) & (within == 0), size - 1, torch.arange(len(source)) - 1)
    return source, torch.where(branch > 0, size + within, within), branch, previous


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
