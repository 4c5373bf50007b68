"""Models in the trainer that samples name as their reference: run behind prefixes, compared with the policy, updated.

`initial` stays the model that the run began with. `ema:<decay>` becomes decay · itself + (1 - decay) · policy after
each step, weight by weight; `lagged:<every>` becomes the policy after each step that `every` divides. Both begin as the
policy; ranks share them as they share it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from prl.rollouts.inputs import pictures_in
from prl.rollouts.messages import MicroBatch, sequence_slices
from prl.trainer.batch import Stack
from prl.trainer.divergence import Head, chunked_divergence
from prl.trainer.sharding import is_part

Heads = dict[str, Head | None]
"""Head of each reference, by its name, with the hidden states before each token of a stack, `[flat tokens, dim]`."""


@torch.no_grad()
def follow(references: Mapping[str, PreTrainedModel], policy: PreTrainedModel, step: int) -> None:
    """Update the references that move after `step`; with 0 they become the policy."""
    ours = local_parts(policy) if references else []
    for name, reference in references.items():
        kind, _, number = name.partition(":")
        if kind == "ema" and step:
            # In place, on this rank's parts alone: no collective, and no second copy.
            torch._foreach_lerp_(local_parts(reference), ours, 1 - float(number))
        elif kind == "ema" or (kind == "lagged" and step % int(number) == 0):
            torch._foreach_copy_(local_parts(reference), ours)


def local_parts(model: PreTrainedModel) -> list[torch.Tensor]:
    """Return this rank's parts of a model's parameters."""
    return [weight.to_local() if is_part(weight) else weight.detach() for weight in model.parameters()]


def moving(references: Mapping[str, PreTrainedModel]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of references that move (`ema`, `lagged`), by their names in a checkpoint."""
    for name, reference in references.items():
        if ":" in name:
            yield from ((f"reference/{name}/{key}", weight) for key, weight in reference.named_parameters())


def behind_prefixes(
    stack: Stack, layout: Callable[[list[MicroBatch], int, torch.device], Iterator[Stack]]
) -> tuple[Stack, torch.Tensor]:
    """Put each sequence behind the prefix that its reference sees. Returns that stack, and the tokens' places in it.

    The places are int64 `[flat tokens]`. One stack, though it may have more than `tokens_per_forward`: without a
    backward it takes less memory.
    """
    if not any(reference.prefix for reference in stack.references):
        return stack, torch.arange(len(stack.token_ids), device=stack.token_ids.device)
    row = MicroBatch([], [], [], [], [], [], [], [])
    for reference, part in zip(stack.references, sequence_slices(stack.sequence_lengths), strict=True):
        prefix = list(reference.prefix)
        behind = len(row.input_ids) + len(prefix) - part.start
        row.pictures += [picture.moved(behind) for picture in pictures_in(stack.pictures, part)]
        row.input_ids += prefix + stack.token_ids[part].tolist()
        row.mask += [False] * len(prefix) + stack.wanted[part].tolist()
        row.temperatures += [1.0] * len(prefix) + stack.temperatures[part].tolist()
        row.sequence_lengths.append(len(row.input_ids) - len(row.position_ids))
        row.position_ids += range(row.sequence_lengths[-1])
    row.logprobs = [0.0] * len(row.input_ids)
    row.env_names = row.losses = [""] * len(row.sequence_lengths)
    (seen,) = layout([row], len(row.input_ids), stack.token_ids.device)
    seen = replace(seen, features=stack.features)
    starts = {
        place: part.start for (_, place), part in zip(seen.origins, sequence_slices(seen.sequence_lengths), strict=True)
    }
    places = torch.zeros_like(stack.token_ids)
    for number, part in enumerate(sequence_slices(stack.sequence_lengths)):
        if number in starts:  # one without a wanted token may have been left out
            start = starts[number] + len(stack.references[number].prefix)
            places[part] = torch.arange(start, start + part.stop - part.start)
    return seen, places


def kept_head(head: Head, stack: Stack, seen: Stack, places: torch.Tensor, name: str) -> Head | None:
    """Return the reference's head at the tokens of `stack`; None where no sequence asks for a divergence from it."""
    if not any(reference.model == name and reference.divergence for reference in stack.references):
        return None
    weight, bias = head.weight, head.bias
    if dist.is_initialized():  # where ranks share it, it goes with its forward; the policy's stays until the backward
        weight, bias = weight.clone(), None if bias is None else bias.clone()
    return Head(head.hidden[seen.before[places]], weight, bias)


def divergences(policy: Head, stack: Stack, heads: Heads, chunk: int | None) -> torch.Tensor | None:
    """Compute the divergence at `ref_kl` tokens of sequences that ask for one, `[flat tokens]`; None where none does.

    Args:
        policy: the policy's head, with the hidden states of the flattened rows.
        stack: the stack that went through the policy.
        heads: heads of the references in the trainer.
        chunk: tokens, as in `chunked_divergence`.
    """
    # A prefix changes what the reference says, not how the two are compared: one call for all prefixes.
    comparisons = {reference.comparison for reference in stack.references if reference.divergence}
    weights = stack.streams.get("ref_kl_weights")
    if not comparisons or weights is None:
        return None
    members = (weights != 0) & (stack.before >= 0)
    values = torch.zeros_like(weights)
    for how in sorted(comparisons, key=str):
        asking = stack.tokens_of([reference.comparison == how for reference in stack.references])
        place = (asking & members).nonzero().squeeze(1)
        against = heads[how.model] if how.model else stack.top
        if against is None or not len(place):  # none is shipped without members
            continue
        found = chunked_divergence(
            policy.part(stack.before[place]),
            against.part(place),
            stack.temperatures[place],
            how.divergence,
            how.beta,
            chunk=chunk,
        )
        values = values.to(found.dtype).index_put((place,), found)
    return values
