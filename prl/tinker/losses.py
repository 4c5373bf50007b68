"""The losses of the protocol by its names, over those of `prl.losses`, each summed over the tokens of a call.

Notation: t = the model's logprob of a target, i = `logprobs`, the sampler's, A = `advantages`, r = exp(t - i).
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Ge, Le
from torch import Tensor

from prl.base.errors import ConfigError
from prl.base.text import in_one_line
from prl.config.build import read
from prl.losses.ce import ce_loss
from prl.losses.compute import run_loss
from prl.losses.interface import LossInputs, Metrics, TokenTerms, add_metric
from prl.losses.options import PolicyOptions, tokenwise
from prl.losses.rl import aipo_loss, cispo_loss, gspo_loss, ppo_loss
from prl.rollouts.logprobs import SENTINEL_CEILING
from prl.tinker.graph import Traced
from prl.tinker.wire import Datum, RequestError

POLICY = ("logprobs", "advantages")
CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
"""Bounds of r, by the names of the protocol, with its defaults."""
NO_BOUND = 1e30


@dataclass(frozen=True)
class DROOptions(PolicyOptions):
    """Options of `dro_loss`."""

    beta: Annotated[float, Ge(0), Le(1e6)] = 0.05
    """Weight of the squared log ratio."""


@tokenwise(DROOptions)
def dro_loss(inputs: LossInputs, options: DROOptions) -> TokenTerms:
    """Direct reward optimisation as the protocol has it: -sum (t * A - beta / 2 * (t - i)^2)."""
    tokens = inputs.policy_tokens(options)
    loss = options.beta / 2 * tokens.log_ratio.square() - tokens.advantages * tokens.logprobs
    return tokens.terms(loss, metrics={"importance_ratio": (tokens.ratio, tokens.members)})


def _of_clips(low: str, high: str, *, about_one: bool) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return what makes options of a loss of prl out of the two bounds of the protocol."""

    def options(config: dict[str, Any]) -> dict[str, Any]:
        bounds = [config["clip_low_threshold"], config["clip_high_threshold"]]
        return {low: 1 - bounds[0], high: bounds[1] - 1} if about_one else dict(zip((low, high), bounds, strict=True))

    return options


@dataclass(frozen=True)
class Loss:
    """A loss of the protocol."""

    function: Any
    """That of prl."""
    needs: tuple[str, ...] = POLICY
    """Inputs of a datum beside its targets."""
    may: tuple[str, ...] = ()
    """Inputs that a datum may leave out."""
    config: tuple[tuple[str, float], ...] = ()
    """Settings that a call may have, with their defaults."""
    options: Callable[[dict[str, Any]], dict[str, Any]] = dict
    """Makes the options of `function` out of the settings."""
    dims: tuple[int, ...] = (1,)
    """Dimensions that targets may have."""

    def settings(self, name: str, config: Mapping[str, float | str]) -> dict[str, Any]:
        """Return the settings of a call. Raises RequestError for those that the loss does not have."""
        settings = dict(self.config)
        if unknown := config.keys() - settings.keys():
            takes = ", ".join(settings) or "no settings"
            raise RequestError(f"loss_fn_config.{min(unknown)[:80]}: {name} takes {takes}")
        for key, value in config.items():
            if isinstance(value, str):
                raise RequestError(f"loss_fn_config.{key}={value[:80]!r}: a number is wanted")
            settings[key] = value
        try:
            read(self.function.Config, self.options(settings), "loss_fn_config")
        except ConfigError as error:
            raise RequestError(f"{error} (loss_fn={name})") from None
        return settings

    def fault(self, datum: Datum) -> str | None:
        """Return what is wrong with the inputs of a datum, all of which it needs are there: the field, and how."""
        if unknown := datum.inputs.keys() - {"target_tokens", *self.needs, *self.may}:
            return f"{min(unknown)[:80]}: this loss takes {', '.join(('target_tokens', *self.needs, *self.may))}"
        shape = datum.inputs["target_tokens"].shape
        for key, values in datum.inputs.items():
            if values.shape != shape:
                return f"{key} has shape {list(values.shape)}, target_tokens {list(shape)}"
        return None

    def compute(self, settings: Mapping[str, Any], logprobs: Tensor, data: list[Datum]) -> tuple[Tensor, Metrics]:
        """Compute the loss of some data, summed over their tokens, and its metrics.

        Args:
            settings: those of the call.
            logprobs: t of each target, one datum after the other, with gradient.
            data: the data, which have the same inputs.
        """
        names = data[0].inputs.keys() - {"target_tokens"} if data else ()
        streams = {name: torch.from_numpy(flat(data, name)).float().to(logprobs.device) for name in names}
        mask = streams.get("sequence_ratio_mask")
        if mask is None and self.function is gspo_loss:
            mask = streams.get("advantages")
        inputs = LossInputs(
            trainer_logprobs=logprobs,
            inference_logprobs=streams.get("logprobs", torch.zeros_like(logprobs)),
            advantages=streams.get("advantages"),
            loss_mask=torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask != 0,
            loss_weights=streams.get("weights"),
        )
        if not inputs.loss_mask.any():
            return nothing(logprobs), {}
        bounds = {}
        if CLIPS.keys() & streams.keys():  # those of each token come before those of the call
            bounds = {key: streams.get(key, torch.full_like(logprobs, settings[key])) for key in CLIPS}
        function = functools.partial(self.function, **self.options({**settings, **bounds}))
        total, metrics, _ = run_loss(function, inputs, [datum.inputs["target_tokens"].size for datum in data])
        return total, metrics


@dataclass(frozen=True)
class TracedLoss(Loss):
    """A loss that a client has traced (`prl.tinker.graph`), of each datum by itself."""

    traced: Traced = field(kw_only=True)

    def settings(self, name: str, config: Mapping[str, float | str]) -> dict[str, Any]:
        return {}

    def fault(self, datum: Datum) -> str | None:
        for given in self.traced.inputs[1:]:
            if (dims := datum.inputs[given.name].ndim) != given.rank:
                return f"{given.name} has {dims} dimensions, and the loss was made for {given.rank}"
        return None

    def compute(self, settings: Mapping[str, Any], logprobs: Tensor, data: list[Datum]) -> tuple[Tensor, Metrics]:
        total, metrics = nothing(logprobs), dict[str, Any]()
        sizes = [datum.inputs["target_tokens"].size for datum in data]
        for datum, own in zip(data, logprobs.split(sizes), strict=True):
            inputs = [torch.tensor(datum.inputs[name], device=logprobs.device) for name in self.needs]
            # Its gradient is made here, since that may fail too: an operation may have written into its input.
            leaf = own.detach().clone().requires_grad_()
            loss, named = self.traced.run([leaf.clone().view(datum.inputs["target_tokens"].shape), *inputs])
            total = total + with_gradient(loss, leaf, own)
            for key, value in named.items():
                add_metric(metrics, key, value.detach(), 1)
        return total, metrics


def with_gradient(loss: Tensor, leaf: Tensor, logprobs: Tensor) -> Tensor:
    """Return a traced loss as one of `logprobs`, linear in them about their values. Raises RequestError."""
    if not loss.requires_grad:  # in a pass without a backward, or none of them counts
        return loss
    try:
        (gradient,) = torch.autograd.grad(loss, leaf)
    except RuntimeError as error:
        raise RequestError(f"graph: its gradient cannot be computed: {in_one_line(error)}") from None
    return loss.detach() + (gradient * (logprobs - logprobs.detach())).sum()


def nothing(logprobs: Tensor) -> Tensor:
    """Return a loss of 0 that has a backward: ranks wait for each other there."""
    return logprobs[:0].sum(dtype=torch.float64)


def flat(data: list[Datum], name: str) -> np.ndarray:
    """Return an input of all data, one after the other, as an array of its own."""
    return np.concatenate([datum.inputs[name].reshape(-1) for datum in data])


LOSSES = {
    "cross_entropy": Loss(ce_loss, ("weights",), dims=(1, 2)),
    "importance_sampling": Loss(aipo_loss, options=lambda config: {"delta": NO_BOUND}),
    "ppo": Loss(
        ppo_loss,
        may=(*CLIPS,),
        config=(*CLIPS.items(),),
        options=_of_clips("clip_low", "clip_high", about_one=True),
    ),
    "cispo": Loss(
        cispo_loss,
        may=(*CLIPS,),
        config=(*CLIPS.items(),),
        options=_of_clips("clip_low", "clip_high", about_one=False),
    ),
    "dro": Loss(dro_loss, config=(("beta", 0.05),)),
    "gspo": Loss(
        gspo_loss,
        may=("sequence_ratio_mask",),
        config=(("clip_low_threshold", 1 - 3e-4), ("clip_high_threshold", 1 + 4e-4)),  # those of the paper
        options=lambda config: {
            **_of_clips("clip_ratio_low", "clip_ratio_high", about_one=True)(config),
            "agg_mode": "token_mean",
        },
    ),
}
"""cross_entropy: -sum w * t. importance_sampling: -sum r * A. ppo: -sum min(r * A, clip(r) * A). cispo: -sum clip(r) *
A * t, without a gradient of r. gspo: ppo with one r for each sequence, the geometric mean over the tokens of
`sequence_ratio_mask`, or without it over those with an advantage other than 0."""
REFUSED = {"stable_reinforce": "its rule is not public: choose importance_sampling, ppo or cispo (loss_fn=…)"}


def loss_of(name: str, config: Mapping[str, float | str]) -> tuple[Loss, dict[str, Any]]:
    """Return a loss by its name, and the settings of a call. Raises RequestError."""
    if name == "custom":
        traced = Traced.of_id(config.get("loss_id"))
        names = tuple(given.name for given in traced.inputs[1:])
        loss: Loss = TracedLoss(None, names, dims=(traced.inputs[0].rank,), traced=traced)
    elif name in LOSSES:
        loss = LOSSES[name]
    else:
        known = ", ".join((*LOSSES, "custom"))
        raise RequestError(f"loss_fn={name[:80]}: {REFUSED.get(name, f'there is no such loss; known are {known}')}")
    return loss, loss.settings(name, config)


def check_data(data: list[Datum], name: str, loss: Loss, vocabulary: int, longest: int) -> None:
    """Raise RequestError, naming the field, for data that the loss cannot be computed of."""
    if not data:
        raise RequestError("data is empty")
    for key in loss.may:
        if len({key in datum.inputs for datum in data}) > 1:
            raise RequestError(f"loss_fn_inputs.{key}: some of the data have it and some do not")
    for place, datum in enumerate(data):
        check_tokens(datum.tokens, f"data[{place}].model_input", vocabulary, longest)
        where = f"data[{place}].loss_fn_inputs"
        needed = ("target_tokens", *loss.needs)
        if missing := [key for key in needed if key not in datum.inputs]:
            raise RequestError(f"{where}.{missing[0]} is missing: {name} needs {', '.join(needed)}")
        targets = datum.inputs["target_tokens"]
        if targets.dtype != np.int64:
            raise RequestError(f"{where}.target_tokens has the dtype {targets.dtype}: int64 is wanted")
        if targets.ndim not in loss.dims or len(targets) != len(datum.tokens):
            raise RequestError(f"{where}.target_tokens has shape {list(targets.shape)} for {len(datum.tokens)} tokens")
        check_tokens(targets.flatten().tolist(), f"{where}.target_tokens", vocabulary, None)
        if fault := loss.fault(datum):
            raise RequestError(f"{where}.{fault}")
        for key, values in datum.inputs.items():
            if not np.isfinite(values).all():
                raise RequestError(f"{where}.{key}[{int(np.argmin(np.isfinite(values)))}] is not a finite number")
        if "logprobs" in datum.inputs and not (datum.inputs["logprobs"] > SENTINEL_CEILING).all():
            raise RequestError(f"{where}.logprobs has a number below {SENTINEL_CEILING:g}, which is no logprob")


def check_tokens(tokens: list[int], where: str, vocabulary: int, longest: int | None) -> None:
    """Raise RequestError for token ids that a model does not have, for none, and for more than `longest`."""
    if not tokens:
        raise RequestError(f"{where} has no tokens")
    if longest is not None and len(tokens) > longest:
        raise RequestError(f"{where} has {len(tokens)} tokens, above model.max_model_len={longest}")
    if not 0 <= min(tokens) <= max(tokens) < vocabulary:
        wrong = next(token for token in tokens if not 0 <= token < vocabulary)
        raise RequestError(f"{where}: {wrong} is no token of this model, whose vocabulary has {vocabulary}")
