"""Pack samples into rows of one length, balanced over the trainer ranks."""

import bisect
from typing import Any

import msgspec

from prl.rollouts.components import COMPONENTS, STREAM_FILL
from prl.rollouts.messages import MicroBatch, Reference, TrainingSample

TOP = ("top_ids", "top_logprobs")
PER_TOKEN = ("mask", "logprobs", "temperatures", "position_ids", *STREAM_FILL, *TOP)
KL = COMPONENTS["ref_kl"]


def pack(samples: list[TrainingSample], seq_len: int, ranks: int) -> tuple[list[list[MicroBatch]], int]:
    """Pack samples into rows of `seq_len` tokens, as many rows and nearly as many tokens for every rank.

    Ranks differ by at most the tokens of the longest sample. A rank with fewer rows than the others is filled up with
    dummies, rows without a token. Samples of any algorithm share a row.

    Args:
        samples: of one step; longer ones are truncated.
        seq_len: tokens of a row, padding included.
        ranks: trainer ranks.

    Returns:
        The rows of each rank, and how many samples were truncated.

    Raises ValueError for a sample whose streams do not fit its tokens or the components it feeds, naming its env.
    """
    for sample in samples:
        check_streams(sample)
        check_complete(sample)
    truncated = sum(len(sample.token_ids) > seq_len for sample in samples)
    shares = balance([truncate(sample, seq_len) for sample in samples], ranks)
    rows_of = [fit(share, seq_len) for share in shares]
    count = max(1, max(map(len, rows_of)))
    return [[pack_row(row, seq_len) for row in filled_up(rows, count)] for rows in rows_of], truncated


def check_streams(sample: TrainingSample) -> None:
    """Raise ValueError unless every present stream is one number per token; make them plain floats.

    Looks at the whole sample alone, because truncation and neighbours in a row would hide a producer's mistake.
    """
    where, length = f"env {sample.env_name!r}: a sample's", len(sample.token_ids)
    for name in STREAM_FILL:
        if (values := getattr(sample, name)) is None:
            continue
        try:
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
        if required == "ref_logprobs" and sample.reference.model:
            continue
        if required is not None and getattr(sample, required) is None and sample.feeds(component):
            raise ValueError(
                f"env {sample.env_name!r}: a sample feeds the {component.name} loss but has no {required}; "
                f"{component.provider}"
            )
    if sample.reference.divergence and not sample.reference.model:
        rows = zip(top_of(sample, "top_ids"), top_of(sample, "top_logprobs"), sample.members(KL), strict=True)
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
    """The sample, or a copy cut to `seq_len` tokens."""
    if len(sample.token_ids) <= seq_len:
        return sample
    lists = {name: value for name, value in msgspec.structs.asdict(sample).items() if isinstance(value, list)}
    return msgspec.structs.replace(sample, **{name: value[:seq_len] for name, value in lists.items()})


def balance(samples: list[TrainingSample], ranks: int) -> list[list[TrainingSample]]:
    """Share samples out over ranks: the longest first, each to the rank with the fewest tokens.

    So ranks differ by at most the longest sample: when a rank got its last one, no other had fewer tokens.
    """
    shares: list[list[TrainingSample]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for sample in by_length(samples):
        rank = tokens.index(min(tokens))
        shares[rank].append(sample)
        tokens[rank] += len(sample.token_ids)
    return shares


def fit(samples: list[TrainingSample], seq_len: int) -> list[list[TrainingSample]]:
    """Best-fit decreasing: the longest first, each into the fullest row that still has room for it."""
    rows: list[list[TrainingSample]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for sample in by_length(samples):
        length = len(sample.token_ids)
        at = bisect.bisect_left(room, (length, -1))
        if at < len(room):
            left, row = room.pop(at)
        else:
            left, row = seq_len, len(rows)
            rows.append([])
        rows[row].append(sample)
        bisect.insort(room, (left - length, row))
    return rows


def by_length(samples: list[TrainingSample]) -> list[TrainingSample]:
    """The samples, the longest first."""
    return sorted(samples, key=lambda sample: len(sample.token_ids), reverse=True)


def filled_up(rows: list[list[TrainingSample]], count: int) -> list[list[TrainingSample]]:
    """So many rows, empty ones first."""
    return [[]] * (count - len(rows)) + sorted(rows, key=len)


def pack_row(samples: list[TrainingSample], seq_len: int) -> MicroBatch:
    """One row: the samples one after the other, then padding, in which every stream is 0.0."""
    lengths = [len(sample.token_ids) for sample in samples]
    padding = seq_len - sum(lengths)

    def top(name: str) -> Any:
        """The lists of each token; None where no sample has any."""
        if all(getattr(sample, name) is None for sample in samples):
            return None
        return [row for sample in samples for row in top_of(sample, name)] + [[]] * padding

    def joined(name: str, fill: Any = 0.0) -> Any:
        """One value per token; None for a stream that no sample has."""
        parts = [getattr(sample, name) for sample in samples]
        if name in STREAM_FILL and all(part is None for part in parts):
            return None
        present = [[STREAM_FILL[name]] * n if part is None else part for part, n in zip(parts, lengths, strict=True)]
        return [value for part in present for value in part] + [fill] * padding

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
        origins=[sample.origin for sample in samples],
        **{name: joined(name) for name in STREAM_FILL},
        **{name: top(name) for name in TOP},
    )
    check_aligned(row)
    return row


def check_aligned(row: MicroBatch) -> None:
    """Every per-token array is as long as `input_ids`; a misaligned one would corrupt training silently."""
    for name in PER_TOKEN:
        values = getattr(row, name)
        if values is not None and len(values) != len(row.input_ids):
            raise ValueError(f"packed row: {name} has {len(values)} values for {len(row.input_ids)} input_ids")
