"""The three-component loss of one packed micro-batch: L = sum L_rl / N_rl + sum L_ce / N_ce + sum L_ref_kl / N_ref_kl.

Each N counts a component's member tokens over the whole step (all micro-batches, all ranks), so components do not
dilute each other and splitting the step into micro-batches changes nothing. The trainer sums `count_members` over its
micro-batches, all-reduces that one tensor, and passes `LossCounts.from_tensor` of it to every `compute_loss`.

Left out: averaging over ranks. Where the wrapper averages gradients (FSDP does), multiply the loss by the world size.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from prl.trainer.loss.ce import ce_loss
from prl.trainer.loss.ref_kl import ref_kl_loss
from prl.trainer.loss.rl import default_loss
from prl.trainer.loss.types import LossInputs, LossOutputs, mismatch_kl, select, usable

LossFunction = Callable[[LossInputs], LossOutputs]
Metrics = dict[str, tuple[Tensor, int | Tensor]]


@dataclass(frozen=True)
class LossCounts:
    """Member tokens of the whole step, each at least 1; `invalid`: those an unusable sampler logprob kept out."""

    rl: int = 1
    ce: int = 1
    ref_kl: int = 1
    invalid: int = 0

    @classmethod
    def from_tensor(cls, counts: Tensor) -> "LossCounts":
        """From `count_members`, summed and all-reduced: `[4]`."""
        rl, ce, ref_kl, invalid = (int(n) for n in counts.tolist())
        return cls(rl=max(rl, 1), ce=max(ce, 1), ref_kl=max(ref_kl, 1), invalid=invalid)


@dataclass
class TokenFates:
    """What the loss did with each token of a micro-batch, for `compute_loss` to fill in. Bool tensors, `[tokens]`."""

    members: dict[str, Tensor] = field(default_factory=dict)
    """By component; one without members is left out."""
    excluded: dict[str, dict[str, Tensor] | None] = field(default_factory=dict)
    """By component: `TokenTerms.excluded`, of which only members count. None for a custom per-sequence loss."""
    invalid: Tensor | None = None
    """Tokens that only an unusable sampler logprob keeps out of `rl` or `ref_kl`."""


def count_members(
    *,
    inference_logprobs: Tensor,
    loss_mask: Tensor,
    rl_weights: Tensor | None = None,
    ce_weights: Tensor | None = None,
    ref_kl_weights: Tensor | None = None,
    sequence_lengths: Sequence[int] | None = None,
) -> Tensor:
    """Counts of one micro-batch: int64 `[4]`, (rl, ce, ref_kl, invalid). Streams are `[tokens]`, as in `compute_loss`.

    Padding carries mask 0 and weights 0.0 and so counts nothing; `sequence_lengths` cuts it off in any case.
    """
    tokens = len(loss_mask) if sequence_lengths is None else sum(sequence_lengths)
    streams = (inference_logprobs, loss_mask, rl_weights, ce_weights, ref_kl_weights)
    rl, ce, ref_kl, invalid = _members(*(None if s is None else s[:tokens] for s in streams))
    return torch.stack([rl.sum(), ce.sum(), ref_kl.sum(), invalid.sum()])


def compute_loss(
    *,
    trainer_logprobs: Tensor,
    inference_logprobs: Tensor,
    loss_mask: Tensor,
    advantages: Tensor | None,
    ref_logprobs: Tensor | None,
    rl_weights: Tensor | None,
    ce_weights: Tensor | None,
    ref_kl_weights: Tensor | None,
    sequence_lengths: Sequence[int],
    counts: LossCounts,
    rl_loss: LossFunction = default_loss,
    ref_kl_loss: LossFunction = ref_kl_loss,
    fates: TokenFates | None = None,
) -> tuple[Tensor, Metrics]:
    """Loss and metrics of one packed micro-batch; every stream is `[tokens]`, an absent one None.

    The first sum(sequence_lengths) tokens are the sequences, the rest is padding and never looked at. Members: `rl`,
    loss mask and weight != 0 (an absent stream is 1.0); `ce` and `ref_kl`, weight != 0. A token whose sampler logprob
    is non-finite or the sentinel is no member of `rl` and `ref_kl`; `ce` does not read sampler logprobs.

    A custom `rl_loss` gets one sequence at a time, only sequences with members, and every stream 0.0 off its mask, so
    that exponentiating before masking is harmless there.

    Returns the scalar loss, always attached to the graph (zero without members), and metrics as (sum, count), to be
    added up over micro-batches and ranks before dividing. A component without members leaves its keys out, and a count
    can be 0 (no sequence had a dropped token). Per sequence: those of the losses. Per token: `loss/rl`, `loss/ce`,
    `loss/ref_kl` (whose step mean is that term of L), and over rl and ref_kl members `mismatch_kl` (mean
    rho - (t - i) - 1) and `logprob_gap` (mean |t - i|). `fates`, where given, is filled with what became of each token;
    these tensors exist in any case.

    Raises `ValueError` for missing advantages or `ref_logprobs`, for streams that do not align, and, naming the
    function, for a custom loss that is not an attached scalar; `TypeError` where it returns no `LossOutputs`.
    """
    tokens = sum(sequence_lengths)
    if tokens > len(trainer_logprobs):
        raise ValueError(f"sequence_lengths sum to {tokens}, but there are only {len(trainer_logprobs)} tokens")
    whole = LossInputs(trainer_logprobs, inference_logprobs, ref_logprobs, advantages, loss_mask)  # checks alignment
    weights = {"rl_weights": rl_weights, "ce_weights": ce_weights, "ref_kl_weights": ref_kl_weights}
    for name, stream in weights.items():
        if stream is not None and stream.shape != trainer_logprobs.shape:
            raise ValueError(f"{name} has shape {list(stream.shape)}, trainer_logprobs {list(trainer_logprobs.shape)}")
    streams = (inference_logprobs, loss_mask, *weights.values())
    rl, ce, ref_kl, invalid = _members(*(None if s is None else s[:tokens] for s in streams))
    if fates is not None:
        fates.invalid = invalid
    present = torch.stack([rl.sum(), ce.sum(), ref_kl.sum(), (rl | ref_kl).sum()]).tolist()  # the one device sync
    _require(present[0], advantages, present[2], ref_logprobs)

    # All masked away: no gradient, no NaN whatever the logprobs hold, yet backward has a graph to run through.
    loss = select(torch.zeros_like(loss_mask, dtype=torch.bool), trainer_logprobs).sum()
    metrics: Metrics = {}
    segments = _segments(sequence_lengths, trainer_logprobs.device)
    components = (
        ("rl", rl_loss, rl, rl_weights, present[0], counts.rl),
        ("ce", ce_loss, ce, ce_weights, present[1], counts.ce),
        ("ref_kl", ref_kl_loss, ref_kl, ref_kl_weights, present[2], counts.ref_kl),
    )
    for name, fn, members, stream, here, total in components:
        if not here:
            continue
        inputs = _component_inputs(whole, members, stream)
        terms = _terms_function(fn)
        if terms is not None:
            component, extra, excluded = _run_tokenwise(terms, inputs, segments, len(sequence_lengths))
        else:
            component, extra = _run_per_sequence(fn, inputs, sequence_lengths)
            excluded = None
        if fates is not None:
            fates.members[name], fates.excluded[name] = members, excluded
        loss = loss + component / total
        metrics[f"loss/{name}"] = (component.detach().double(), here)
        for key, value in extra.items():
            # A custom loss may use a name we use too; its own metric then gets a prefix instead of being mixed in.
            taken = name == "rl" and (key in RESERVED or key.startswith("ref_kl/"))
            metrics[f"rl/{key}" if taken else key] = value
    if present[3]:
        sampled = rl | ref_kl
        with torch.no_grad():
            gap = select(sampled, trainer_logprobs[:tokens]) - select(sampled, inference_logprobs[:tokens])
            metrics["mismatch_kl"] = (mismatch_kl(gap).sum(), present[3])
            metrics["logprob_gap"] = (gap.abs().double().sum(), present[3])
    return loss, metrics


RESERVED = {"mismatch_kl", "logprob_gap", "nll", "ref_kl", "loss/rl", "loss/ce", "loss/ref_kl"}


def _members(
    inference_logprobs: Tensor,
    loss_mask: Tensor,
    rl_weights: Tensor | None,
    ce_weights: Tensor | None,
    ref_kl_weights: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Bool `[tokens]` each: members of rl, ce, ref_kl, and the tokens only an unusable sampler logprob keeps out."""
    ok = usable(inference_logprobs)
    nobody = torch.zeros_like(ok)
    rl = loss_mask.bool() if rl_weights is None else loss_mask.bool() & (rl_weights != 0)
    ce = nobody if ce_weights is None else ce_weights != 0
    ref_kl = nobody if ref_kl_weights is None else ref_kl_weights != 0
    return rl & ok, ce, ref_kl & ok, (rl | ref_kl) & ~ok


def _require(rl: int, advantages: Tensor | None, ref_kl: int, ref_logprobs: Tensor | None) -> None:
    if rl and advantages is None:
        raise ValueError(
            f"{rl} tokens feed the rl loss, but the micro-batch has no advantages: its algorithm must assign "
            "them (rollout.assign_advantages), or not declare rl as its action_loss_type"
        )
    if ref_kl and ref_logprobs is None:
        raise ValueError(
            f"{ref_kl} tokens feed the ref_kl loss, but the micro-batch has no ref_logprobs: only algorithms that "
            "score a reference model (opd, opsd) may put tokens in ref_kl"
        )


def _component_inputs(whole: LossInputs, members: Tensor, weights: Tensor | None) -> LossInputs:
    """The row without padding as one component sees it: its members as the mask, and 0.0 everywhere else."""

    def clean(stream: Tensor | None) -> Tensor | None:
        return None if stream is None else select(members, stream[: len(members)])

    return LossInputs(
        trainer_logprobs=clean(whole.trainer_logprobs),
        inference_logprobs=clean(whole.inference_logprobs),
        ref_logprobs=clean(whole.ref_logprobs),
        advantages=clean(whole.advantages),
        loss_mask=members,
        loss_weights=clean(weights),
    )


def _segments(sequence_lengths: Sequence[int], device: torch.device) -> Tensor:
    """`[tokens]` int64: which sequence each token belongs to."""
    lengths = torch.tensor(sequence_lengths, dtype=torch.int64)
    return torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(device)


def _terms_function(fn: LossFunction) -> Callable | None:
    """The token-by-token form of a `@tokenwise` loss, with the knobs of a partial applied; None for any other loss."""
    knobs = {}
    if isinstance(fn, functools.partial) and not fn.args:
        fn, knobs = fn.func, fn.keywords
    terms = getattr(fn, "terms", None)
    return None if terms is None else functools.partial(terms, **knobs)


def _run_tokenwise(
    terms: Callable, inputs: LossInputs, segments: Tensor, sequences: int
) -> tuple[Tensor, Metrics, dict[str, Tensor] | None]:
    """The whole row at once. A metric is averaged inside each sequence that has tokens for it, then summed."""
    out = terms(inputs)
    with torch.no_grad():
        over = torch.stack([over for _, over in out.metrics.values()])  # [metrics, tokens]
        values = torch.stack([values.double() for values, _ in out.metrics.values()])
        rows = torch.zeros(2, len(over), sequences, dtype=torch.float64, device=segments.device)
        rows.index_add_(2, segments, torch.stack([torch.where(over, values, 0.0), over.double()]))
        sums, sizes = rows  # [metrics, sequences]
        means = (sums / sizes.clamp_min(1)).sum(1)
        having = (sizes > 0).sum(1)
    return out.loss.sum(), {name: (means[m], having[m]) for m, name in enumerate(out.metrics)}, out.excluded


def _run_per_sequence(fn: LossFunction, inputs: LossInputs, lengths: Sequence[int]) -> tuple[Tensor, Metrics]:
    """A custom loss, on each sequence that has members."""
    columns = {
        name: [None] * len(lengths) if stream is None else stream.split(list(lengths))
        for name, stream in vars(inputs).items()
    }
    total, metrics = None, {}
    for row in zip(*columns.values(), strict=True):
        sequence = LossInputs(**dict(zip(columns, row, strict=True)))
        if not sequence.loss_mask.any():
            continue
        out = _checked(fn, fn(sequence), attached=sequence.trainer_logprobs.requires_grad)
        total = out.loss if total is None else total + out.loss
        for name, value in out.metrics.items():
            value = torch.as_tensor(value).detach().double()
            if value.dim():
                raise ValueError(f"{_name(fn)} returned metric {name!r} of shape {list(value.shape)}, not a scalar")
            before, count = metrics.get(name, (0.0, 0))
            metrics[name] = (before + value, count + 1)
    return total, metrics


def _checked(fn: LossFunction, out: object, *, attached: bool) -> LossOutputs:
    if not isinstance(out, LossOutputs):
        raise TypeError(f"{_name(fn)} must return LossOutputs(loss, metrics), not {type(out).__name__}")
    if not isinstance(out.loss, Tensor):
        raise TypeError(f"{_name(fn)} must return a tensor as its loss, not {type(out.loss).__name__}")
    if out.loss.dim():
        raise ValueError(f"{_name(fn)} must return a scalar loss, a sum over the sequence, not {list(out.loss.shape)}")
    if attached and not out.loss.requires_grad:
        raise ValueError(f"{_name(fn)} returned a loss without gradient: compute it from inputs.trainer_logprobs")
    return out


def _name(fn: LossFunction) -> str:
    fn = fn.func if isinstance(fn, functools.partial) else fn
    target = fn if hasattr(fn, "__qualname__") else type(fn)
    return f"{target.__module__}.{target.__qualname__}"
