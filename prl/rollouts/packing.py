"""Pack samples into rows of one length, balanced over the trainer ranks."""

import bisect
from itertools import accumulate
from typing import Any

import msgspec

from prl.rollouts.components import COMPONENTS, STREAM_FILL
from prl.rollouts.inputs import Picture
from prl.rollouts.logprobs import is_measured
from prl.rollouts.messages import MicroBatch, Reference, TrainingSample

TOP = ("top_ids", "top_logprobs")
"""The streams that have a list for each token."""
PER_TOKEN = ("mask", "logprobs", "temperatures", "position_ids", *STREAM_FILL, *TOP)
KL = COMPONENTS["ref_kl"]


def pack(
    samples: list[TrainingSample], seq_len: int, ranks: int, updates: int = 1
) -> tuple[list[list[MicroBatch]], int]:
    """Pack samples into rows of `seq_len` tokens, as many rows and nearly as many tokens for every rank.

    Ranks differ by at most the tokens of the longest sample. A rank with fewer rows than the others is filled up with
    dummies, rows without a token. Samples of any algorithm share a row. With several updates each has whole groups and
    nearly as many tokens, and is packed by itself.

    Args:
        samples: of one step; longer ones are truncated.
        seq_len: tokens of a row, padding included.
        ranks: trainer ranks.
        updates: the optimiser steps that they are cut into; as many as there are groups, if these are fewer.

    Returns:
        The rows of each rank, and how many samples were truncated.

    Raises ValueError for a sample whose streams do not fit its tokens or the components it feeds, naming its env.
    """
    for sample in samples:  # before they are cut: what is cut off may be what is wrong
        check_streams(sample)
        check_complete(sample)
    truncated = sum(len(sample.token_ids) > seq_len for sample in samples)
    cut = [truncate(sample, seq_len) for sample in samples]
    cut = [sample for sample in cut if sample.token_ids]  # one that begins with a picture may have lost all
    packed: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    # Whole groups: an update that had a part of one would have a baseline that does not add up to zero.
    parts = [cut] if updates == 1 else balance(by_origin(cut, "group"), updates)
    for update, part in enumerate([part for part in parts if part] or [[]]):
        share_rollouts(part)
        rows_of = [fit(share, seq_len) for share in balance([[sample] for sample in part], ranks)]
        count = max(1, max(map(len, rows_of)))
        for rank, rows in enumerate(rows_of):
            # Ranks wait for each other in every forward pass, so each makes as many.
            dummies: list[list[TrainingSample]] = [[]] * (count - len(rows))
            packed[rank] += [pack_row(row, seq_len, update) for row in dummies + sorted(rows, key=len)]
    return packed, truncated


def by_origin(samples: list[TrainingSample], *of: str) -> list[list[TrainingSample]]:
    """Return the samples of each env that agree in these fields of their `Origin`; one without an origin is alone."""
    alike: dict[tuple[Any, ...], list[TrainingSample]] = {}
    for sample in samples:
        key = [id(sample)] if sample.origin is None else [getattr(sample.origin, name) for name in of]
        alike.setdefault((sample.env_name, *key), []).append(sample)
    return list(alike.values())


def share_rollouts(samples: list[TrainingSample]) -> None:
    """Write the `rollout_share` of the samples of one update, None where each rollout has one."""
    rollouts = by_origin(samples, "group", "rollout", "agent")
    # Nearly always a rollout is one sample. Then no share is written, and none is shipped.
    several = len(rollouts) < len(samples)
    members = {id(sample): count_rl(sample) if several else 1 for sample in samples}
    sizes = [sum(members[id(sample)] for sample in rollout) for rollout in rollouts]
    per_rollout = sum(map(bool, members.values())) / max(1, sum(map(bool, sizes)))
    for rollout, size in zip(rollouts, sizes, strict=True):
        for sample in rollout:
            sample.rollout_share = per_rollout / max(1, size) if several else None


def count_rl(sample: TrainingSample) -> int:
    """Return the number of rl members of a sample, as the loss counts them."""
    members = sample.members(COMPONENTS["rl"])
    return sum(member and is_measured(logprob) for member, logprob in zip(members, sample.logprobs, strict=True))


def check_streams(sample: TrainingSample) -> None:
    """Raise ValueError unless every present stream is one number per token; make them plain floats.

    Looks at the whole sample alone, because truncation and neighbours in a row would hide a producer's mistake.
    """
    where, length = f"env {sample.env_name!r}: a sample's", len(sample.token_ids)
    for name in STREAM_FILL:
        if (values := getattr(sample, name)) is None:
            continue
        try:
            # An algorithm may have written an array or a tensor, which a message does not take.
            numbers = list(map(float, values))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where} {name} must be a list of numbers: {error}") from error
        if len(numbers) != length:
            raise ValueError(f"{where} {name} has {len(numbers)} values for {length} token_ids")
        setattr(sample, name, numbers)


def check_complete(sample: TrainingSample) -> None:
    """Raise ValueError where the sample lacks the stream that a component it feeds requires."""
    for component in COMPONENTS.values():
        required = component.requires
        if required == "ref_logprobs" and sample.reference.model:  # the trainer's own model fills them
            continue
        if required is not None and getattr(sample, required) is None and sample.feeds(component):
            raise ValueError(
                f"env {sample.env_name!r}: a sample feeds the {component.name} loss but has no {required}; "
                f"{component.provider}"
            )
    if sample.reference.divergence and not sample.reference.model:
        rows = zip(top_of(sample, "top_ids"), top_of(sample, "top_logprobs"), sample.members(KL), strict=True)
        # Nothing predicts the first token, so it has no distribution.
        if any(len(ids) != len(logprobs) or (member and not ids) for ids, logprobs, member in list(rows)[1:]):
            raise ValueError(
                f"env {sample.env_name!r}: a sample asks for the {sample.reference.divergence} from a reference but "
                "lacks its top_ids or top_logprobs; its algorithm must score with top_k"
            )


def top_of(sample: TrainingSample, name: str) -> list[list[Any]]:
    """`top_ids` or `top_logprobs` of the sample on members of `ref_kl`, [] elsewhere."""
    values = getattr(sample, name) or [[]] * len(sample.token_ids)
    return [row if member else [] for row, member in zip(values, sample.members(KL), strict=True)]


def truncate(sample: TrainingSample, seq_len: int) -> TrainingSample:
    """Return the sample, or a copy cut to `seq_len` tokens."""
    if len(sample.token_ids) <= seq_len:
        return sample
    pictures = sample.pictures or []
    # A picture is seen whole, or the sample ends before it.
    stop = next((picture.start for picture in pictures if picture.start < seq_len < picture.stop), seq_len)
    lists = {name: value for name, value in msgspec.structs.asdict(sample).items() if isinstance(value, list)}
    cut = {name: value[:stop] for name, value in lists.items()}
    if pictures:
        cut["pictures"] = [picture for picture in pictures if picture.stop <= stop]
    return msgspec.structs.replace(sample, **cut)


def balance(pieces: list[list[TrainingSample]], count: int) -> list[list[TrainingSample]]:
    """Share samples out by pieces that stay whole: the longest first, each to the share with the fewest tokens.

    So shares differ by at most the longest piece: when a share got its last one, no other had fewer tokens.
    """
    shares: list[list[TrainingSample]] = [[] for _ in range(count)]
    tokens = [0] * count
    for piece in sorted(pieces, key=tokens_of, reverse=True):
        share = tokens.index(min(tokens))
        shares[share] += piece
        tokens[share] += tokens_of(piece)
    return shares


def tokens_of(samples: list[TrainingSample]) -> int:
    """Return the tokens of all samples."""
    return sum(len(sample.token_ids) for sample in samples)


def fit(samples: list[TrainingSample], seq_len: int) -> list[list[TrainingSample]]:
    """Best-fit decreasing: the longest first, each into the fullest row that still has room for it."""
    rows: list[list[TrainingSample]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for sample in sorted(samples, key=lambda sample: len(sample.token_ids), reverse=True):
        length = len(sample.token_ids)
        # The first entry with at least this much room is that of the fullest row.
        at = bisect.bisect_left(room, (length, -1))
        if at < len(room):
            left, row = room.pop(at)
        else:
            left, row = seq_len, len(rows)
            rows.append([])
        rows[row].append(sample)
        bisect.insort(room, (left - length, row))
    return rows


def pack_row(samples: list[TrainingSample], seq_len: int, update: int = 0) -> MicroBatch:
    """Return a row of an update: the samples one after the other, then padding, in which every stream is 0.0."""
    lengths = [len(sample.token_ids) for sample in samples]
    padding = seq_len - sum(lengths)

    def top(name: str) -> Any:
        """Return the lists of each token; None where no sample has any."""
        if all(getattr(sample, name) is None for sample in samples):
            return None
        return [row for sample in samples for row in top_of(sample, name)] + [[]] * padding

    def joined(name: str, fill: Any = 0.0) -> Any:
        """Return one value per token; None for a stream that no sample has."""
        parts = [getattr(sample, name) for sample in samples]
        if name in STREAM_FILL and all(part is None for part in parts):
            return None
        present = [[STREAM_FILL[name]] * n if part is None else part for part, n in zip(parts, lengths, strict=True)]
        return [value for part in present for value in part] + [fill] * padding

    pictures: list[Picture] = []
    for sample, start in zip(samples, accumulate(lengths, initial=0), strict=False):
        pictures += [picture.moved(start) for picture in sample.pictures or ()]
    # Most runs compare with nothing: then the message has an empty list.
    references = [sample.reference for sample in samples]
    row = MicroBatch(
        input_ids=joined("token_ids", 0),
        mask=joined("mask", False),
        logprobs=joined("logprobs"),
        temperatures=joined("temperatures", 1.0),  # a divisor: 0.0 would make padding's logits infinite
        position_ids=[position for length in lengths for position in range(length)] + [0] * padding,
        sequence_lengths=lengths,
        env_names=[sample.env_name for sample in samples],
        losses=[sample.loss for sample in samples],
        references=references if any(reference != Reference() for reference in references) else [],
        rollout_shares=[sample.rollout_share for sample in samples if sample.rollout_share is not None],
        update=update,
        origins=[sample.origin for sample in samples],
        pictures=pictures,
        **{name: joined(name) for name in STREAM_FILL},
        **{name: top(name) for name in TOP},
    )
    check_aligned(row)
    return row


def check_aligned(row: MicroBatch) -> None:
    """Check that every per-token array is as long as `input_ids`; else training would be wrong silently."""
    for name in PER_TOKEN:
        values = getattr(row, name)
        if values is not None and len(values) != len(row.input_ids):
            raise ValueError(f"packed row: {name} has {len(values)} values for {len(row.input_ids)} input_ids")
