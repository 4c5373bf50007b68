"""Run a prompt that several sequences start with once.

The rollouts of a group share their prompt. Instead of packed rows, in which each sequence carries its own copy, a row here
is a tree: the prompt, then the continuations one after the other. A continuation attends to the prompt and to itself, and
its positions go on where the prompt ends; so every logprob is what it is for the sequence alone.

Left out: prefixes longer than the prompt (turns that forked late), and architectures whose layers look back over a window,
which one mask for all layers cannot express.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch

from prl.trainer.batch import Stack, stacks
from prl.trainer.model import token_logprobs
from prl.wire import MicroBatch


@dataclass
class Tree:
    """A prompt and what follows it in each of `sequences`; numbers index the flat tokens of the whole batch."""

    prompt: range
    sequences: list[tuple[int, int]]
    """(start, end) of each sequence, its prompt included."""

    @property
    def suffixes(self) -> list[range]:
        return [range(start + len(self.prompt), end) for start, end in self.sequences]

    @property
    def length(self) -> int:
        return len(self.prompt) + sum(map(len, self.suffixes))


def can_share_prompts(model: torch.nn.Module) -> bool:
    """Whether one explicit mask is right for all layers of this model."""
    layer_types = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    return layer_types == {"full_attention"} and not getattr(model.config, "sliding_window", None)


def check_sharing(model: torch.nn.Module) -> None:
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
        )
        for tokens in sequences
    ]
    sums = []
    with torch.no_grad():
        for layout in (stacks, shared_stacks):
            (stack,) = layout(rows, 64, model.device)
            logprobs, _ = token_logprobs(
                model,
                stack.input_ids,
                stack.position_ids,
                stack.temperatures,
                stack.wanted,
                head_chunk=64,
                previous=stack.previous,
                attention=stack.attention,
            )
            sums.append(sorted(logprobs[stack.wanted].tolist()))
    gap = max(abs(a - b) for a, b in zip(*sums, strict=True))
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
        yield plant(whole, trees[:count], device)
        trees = trees[count:]


def find_trees(whole: Stack, max_tokens: int) -> list[Tree]:
    """Sequences that start with the same tokens before their first wanted one, together, up to `max_tokens` a tree."""
    ids = whole.input_ids.flatten()[whole.flat].tolist()
    wanted = whole.wanted.flatten()[whole.flat].tolist()
    groups: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    start = 0
    for length in whole.sequence_lengths:
        end = start + length
        first = next((i for i in range(start + 1, end) if wanted[i]), None)
        if first is not None:
            groups.setdefault(tuple(ids[start:first]), []).append((start, end))
        start = end
    trees: list[Tree] = []
    for prompt, sequences in groups.items():
        tree = None
        for start, end in sequences:
            if tree is None or tree.length + end - start - len(prompt) > max_tokens:
                tree = Tree(range(start, start + len(prompt)), [])
                trees.append(tree)
            tree.sequences.append((start, end))
    return trees


def plant(whole: Stack, trees: list[Tree], device: torch.device) -> Stack:
    """The trees as rows of one stack."""
    length = max(tree.length for tree in trees)
    shape = (len(trees), length)
    source = torch.zeros(shape, dtype=torch.int64)  # which flat token of the batch stands here
    position = torch.zeros(shape, dtype=torch.int64)
    branch = torch.full(shape, -1)  # 0 in the prompt, 1, 2, … in the continuations, -1 in padding
    previous = torch.zeros(shape, dtype=torch.int64)
    flat: list[int] = []  # where each token of each sequence stands, prompts again and again
    tokens: list[int] = []  # the same tokens in `whole`
    lengths: list[int] = []
    origins: list[tuple[int, int]] = []
    starts = accumulate(whole.sequence_lengths, initial=0)
    origin_of = dict(zip(starts, whole.origins))  # by where the sequence starts in `whole`
    for row, tree in enumerate(trees):
        base, size = row * length, len(tree.prompt)
        at = size
        source[row, :size] = torch.arange(tree.prompt.start, tree.prompt.stop)
        position[row, :size] = torch.arange(size)
        branch[row, :size] = 0
        previous[row, :size] = base + torch.arange(size) - 1
        for number, suffix in enumerate(tree.suffixes, start=1):
            end = at + len(suffix)
            source[row, at:end] = torch.arange(suffix.start, suffix.stop)
            position[row, at:end] = torch.arange(size, size + len(suffix))
            branch[row, at:end] = number
            previous[row, at:end] = base + torch.arange(at, end) - 1
            previous[row, at] = base + size - 1  # the prompt's last token, not the neighbour's
            flat += [*range(base, base + size), *range(base + at, base + end)]
            tokens += range(suffix.start - size, suffix.stop)
            lengths.append(size + len(suffix))
            origins.append(origin_of[suffix.start - size])
            at = end

    def placed(values: torch.Tensor, fill: float) -> torch.Tensor:
        return torch.where(branch >= 0, values.flatten()[whole.flat][source], fill).to(device)

    order = torch.tensor(tokens)
    return Stack(
        input_ids=placed(whole.input_ids, 0),
        position_ids=position.to(device),
        temperatures=placed(whole.temperatures, 1.0),
        wanted=placed(whole.wanted, False),
        flat=torch.tensor(flat, device=device),
        mask=whole.mask[order].to(device),
        logprobs=whole.logprobs[order].to(device),
        streams={name: s if s is None else s[order].to(device) for name, s in whole.streams.items()},
        sequence_lengths=lengths,
        origins=origins,
        previous=previous.to(device),
        attention=tree_attention(branch).to(device),
    )


def tree_attention(branch: torch.Tensor) -> torch.Tensor:
    """Who sees whom, bool `[rows, 1, tokens, tokens]`: what stands before in the same branch or in the prompt."""
    query, key = branch[:, :, None], branch[:, None, :]
    before = torch.ones(branch.shape[1], branch.shape[1], dtype=torch.bool).tril()
    itself = torch.eye(branch.shape[1], dtype=torch.bool)  # padding too: attention over nothing is NaN
    return (((query == key) | (key == 0)) & before | itself)[:, None]
