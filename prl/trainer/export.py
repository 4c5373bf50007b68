"""Token export: every sequence of a step with its shipped values, the policy's logprobs and the loss's treatment.

The file of a step and rank is `tokens/step_000001/rank_0.jsonl`: one line per sequence, in shipping order. A number
that JSON does not have (NaN, an infinity) is null. Beside `step`, `rank` and `env`, a line has lists `[tokens]`:

- `token_ids`, `mask`, `temperature`, `inference_logprobs`, and the streams by name, null where the packed row has none;
  `ref_logprobs` as the trainer filled them where it did.
- `trainer_logprobs`: null where the loss needs none, and on a sequence's first token, which has none.
- `ratio`: exp(trainer - inference) on members of components that read the sampler (rl, ref_kl), null elsewhere.
- `fate`: why the token was trained or not: "context" (off the mask), "weight 0" (on it), or, joined by "+", the
  components it is in ("rl kept", "rl dropped", "rl clipped", "ce", ...) and "invalid logprob" (kept out of rl or
  ref_kl).
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from prl.trainer.batch import Stack
from prl.trainer.loss import TokenFates
from prl.wire.files import step_name, write_atomically
from prl.wire.messages import STREAM_FILL, StepBatch, sequence_slices


class TokenExport:
    """Collects the tokens of each forward of a step, then writes the step. One per rank."""

    def __init__(self, run_dir: Path, rank: int):
        self.run_dir = run_dir
        self.rank = rank
        self._found: dict[tuple[int, int], list[list]] = {}
        """By `Stack.origins`: the policy's logprobs, the ratios and the labels of the loss ("" for none)."""
        self._filled: dict[tuple[int, int], list[float]] = {}
        """By `Stack.origins`: the reference's logprobs, where the trainer filled them."""

    def add(self, stack: Stack, logprobs: torch.Tensor, fates: TokenFates) -> None:
        """Take over the sequences of a stack after the loss; `logprobs` are the policy's, `[flat tokens]`."""
        known = (stack.wanted & (stack.position_ids > 0)).flatten()[stack.flat]
        ratio = (logprobs.double() - stack.logprobs.double()).exp()
        columns: tuple[list, list, list] = (_where(known, logprobs), _where(fates.sampled, ratio), _labels(fates))
        for origin, part in zip(stack.origins, sequence_slices(stack.sequence_lengths), strict=True):
            self._found[origin] = [column[part] for column in columns]
            if stack.initial[part].any():
                self._filled[origin] = stack.streams["ref_logprobs"][part].tolist()

    def write(self, batch: StepBatch) -> None:
        """Write the step's file and forget the step."""
        write_atomically(
            self.run_dir / "tokens" / step_name(batch.step) / f"rank_{self.rank}.jsonl",
            msgspec.json.Encoder().encode_lines(self._lines(batch)),
        )
        self._found, self._filled = {}, {}

    def _lines(self, batch: StepBatch) -> Iterator[dict[str, Any]]:
        for number, row in enumerate(batch.micro_batches):
            for place, part in enumerate(sequence_slices(row.sequence_lengths)):
                mask = row.mask[part]
                untrained = ["weight 0" if on else "context" for on in mask]
                # A sequence without anything to train may have been left out of the forward.
                nothing: list[list] = [[None] * len(mask), [None] * len(mask), untrained]
                logprobs, ratio, labels = self._found.get((number, place), nothing)
                yield {
                    **{name: None if (s := getattr(row, name)) is None else s[part] for name in STREAM_FILL},
                    **({"ref_logprobs": filled} if (filled := self._filled.get((number, place))) else {}),
                    "step": batch.step,
                    "rank": self.rank,
                    "env": row.env_names[place],
                    "token_ids": row.input_ids[part],
                    "mask": mask,
                    "temperature": row.temperatures[part],
                    "inference_logprobs": row.logprobs[part],
                    "trainer_logprobs": logprobs,
                    "ratio": ratio,
                    "fate": [label or reason for label, reason in zip(labels, untrained, strict=True)],
                }


def _where(members: torch.Tensor, values: torch.Tensor) -> list[float | None]:
    return [value if member else None for member, value in zip(members.tolist(), values.tolist(), strict=True)]


def _labels(fates: TokenFates) -> list[str]:
    """The labels of each token, joined by "+"; "" for a token without one."""
    rows = zip(*(tokens.tolist() for tokens in fates.labels.values()), strict=True)
    return ["+".join(itertools.compress(fates.labels, row)) for row in rows]
