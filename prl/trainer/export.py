"""Token export: every sequence of a step with its shipped values, the policy's logprobs and the loss's treatment.

The file of a step and rank is `tokens/step_000001/rank_0.jsonl`: one line per sequence, in shipping order.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch

from prl.trainer.batch import Stack
from prl.trainer.loss import TokenFates
from prl.wire.files import step_name, write_atomically
from prl.wire.messages import STREAM_FILL, MicroBatch, StepBatch

if TYPE_CHECKING:

    class ExportedStreams(msgspec.Struct, kw_only=True):
        """The streams of the components that the project ships, for the type checker."""

        advantages: list[float | None] | None
        ref_logprobs: list[float | None] | None
        rl_weights: list[float | None] | None
        ce_weights: list[float | None] | None
        ref_kl_weights: list[float | None] | None

else:
    ExportedStreams = msgspec.defstruct(
        "ExportedStreams",
        [(name, list[float | None] | None) for name in STREAM_FILL],
        kw_only=True,
        module=__name__,
    )


class TokenLine(ExportedStreams, kw_only=True):
    """One sequence. Every list is `[tokens]`; the streams are the keys of `STREAM_FILL`.

    A stream that its packed row lacks is null, and so is a number that JSON does not have (NaN, an infinity).
    """

    step: int
    rank: int
    env: str
    token_ids: list[int]
    mask: list[bool]
    temperature: Sequence[float | None]
    inference_logprobs: Sequence[float | None]
    trainer_logprobs: list[float | None]
    """Null where the loss needs none, and on a sequence's first token, which has none."""
    ratio: list[float | None]
    """exp(trainer - inference) on members of components that read the sampler (rl, ref_kl), null elsewhere."""
    fate: list[str]
    """Why the token was trained or not: "context" (off the mask), "weight 0" (on it), or, joined by "+", the components
    it is in ("rl kept", "rl dropped", "rl clipped", "ce", ...) and "invalid logprob" (kept out of rl or ref_kl)."""


class _Found(NamedTuple):
    """One token after the loss: the policy's logprob, the ratio, and the labels of the loss ("" for none)."""

    logprob: float | None = None
    ratio: float | None = None
    label: str = ""


class TokenExport:
    """Collects the tokens of each forward of a step, then writes the step. One per rank."""

    def __init__(self, run_dir: Path, rank: int):
        self.run_dir = run_dir
        self.rank = rank
        self._found: dict[tuple[int, int], list[_Found]] = {}  # by `Stack.origins`

    def add(self, stack: Stack, logprobs: torch.Tensor, fates: TokenFates) -> None:
        """Take over the sequences of a stack after the loss; `logprobs` are the policy's, `[flat tokens]`."""
        if fates.sampled is None:
            raise ValueError("compute_loss has not filled in these fates")
        known = (stack.wanted & (stack.position_ids > 0)).flatten()[stack.flat]
        ratio = (logprobs.double() - stack.logprobs.double()).exp()
        columns = (_where(known, logprobs), _where(fates.sampled, ratio), _labels(fates))
        tokens = [_Found(*values) for values in zip(*columns, strict=True)]
        start = 0
        for origin, length in zip(stack.origins, stack.sequence_lengths, strict=True):
            self._found[origin] = tokens[start : start + length]
            start += length

    def write(self, batch: StepBatch) -> None:
        """Write the step's file and forget the step."""
        data = msgspec.json.Encoder().encode_lines(self._lines(batch))
        self._found = {}
        write_atomically(self.run_dir / "tokens" / step_name(batch.step) / f"rank_{self.rank}.jsonl", data)

    def _lines(self, batch: StepBatch) -> list[TokenLine]:
        lines = []
        for number, row in enumerate(batch.micro_batches):
            start = 0
            for place, length in enumerate(row.sequence_lengths):
                # A sequence without anything to train may have been left out of the forward.
                found = self._found.get((number, place)) or [_Found()] * length
                lines.append(self._line(batch.step, row, place, slice(start, start + length), found))
                start += length
        return lines

    def _line(self, step: int, row: MicroBatch, place: int, part: slice, found: list[_Found]) -> TokenLine:
        """The line of the sequence at `place` in its row, whose tokens are those of `part`."""
        mask = row.mask[part]
        return TokenLine(
            step=step,
            rank=self.rank,
            env=row.env_names[place],
            token_ids=row.input_ids[part],
            mask=mask,
            temperature=row.temperatures[part],
            inference_logprobs=row.logprobs[part],
            trainer_logprobs=[token.logprob for token in found],
            ratio=[token.ratio for token in found],
            fate=[token.label or ("weight 0" if on else "context") for token, on in zip(found, mask, strict=True)],
            **{name: None if (s := getattr(row, name)) is None else s[part] for name in STREAM_FILL},
        )


def _where(members: torch.Tensor, values: torch.Tensor) -> list[float | None]:
    return [value if member else None for member, value in zip(members.tolist(), values.tolist(), strict=True)]


def _labels(fates: TokenFates) -> list[str]:
    """The labels of each token, joined by "+"; "" for a token without one."""
    names = list(fates.labels)
    # One number per token, one bit per label, so that only one list crosses from the device.
    codes = torch.stack([tokens.long() << bit for bit, tokens in enumerate(fates.labels.values())]).sum(0).tolist()
    text = {code: "+".join(name for bit, name in enumerate(names) if code >> bit & 1) for code in set(codes)}
    return [text[code] for code in codes]
