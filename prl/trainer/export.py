"""Every sequence of a step, token by token: what was shipped, what the policy says, and what the loss did with it.

The file of a step and rank is `tokens/step_000001/rank_0.jsonl`: a line a sequence, in the order they were shipped in.
"""

from pathlib import Path

import msgspec
import torch

from prl.trainer.batch import Stack
from prl.trainer.loss import TokenFates
from prl.wire import STREAM_FILL, StepBatch, files


class TokenLine(msgspec.Struct, kw_only=True):
    """One sequence; every list is `[tokens]`. A stream that its packed row lacks is null, and so is a number that JSON
    does not have (NaN, an infinity)."""

    step: int
    rank: int
    env: str
    token_ids: list[int]
    mask: list[bool]
    temperature: list[float | None]
    inference_logprobs: list[float | None]
    trainer_logprobs: list[float | None]
    """Null where the loss needs none, and on a sequence's first token, which has none."""
    ratio: list[float | None]
    """exp(trainer - inference) on members of rl and ref_kl, null elsewhere."""
    fate: list[str]
    """Why the token was trained or not: "context" (off the mask), "weight 0" (on it), or, joined by "+", the components
    it is in ("rl kept", "rl dropped", "rl clipped", "ce", …) and "invalid logprob" (kept out of rl or ref_kl)."""
    advantages: list[float | None] | None
    ref_logprobs: list[float | None] | None
    rl_weights: list[float | None] | None
    ce_weights: list[float | None] | None
    ref_kl_weights: list[float | None] | None


class TokenExport:
    """Collects what each forward of a step finds, then writes the step. One per rank."""

    def __init__(self, run_dir: Path, rank: int):
        self.run_dir = run_dir
        self.rank = rank
        self._found: dict[tuple[int, int], list[tuple]] = {}  # by origin: (logprob, ratio, fate) of each token

    def add(self, stack: Stack, logprobs: torch.Tensor, fates: TokenFates) -> None:
        """Take over the sequences of a stack that the loss has seen; `logprobs` are the policy's, `[flat tokens]`."""
        known = (stack.wanted & (stack.position_ids > 0)).flatten()[stack.flat]
        sampled = torch.zeros_like(known)
        for name in ("rl", "ref_kl"):
            if name in fates.members:
                sampled |= fates.members[name]
        ratio = (logprobs.double() - stack.logprobs.double()).exp()
        tokens = list(zip(_where(known, logprobs), _where(sampled, ratio), _labels(fates), strict=True))
        start = 0
        for origin, length in zip(stack.origins, stack.sequence_lengths, strict=True):
            self._found[origin] = tokens[start : start + length]
            start += length

    def write(self, batch: StepBatch) -> None:
        """Write the step's file, and be ready for the next step."""
        data = msgspec.json.Encoder().encode_lines(self._lines(batch))
        self._found = {}
        files.write_atomically(self.run_dir / "tokens" / files.step_name(batch.step) / f"rank_{self.rank}.jsonl", data)

    def _lines(self, batch: StepBatch) -> list[TokenLine]:
        lines = []
        for number, row in enumerate(batch.micro_batches):
            start = 0
            for place, (env, length) in enumerate(zip(row.env_names, row.sequence_lengths, strict=True)):
                part = slice(start, start + length)
                start += length
                mask = row.mask[part]
                # A sequence without anything to train may have been left out of the forward.
                found = self._found.get((number, place)) or [(None, None, "")] * length
                lines.append(
                    TokenLine(
                        step=batch.step,
                        rank=self.rank,
                        env=env,
                        token_ids=row.input_ids[part],
                        mask=mask,
                        temperature=row.temperatures[part],
                        inference_logprobs=row.logprobs[part],
                        trainer_logprobs=[logprob for logprob, _, _ in found],
                        ratio=[ratio for _, ratio, _ in found],
                        fate=[
                            label or ("weight 0" if on else "context")
                            for (_, _, label), on in zip(found, mask, strict=True)
                        ],
                        **{name: None if (s := getattr(row, name)) is None else s[part] for name in STREAM_FILL},
                    )
                )
        return lines


def _where(members: torch.Tensor, values: torch.Tensor) -> list[float | None]:
    return [value if member else None for member, value in zip(members.tolist(), values.tolist(), strict=True)]


def _labels(fates: TokenFates) -> list[str]:
    """What the loss did with each token, "" where it did nothing."""
    where: dict[str, torch.Tensor] = {}
    for name, members in fates.members.items():
        excluded = fates.excluded[name]
        for why, tokens in (excluded or {}).items():
            where[f"{name} {why}"] = members & tokens
            members = members & ~tokens
        where[name if excluded is None else f"{name} kept"] = members
    where["invalid logprob"] = fates.invalid
    names = list(where)
    # One number a token, bit by bit, so that only one list crosses from the device.
    codes = sum(tokens.long() << bit for bit, tokens in enumerate(where.values())).tolist()
    labels = {code: "+".join(name for bit, name in enumerate(names) if code >> bit & 1) for code in set(codes)}
    return [labels[code] for code in codes]
