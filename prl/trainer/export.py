"""Token export: every sequence of a step with its shipped values, the policy's logprobs and the loss's treatment.

The file of a step and rank is `tokens/step_000001/rank_0.jsonl`: one line per sequence, in shipping order. A number
that JSON does not have (NaN, an infinity) is null. Beside `step`, `rank`, `env`, and the `task`, `group`, `rollout` and
`agent` of the rollout's record (null where the sender gave none), a line has lists `[tokens]`:

- `text`: what each token stands for, by the tokenizer alone; null without one.
- `token_ids`, `mask`, `temperature`, `inference_logprobs`, and the streams by name, null where the packed row has none;
  `ref_logprobs` as the trainer filled them where it did.
- `trainer_logprobs`: null where the loss needs none, and on a sequence's first token, which has none.
- `ratio`: exp(trainer - sampler) on members of components that read the sampler (rl, ref_kl), null elsewhere.
- `pictures`, of a sequence that has any: the place of its first placeholder token, their number and its digest of each.
- `use`: why the token was trained or not. "context": it is off the mask. "weight 0": it is on the mask without a
  weight. Else the components it is in ("rl kept", "rl dropped", "rl clipped", "ce", ...), joined by "+", with "invalid
  logprob" where rl or ref_kl leave it out for that.
"""

import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from prl.base.files import step_name, write_atomically
from prl.losses import TokenTreatment
from prl.rollouts.components import STREAM_FILL
from prl.rollouts.inputs import pictures_in
from prl.rollouts.messages import MicroBatch, Origin, StepBatch, sequence_slices
from prl.trainer.batch import Stack

EXAMPLES, EXAMPLE_TOKENS = 32, 16_384
"""Sequences of a rank, and their tokens, that a step of examples has at most."""


class TokenExport:
    """Collects the tokens of each forward of a step, then writes the step. One per rank.

    Args:
        run_dir: the run directory.
        rank: the trainer's rank, in the names of the files.
        examples: steps of which only the groups that started first are written; None = all of every step.
        decode: gives the text of one token; None = the export has no texts.
    """

    def __init__(
        self,
        run_dir: Path,
        rank: int,
        examples: Collection[int] | None = None,
        decode: Callable[[int], str] | None = None,
    ):
        self.run_dir = run_dir
        self.rank = rank
        self.examples = examples
        self.decode = None if decode is None else functools.cache(decode)
        self._treated: dict[tuple[int, int], list[list]] = {}
        """Logprobs of the policy, ratios and labels of the loss ("" for none) of each sequence, by `Stack.origins`."""
        self._filled: dict[tuple[int, int], list[float]] = {}
        """Logprobs of the reference of each sequence whose reference is in the trainer, by `Stack.origins`."""

    def wants(self, step: int) -> bool:
        """Return whether the step is written, all of it or examples."""
        return self.examples is None or step in self.examples

    def add(self, stack: Stack, logprobs: torch.Tensor, treatment: TokenTreatment) -> None:
        """Note the sequences of a stack after the loss; `logprobs` are the policy's, `[flat tokens]`."""
        known = stack.wanted & (stack.before >= 0)
        ratio = (logprobs.double() - stack.logprobs.double()).exp()
        columns: tuple[list, list, list] = (
            _where(known, logprobs),
            _where(treatment.sampled, ratio),
            _labels(treatment),
        )
        parts = sequence_slices(stack.sequence_lengths)
        for origin, part, reference in zip(stack.origins, parts, stack.references, strict=True):
            self._treated[origin] = [column[part] for column in columns]
            if reference.model:
                self._filled[origin] = stack.streams["ref_logprobs"][part].tolist()

    def write(self, batch: StepBatch) -> None:
        """Write the step's file and forget the step."""
        write_atomically(
            self.run_dir / "tokens" / step_name(batch.step) / f"rank_{self.rank}.jsonl",
            msgspec.json.Encoder().encode_lines(self._lines(batch)),
        )
        self._treated, self._filled = {}, {}

    def _lines(self, batch: StepBatch) -> Iterator[dict[str, Any]]:
        chosen = None if self.examples is None else first_groups(batch.micro_batches)
        for number, row in enumerate(batch.micro_batches):
            for place, part in enumerate(sequence_slices(row.sequence_lengths)):
                if chosen is None or (number, place) in chosen:
                    yield {"step": batch.step, "rank": self.rank} | self._line(row, part, number, place)

    def _line(self, row: MicroBatch, part: slice, number: int, place: int) -> dict[str, Any]:
        """The line of one sequence: the `place` in row `number` of the batch, `part` of the row's tokens."""
        token_ids, mask = row.input_ids[part], row.mask[part]
        origin = row.origins[place] if row.origins else None
        streams = {name: getattr(row, name) for name in STREAM_FILL}
        shipped = {name: None if stream is None else stream[part] for name, stream in streams.items()}
        if (number, place) in self._filled:
            shipped["ref_logprobs"] = self._filled[number, place]
        # A sequence without anything to train may have been left out of the forward.
        nothing: list[list] = [[None] * len(mask), [None] * len(mask), [""] * len(mask)]
        logprobs, ratio, labels = self._treated.get((number, place), nothing)
        untrained = ["weight 0" if on else "context" for on in mask]
        own = pictures_in(row.pictures, part)
        pictures = [(picture.start - part.start, picture.length, picture.digest) for picture in own]
        return {
            "env": row.env_names[place],
            **{name: getattr(origin, name, None) for name in Origin.__struct_fields__},
            "text": None if self.decode is None else [self.decode(token) for token in token_ids],
            "token_ids": token_ids,
            "mask": mask,
            "temperature": row.temperatures[part],
            "inference_logprobs": row.logprobs[part],
            **shipped,
            **({"pictures": pictures} if pictures else {}),
            "trainer_logprobs": logprobs,
            "ratio": ratio,
            "use": [label or reason for label, reason in zip(labels, untrained, strict=True)],
        }


def first_groups(rows: Sequence[MicroBatch]) -> set[tuple[int, int]]:
    """Choose EXAMPLES sequences, EXAMPLE_TOKENS tokens in all, of the groups that began first, by row and place."""
    places = [
        (origin.group, origin.rollout, number, place)
        for number, row in enumerate(rows)
        for place, origin in enumerate(row.origins)
        if origin is not None
    ]
    # By group: one reads the rollouts of a task beside each other.
    places.sort()
    tokens = itertools.accumulate(rows[number].sequence_lengths[place] for _, _, number, place in places)
    return {
        (number, place)
        for (_, _, number, place), total in zip(places[:EXAMPLES], tokens, strict=False)
        if total <= EXAMPLE_TOKENS
    }


def example_steps(count: int, max_steps: int) -> set[int]:
    """Choose `count` steps of a run, spread evenly from the first to the last."""
    if count < 2:
        return {1} if count else set()
    return {round(1 + place * (max_steps - 1) / (count - 1)) for place in range(count)}


def _where(members: torch.Tensor, values: torch.Tensor) -> list[float | None]:
    return [value if member else None for member, value in zip(members.tolist(), values.tolist(), strict=True)]


def _labels(treatment: TokenTreatment) -> list[str]:
    """Join the labels of each token by "+"; "" for a token without one."""
    rows = zip(*(tokens.tolist() for tokens in treatment.labels.values()), strict=True)
    return ["+".join(itertools.compress(treatment.labels, row)) for row in rows]
