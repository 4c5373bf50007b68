"""Samples into rows, rows onto ranks."""

import bisect

from prl.wire import STREAM_FILL, MicroBatch, TrainingSample

PER_TOKEN = ("mask", "logprobs", "temperatures", "position_ids", *STREAM_FILL)


def pack(samples: list[TrainingSample], seq_len: int, ranks: int) -> tuple[list[list[MicroBatch]], int]:
    """Pack samples, best fit first, into rows of `seq_len` tokens, dealt evenly to `ranks`.

    Every rank gets the same number of rows; where that does not come out, dummies without a single member token fill
    up. Samples of any algorithm share a row. Returns the rows of each rank, and how many samples were cut to `seq_len`.

    Raises ValueError for a sample whose streams do not fit its tokens or the components it feeds, naming its env.
    """
    for sample in samples:
        check_streams(sample)
        check_complete(sample)
    truncated = sum(len(sample.token_ids) > seq_len for sample in samples)
    rows = [pack_row(row, seq_len) for row in fit([truncate(sample, seq_len) for sample in samples], seq_len)]
    return deal(rows, seq_len, ranks), truncated


def check_streams(sample: TrainingSample) -> None:
    """Raise ValueError unless every stream that is there is as many numbers as there are tokens.

    Looks at the whole sample, alone: truncation and neighbours must not hide a producer's mistake.
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
        setattr(sample, name, numbers)  # plain floats, whatever an algorithm wrote


def check_complete(sample: TrainingSample) -> None:
    """Raise ValueError where a component that the sample feeds lacks what it reads. As `check_streams`, before all else."""
    weights = [1.0] * len(sample.mask) if sample.rl_weights is None else sample.rl_weights
    if sample.advantages is None and any(m and w != 0 for m, w in zip(sample.mask, weights, strict=True)):
        raise ValueError(
            f"env {sample.env_name!r}: a sample feeds the rl loss but has no advantages; "
            "its algorithm must call rollout.assign_advantages"
        )
    if sample.ref_logprobs is None and any(sample.ref_kl_weights or ()):
        raise ValueError(
            f"env {sample.env_name!r}: a sample feeds the ref_kl loss but has no ref_logprobs; its algorithm must score a "
            "reference model, as opd and opsd do"
        )


def truncate(sample: TrainingSample, seq_len: int) -> TrainingSample:
    if len(sample.token_ids) <= seq_len:
        return sample
    fields = {name: getattr(sample, name) for name in sample.__struct_fields__}
    return TrainingSample(**{k: v[:seq_len] if isinstance(v, list) else v for k, v in fields.items()})


def fit(samples: list[TrainingSample], seq_len: int) -> list[list[TrainingSample]]:
    """Best-fit decreasing: the longest first, each into the fullest row that still has room for it."""
    rows: list[list[TrainingSample]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for sample in sorted(samples, key=lambda s: len(s.token_ids), reverse=True):
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


def pack_row(samples: list[TrainingSample], seq_len: int) -> MicroBatch:
    """One row: the samples one after the other, then padding, in which every stream is 0.0."""
    lengths = [len(sample.token_ids) for sample in samples]
    padding = seq_len - sum(lengths)

    def joined(name: str, fill) -> list:
        return [value for sample in samples for value in getattr(sample, name)] + [fill] * padding

    def stream(name: str) -> list[float] | None:
        if all(getattr(sample, name) is None for sample in samples):
            return None
        values: list[float] = []
        for sample in samples:
            own = getattr(sample, name)
            values += own if own is not None else [STREAM_FILL[name]] * len(sample.token_ids)
        return values + [0.0] * padding

    row = MicroBatch(
        input_ids=joined("token_ids", 0),
        mask=joined("mask", False),
        logprobs=joined("logprobs", 0.0),
        temperatures=joined("temperatures", 1.0),  # a divisor: 0.0 would make padding's logits infinite
        position_ids=[position for length in lengths for position in range(length)] + [0] * padding,
        sequence_lengths=lengths,
        env_names=[sample.env_name for sample in samples],
        **{name: stream(name) for name in STREAM_FILL},
    )
    check_aligned(row)
    return row


def check_aligned(row: MicroBatch) -> None:
    """Every per-token array is as long as `input_ids`; a misaligned one would corrupt training silently."""
    for name in PER_TOKEN:
        values = getattr(row, name)
        if values is not None and len(values) != len(row.input_ids):
            raise ValueError(f"packed row: {name} has {len(values)} values for {len(row.input_ids)} input_ids")


def deal(rows: list[MicroBatch], seq_len: int, ranks: int) -> list[list[MicroBatch]]:
    """The fullest rows first, each to the rank with the fewest tokens among those with room."""
    per_rank = max(1, -(-len(rows) // ranks))
    dealt: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for row in sorted(rows, key=lambda row: sum(row.sequence_lengths), reverse=True):
        rank = min((r for r in range(ranks) if len(dealt[r]) < per_rank), key=tokens.__getitem__)
        dealt[rank].append(row)
        tokens[rank] += sum(row.sequence_lengths)
    for rank_rows in dealt:
        rank_rows += [pack_row([], seq_len)] * (per_rank - len(rank_rows))
    return dealt
